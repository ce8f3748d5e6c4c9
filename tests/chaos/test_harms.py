"""What a storm does is drawn from its seed: kinds alike, stages as their kind allows."""

from __future__ import annotations

from collections import Counter

from chaos.harms import KINDS, LINKS, drawn

STAGES = ["gateway-0", "tokenizer-0", "detokenizer-0", "scheduler-0", "scheduler-1"]
STAGES += [f"engine-{group}-{rank}" for group in range(2) for rank in range(2)]
COUNT = 20 * len(KINDS)


def test_a_seed_says_every_harm_and_another_seed_says_others():
    assert drawn(list(KINDS), STAGES, COUNT, 7) == drawn(list(KINDS), STAGES[::-1], COUNT, 7)
    assert drawn(list(KINDS), STAGES, COUNT, 7) != drawn(list(KINDS), STAGES, COUNT, 8)


def test_a_storm_can_be_told_in_pieces():
    whole = drawn(list(KINDS), STAGES, COUNT, 3)
    assert drawn(list(KINDS), STAGES, 50, 3) == whole[:50]


def test_harms_are_of_every_kind_alike_and_hurt_every_stage():
    harms = drawn(list(KINDS), STAGES, COUNT, 1)
    assert Counter(harm.kind for harm in harms) == dict.fromkeys(KINDS, 20)
    assert {stage for harm in harms for stage in harm.stages} == set(STAGES)


def test_the_gateway_is_stopped_and_cut_off_but_never_killed():
    harms = drawn(list(KINDS), STAGES, COUNT, 1)
    hurt = {harm.kind for harm in harms if "gateway-0" in harm.stages}
    assert hurt == {"stop", *LINKS}


def test_two_are_two_and_a_link_has_sockets():
    for harm in drawn(list(KINDS), STAGES, COUNT, 2):
        assert len(set(harm.stages)) == {"two": 2, "full": 0}.get(harm.kind, 1)
        assert bool(harm.sockets) == (harm.kind in LINKS)
        assert "plan" not in harm.sockets or harm.stages[0].startswith("scheduler-")
        assert "inbox" not in harm.sockets or harm.kind != "cut"
