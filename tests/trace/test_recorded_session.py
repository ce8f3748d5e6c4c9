"""A recorded session replays in fresh cores, from the start and from a snapshot at any point."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rebuilt import events, fresh, outputs

from pipeinfer.memory.prefix_cache import RadixCache
from pipeinfer.messages import Abort, Plan, StopHit
from pipeinfer.trace.snapshot import restore, snapshot
from servers import STAGES

quickly = settings(
    max_examples=6,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def test_the_session_has_what_makes_replay_hard(recorded):
    plans = [m for _, out in events(recorded["scheduler"]) for m in out if isinstance(m, Plan)]
    inputs = [event for (_, event), _ in events(recorded["scheduler"])]
    admitted = [admit.request_id for plan in plans for admit in plan.admits]
    assert len(admitted) > len(set(admitted)), "nobody was preempted"
    assert any(isinstance(event, Abort) for event in inputs)
    assert any(isinstance(event, StopHit) for event in inputs)


@pytest.mark.parametrize("stage", STAGES)
def test_a_fresh_core_says_again_what_was_recorded(recorded, stage):
    trace = recorded[stage]
    core = fresh(trace)
    for number, (event, expected) in enumerate(events(trace)):
        assert outputs(core, event) == expected, (number, event)
    assert trace.truncated == ""


@pytest.mark.parametrize("stage", STAGES)
@quickly
@given(data=st.data())
def test_a_core_restored_from_a_snapshot_goes_on_exactly_like_the_original(recorded, stage, data):
    trace = recorded[stage]
    all_events = events(trace)
    point = data.draw(st.integers(0, len(all_events) - 1))
    original = fresh(trace)
    for event, _ in all_events[:point]:
        outputs(original, event)
    state = snapshot(original)
    copy = fresh(trace)
    restore(copy, state)
    assert snapshot(original) == state, "taking a snapshot changes nothing"
    assert copy.stats() == original.stats() and copy.state() == original.state()
    for event, _ in all_events[point:]:
        assert outputs(copy, event) == outputs(original, event)
    assert copy.stats() == original.stats() and copy.idle() == original.idle()
    assert snapshot(copy) == snapshot(original)


def test_a_constant_that_a_state_refers_to_may_come_back_as_a_copy():
    """The roots of a tree share a module's empty array; a restored root has one of its own."""

    def grown(cache: RadixCache, salt: str) -> None:
        cache.insert(np.arange(8, dtype=np.int32), np.arange(2, dtype=np.int32), salt, 1)

    original, copy = RadixCache(page_size=4), RadixCache(page_size=4)
    grown(original, "one")
    restore(copy, snapshot(original))
    for cache in (original, copy):
        grown(cache, "another")
    assert snapshot(copy) == snapshot(original)
