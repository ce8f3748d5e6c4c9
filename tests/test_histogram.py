"""Seconds are counted by bucket, and come out of a heartbeat as they went in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.histogram import OF_REQUESTS, Histogram, names_of, read


@given(st.lists(st.sampled_from(OF_REQUESTS) | st.floats(0, 10_000)))
def test_what_a_heartbeat_carries_is_what_was_observed(seconds: list[float]) -> None:
    made = Histogram()
    for one in seconds:
        made.observe(one)
    said = made.statistics("queue")
    assert list(said) == names_of("queue")
    at_most, total = read(said, "queue") or ([], -1.0)
    assert at_most == list(made.at_most()) and total == made.total
    assert at_most[-1] == (float("inf"), len(seconds))
    assert all(count == sum(one <= bound for one in seconds) for bound, count in at_most)


def test_who_says_nothing_of_it_has_no_histogram() -> None:
    assert read({"uptime_seconds": 1.0}, "queue") is None
