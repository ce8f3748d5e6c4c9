"""The storm of `tools/chaos kills`, in short: ranks of two groups die, and no text is another."""

from __future__ import annotations

import random
from collections import Counter

from chaos.kills import POOL, Kills, drawn
from chaos.ordeal import Ordeal
from chaos.serving import Serving


def test_no_text_changes_while_ranks_of_two_groups_are_killed():
    source = random.Random(5)
    ordeal = Ordeal(streams=8, tokens=60, source=source)
    server = Serving({**POOL, "tp": 2, "dp": 2, "log_level": "warning"})
    ordeal.serve(server, Kills(source, kills=2, only="engine"))
    assert not ordeal.broken
    assert sum(map(len, ordeal.pauses.values())) == 2, "both kills hit streams under way"
    assert ordeal.answers >= 8


def test_victims_are_of_every_kind_alike():
    stages = [("tokenizer", 0, 0), ("detokenizer", 0, 0), ("scheduler", 0, 0), ("scheduler", 1, 0)]
    stages += [("engine", group, rank) for group in range(2) for rank in range(4)]
    victims = drawn(stages, 200, random.Random(3))
    assert Counter(name for name, _, _ in victims) == dict.fromkeys(
        ("tokenizer", "detokenizer", "scheduler", "engine"), 50
    )
    assert set(victims) == set(stages)
