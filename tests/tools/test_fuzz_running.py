"""Programs for a scheduler and engines in a running epoch: what they reach, and what they find."""

from __future__ import annotations

import logging
from random import Random

import pytest
from planted_faults import PLANTS, plant

from fuzz import cores
from fuzz.cores import Program
from fuzz.engines import Wrong
from pipeinfer.bus import frames
from pipeinfer.scheduler import engine_state
from pipeinfer.scheduler.engine_state import PageAllowance, PageCredits

ENOUGH = 150  # programs in which a fault is found
PLACES = (  # that a planted fault may change
    (PageCredits, "on_page_counts"), (PageAllowance, "tokens_that_fit"), (engine_state, "_checked"),
)  # fmt: skip


@pytest.fixture(autouse=True)
def logged_afterwards(monkeypatch):
    """A target silences what it feeds; later tests of this process look at the log."""
    logger = logging.getLogger("pipeinfer")
    monkeypatch.setattr(logger, "level", logger.level)
    yield
    monkeypatch.undo()
    logger.setLevel(logger.level)  # so that loggers below it ask anew


def programs(many: int) -> list[Program]:
    source = Random(1)
    return [Program(source.randbytes(300)) for _ in range(many)]


def test_each_stage_takes_a_message_of_each_kind_that_reaches_it():
    target = cores.make()
    for seed in target.seeds():
        target.one(seed)


def test_a_program_begins_with_steps_in_flight():
    group = cores.Group(Program(b""))
    group.begin()
    stats = group.scheduler.stats()
    assert stats["in_flight"] > 0 and stats["running"] > 0
    assert all(core.stats()["slots_used"] > 0 for core in group.ranks)


def test_some_programs_lie_and_some_do_not_and_no_core_raises():
    lied, epochs = [], 0
    for program in programs(16):
        group = cores.Group(program)
        group.run(program)
        lied.append(group.lied)
        epochs += group.scheduler.stats()["epochs_total"]
    assert True in lied and False in lied
    assert epochs > len(lied), "some of what was told could not be, and ended its epoch"


@pytest.mark.parametrize("name", [name for name in PLANTS if PLANTS[name].target == "cores"])
def test_a_planted_fault_is_found_by_a_program(name, monkeypatch):
    for owner, attribute in PLACES:
        monkeypatch.setattr(owner, attribute, getattr(owner, attribute))  # to be put back
    monkeypatch.setattr(frames, "_checks", dict(frames._checks))
    plant(name)
    with pytest.raises((Wrong, ValueError)):
        for program in programs(ENOUGH):
            cores.run(program)
