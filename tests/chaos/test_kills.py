"""The storm of `tools/chaos kills`, in short: gateways die, and no text is another."""

from __future__ import annotations

import random
from collections import Counter

from chaos.fault_run import FaultRun
from chaos.kills import POOL, Kills, drawn
from harness.server import ServerUnderTest, name_of

REATTACH = 15.0  # seconds in which gateways start and clients resume their streams
FORGOTTEN = 45.0  # seconds in which all is forgotten that waited for a client


def test_victims_are_of_every_kind_alike():
    stages = ["tokenizer-0", "detokenizer-0", "scheduler-0", "scheduler-1"]
    stages += [f"engine-{group}-{rank}" for group in range(2) for rank in range(4)]
    victims = drawn(stages, 200, random.Random(3))
    assert Counter(map(name_of, victims)) == dict.fromkeys(
        ("tokenizer", "detokenizer", "scheduler", "engine"), 50
    )
    assert set(victims) == set(stages)


def test_streams_in_every_dialect_outlive_killed_gateways_and_nothing_is_left():
    source = random.Random(6)
    faults = FaultRun(streams=8, tokens=60, source=source, gateway_dies=True)
    settings = {**POOL, "reattach": REATTACH, "log_level": "warning"}
    faults.serve(ServerUnderTest(settings), Kills(source, kills=2, only="gateway"))
    assert not faults.broken
    assert faults.resumed >= 2 and faults.retried >= 2 and faults.answers >= 8
    assert faults.emptied < FORGOTTEN, "nothing waits for the end of a minute"
