"""However many stages there are, a gateway hears so many heartbeats a second and no more."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.beats import HEARTBEAT, MOST, period, silence


@given(st.integers(1, 100_000))
def test_all_heartbeats_together_are_bounded_and_silence_is_several_of_them(stages):
    assert stages <= MOST * period(stages) * (1 + 1e-9)
    assert period(stages) >= HEARTBEAT
    assert silence(stages) >= 3 * period(stages)


def test_a_small_deployment_hears_everybody_twice_a_second():
    assert period(50) == 0.5 and silence(50) == 5.0 and silence(50, 3.0) == 3.0
    assert period(256 * 9 + 3) < 24 and silence(256, 3.0) < 8
