"""Plans and results that are lost on their way, between processes that live on, cost seconds; and
plans that are lost cost no epoch, as long as they are kept."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_scheduler_core import pipeline

from pipeinfer.core import Tick
from pipeinfer.messages import Digests, MissedPlan, Plan, Result
from pipeinfer.scheduler.engine_state import LATE_SECONDS, EngineState
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


def test_an_engine_that_missed_the_last_plans_hears_of_it_and_gets_them_again():
    p = running()
    hears, p.engine.receive = p.engine.receive, lambda plan: None
    while p.deliver():  # all results come; what is published meanwhile is lost
        continue
    p.engine.receive = hears
    [(late, probe)] = plans(p, LATE_SECONDS + 0.5)
    assert late >= LATE_SECONDS
    assert not (probe.releases or probe.admits or probe.slots)
    lost = list(range(p.engine.plans.expected, probe.number))
    p.engine.receive(probe)
    assert len(lost) == 2 and p.engine.outbox == deque([MissedPlan(1, 0, lost[0])])
    p.settle()
    assert p.core.counts["epochs"] == 1 and p.core.counts["repeated_plans"] == 3


def test_a_plan_that_is_not_kept_ends_the_epoch_and_nobody_is_blamed():
    for missing in (0, 99):  # its result has come, or it was never made
        p = running()
        while p.engine.plans.expected < 4:
            p.deliver()
        p.feed(MissedPlan(1, 0, missing))
        assert p.core.state() == ("waiting", p.core._epochs.reason)
        assert f"rank 0: plan {missing} is missing and is not kept" in p.core.state()[1]
        p.feed(MissedPlan(1, 0, missing))  # of an epoch that is over
        p.settle()
        assert p.core.counts["epochs"] == 2 and p.core._planner.quarantined == 0


@given(tp=st.integers(1, 3), said=st.lists(st.integers(0, 3), max_size=60), size=st.integers(1, 4))
def test_plans_are_kept_until_all_ranks_have_applied_them_and_no_longer(tp, said, size):
    """3: a plan is published; else that rank says of some plans, or of a result, that they are
    applied."""
    state, applied, published = EngineState(tp), [0] * tp, 0
    for rank in said:
        if rank == 3:
            plan = Plan(1, published, (), (), b"", b"")
            state.in_flight.add(published, [], 0.0)
            state.published.add(plan)
            published += 1
        elif rank == 0 and applied[0] < published:
            empty = Result(1, applied[0], *[b""] * 6, free=0, evictable=0, digest=5)
            assert list(state.process_result(empty)) == []
            applied[0] += 1
        elif 0 < rank < tp:
            some = min(size, published - applied[rank])
            state.on_digests(Digests(1, rank, applied[rank], np.full(some, 5, "<u8").tobytes()))
            applied[rank] += some
        kept = list(range(min(applied), published))
        assert len(state.published) == len(kept)
        for number in range(published + 2):
            again = [plan.number for plan in state.published.since(number)]
            assert again == ([one for one in kept if one >= number] if number in kept else [])
    state.on_epoch_lost()
    assert state.published.since(0) == ()


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
    p.core._end_epoch("a result is lost", 1.0, not_request_fault=True)
    assert heard == [True]
