"""Plans and results that are lost on their way, between processes that live on, cost seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from model_engine import Panic
from test_scheduler_core import pipeline

from pipeinfer.core import Tick
from pipeinfer.messages import Fault, Plan
from pipeinfer.scheduler.engine_state import LATE_SECONDS
from pipeinfer.wire import pack


def running():
    """Two requests, with two steps in flight; the engine has the plans of both."""
    p = pipeline()
    p.deliver()
    p.deliver()
    p.submit([1, 2, 3], 5)
    p.submit([4, 5, 6, 7], 9)
    for _ in range(4):
        p.deliver()
    assert len(p.core._engine.in_flight) == 2 and p.engine.outbox
    return p


def plans(p, seconds: float) -> list[tuple[float, Plan]]:
    """Those that are published within that time, and when; nothing comes from the engine."""
    began, found = p.now, []
    while p.now < began + seconds:
        p.now += 0.1
        sends = p.core.handle(Tick(), p.now)
        found += [(p.now - began, s.message) for s in sends if isinstance(s.message, Plan)]
    return found


def test_an_engine_that_missed_the_last_plans_hears_of_it_and_nobody_is_blamed():
    p = running()
    hears, p.engine.receive = p.engine.receive, lambda plan: None
    while p.deliver():  # all results come; what is published meanwhile is lost
        continue
    p.engine.receive = hears
    [(late, probe)] = plans(p, LATE_SECONDS + 0.5)
    assert late >= LATE_SECONDS
    assert not (probe.releases or probe.admits or probe.slots)
    with pytest.raises(Panic, match="was expected"):
        p.engine.receive(probe)
    p.feed(Fault(p.engine.epoch, 0, "a gap", orderly=True))
    p.settle()
    assert p.core.counts["epochs"] == 2
    assert p.core._planner.quarantined == 0


def test_a_lost_result_ends_the_epoch_when_the_next_one_comes_and_nobody_is_blamed():
    p = running()
    p.engine.outbox.clear()
    [(_, probe)] = plans(p, LATE_SECONDS + 0.5)
    p.engine.receive(probe)
    p.deliver()
    assert p.core.state()[0] == "waiting" and "was expected" in p.core.state()[1]
    assert p.core._planner.quarantined == 0
    p.settle()
    assert p.core.counts["epochs"] == 2


def test_an_engine_that_is_only_slow_is_asked_ever_more_rarely_and_goes_on():
    p = running()
    found = plans(p, 60)
    assert [round(late) for late, _ in found] == [2, 4, 8, 16, 32]
    for _, probe in found:
        assert probe.slots == pack([])
        p.engine.receive(probe)
    p.settle()
    assert p.core.counts["epochs"] == 1


def test_who_is_asked_nothing_has_nothing_to_say():
    p = pipeline()
    p.deliver()
    p.deliver()
    assert plans(p, 60) == []


@pytest.mark.parametrize("tp", [1, 2])
def test_an_epoch_that_ends_for_nobodys_fault_blames_nobody_of_several_ranks_either(
    tp: int, monkeypatch
):
    p = running()
    p.core.options = replace(p.core.options, tp=tp)
    heard: list[bool] = []
    monkeypatch.setattr(p.core._planner, "on_epoch_lost", lambda *lost: heard.append(lost[2]))
    p.core._end_epoch("a result is lost", 1.0, blameless=True)
    assert heard == [True]
