"""The storm of `tools/chaos kills`, in short: ranks of two groups die, and no text is another."""

from __future__ import annotations

import random
from collections import Counter

from chaos.fault_run import FaultRun
from chaos.kills import POOL, Kills, drawn
from harness.server import ServerUnderTest


def test_no_text_changes_while_ranks_of_two_groups_are_killed():
    source = random.Random(5)
    faults = FaultRun(streams=8, tokens=60, source=source)
    server = ServerUnderTest({**POOL, "tp": 2, "dp": 2, "log_level": "warning"})
    faults.serve(server, Kills(source, kills=2, only="engine"))
    assert not faults.broken
    assert sum(map(len, faults.pauses.values())) == 2, "both kills hit streams under way"
    assert faults.answers >= 8


def test_victims_are_of_every_kind_alike():
    stages = [("tokenizer", 0, 0), ("detokenizer", 0, 0), ("scheduler", 0, 0), ("scheduler", 1, 0)]
    stages += [("engine", group, rank) for group in range(2) for rank in range(4)]
    victims = drawn(stages, 200, random.Random(3))
    assert Counter(name for name, _, _ in victims) == dict.fromkeys(
        ("tokenizer", "detokenizer", "scheduler", "engine"), 50
    )
    assert set(victims) == set(stages)
