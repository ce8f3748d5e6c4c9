"""A scheduler that was stopped for longer than the watchdog's time blames nobody for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_scheduler_core import pipeline

from pipeinfer.core import MAX_TICK_GAP, SuspendAwareClock, Tick
from pipeinfer.messages import GroupFault


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 5, width=32)), max_size=40))
def test_the_clock_never_runs_back_and_counts_at_most_a_pause_between_ticks(steps):
    clock, now, before, since = SuspendAwareClock(), 100.0, 100.0, None
    for ticks, seconds in steps:
        now += seconds
        if ticks:
            clock.tick(now)
        assert clock.at(now) >= before - 1e-9
        if ticks:
            if since is not None:
                assert clock.at(now) - since[1] == pytest.approx(min(now - since[0], MAX_TICK_GAP))
            since = now, clock.at(now)
        before = clock.at(now)


def ticks(p, seconds: float) -> list:
    """Ten a second, with nothing from the engine; what is said of the group."""
    faults = []
    for _ in range(round(10 * seconds)):
        p.now += 0.1
        faults += [s.message for s in p.feed(Tick()) if isinstance(s.message, GroupFault)]
    return faults


def running():
    p = pipeline()
    p.deliver()
    p.deliver()
    p.submit([1, 2, 3], 5)
    assert ticks(p, 1) == [] and p.engine.outbox
    return p


def test_results_that_wait_in_the_inbox_of_a_stopped_scheduler_are_read_first():
    p = running()
    p.now += 3_600  # stopped, or the machine slept; the tick is heard before the results
    assert [s for s in p.feed(Tick()) if isinstance(s.message, GroupFault)] == []
    p.settle()
    assert p.core.counts["epochs"] == 1


def test_an_engine_that_hangs_is_found_although_the_scheduler_was_stopped_again_and_again():
    p = running()
    for _ in range(3):
        p.now += 50
        assert ticks(p, 30) == []
    faults = ticks(p, 40)
    assert faults
    assert "no result of plan" in faults[0].reason


def test_ranks_that_answered_a_stopped_schedulers_epoch_are_not_torn():
    p = pipeline()
    p.deliver()  # hello; its epoch has begun, and Ready waits
    assert ticks(p, 1) == []
    p.now += 3_600
    assert ticks(p, 1) == []
    p.deliver()
    assert p.core.state() == ("ready", "")


def test_a_deadline_goes_by_the_clock_on_the_wall():
    p = running()
    p.clients["r0"].cut = 0
    p.core._live["r0"].deadline = p.now + 30
    p.core._live._deadlines.set("r0", p.now + 30)
    p.now += 31
    [send] = [s for s in p.core.handle(Tick(), p.now) if s.channel == "tokens"]
    assert send.message.rows[0].finish == "abort"
