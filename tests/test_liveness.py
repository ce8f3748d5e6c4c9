"""However many stages there are, a gateway hears so many heartbeats a second and no more."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.liveness import (
    HEARTBEAT_SECONDS,
    MAX_HEARTBEAT_RATE,
    heartbeat_period,
    silence_limit,
)


@given(st.integers(1, 100_000))
def test_all_heartbeats_together_are_bounded_and_silence_is_several_of_them(stages):
    assert stages <= MAX_HEARTBEAT_RATE * heartbeat_period(stages) * (1 + 1e-9)
    assert heartbeat_period(stages) >= HEARTBEAT_SECONDS
    assert silence_limit(stages) >= 3 * heartbeat_period(stages)


def test_a_small_deployment_hears_everybody_twice_a_second():
    assert (
        heartbeat_period(50) == 0.5 and silence_limit(50) == 5.0 and silence_limit(50, 3.0) == 3.0
    )
    assert heartbeat_period(256 * 9 + 3) < 24 and silence_limit(256, 3.0) < 8
