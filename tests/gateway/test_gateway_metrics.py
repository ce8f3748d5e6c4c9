"""A gateway's own counters are exposed as the library's would be; latencies of the last seconds."""

from __future__ import annotations

import re
from bisect import bisect_left

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import choose_encoder

from pipeinfer.gateway.metrics import WINDOW, CounterFamily, RollingHistogram, SecondsHistogram

BOUNDS = (0.001, 0.25, 1.0, 10.0, 120.0)


def exposed(registry: CollectorRegistry, accept: str) -> str:
    """The text of a scrape, without the times when counting began."""
    text = choose_encoder(accept)[0](registry).decode()
    return re.sub(r"(_created\S* )\S+", r"\1T", text)


def same(ours: CollectorRegistry, theirs: CollectorRegistry) -> None:
    for accept in ("", "application/openmetrics-text"):
        assert exposed(ours, accept) == exposed(theirs, accept)
        assert "_created" in exposed(ours, accept)


@given(st.lists(st.sampled_from(BOUNDS) | st.floats(0, 200), max_size=30))
def test_times_are_a_histogram(seconds: list[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    times = SecondsHistogram("a_time_seconds", "How long.", BOUNDS)
    ours.register(times)
    histogram = Histogram("a_time_seconds", "How long.", buckets=BOUNDS, registry=theirs)
    for one in seconds:
        times.observe(one)
        histogram.observe(one)
    same(ours, theirs)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9)), min_size=1, max_size=20))
def test_tallies_are_counters(counted: list[tuple[str, int]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tallies = CounterFamily("things", "How many.", ("kind",))
    ours.register(tallies)
    counter = Counter("things", "How many.", ["kind"], registry=theirs)
    for kind, amount in counted:
        tallies.labels(kind).inc(amount)
        counter.labels(kind).inc(amount)
    same(ours, theirs)


ROLLING_BOUNDS = (0.01, 0.1, 1.0, 10.0)
INF = float("inf")
seconds = st.floats(0.0001, 9.9)


def totals(values: list[float]) -> list[float]:
    """As a histogram counts: how many were at most each bound, and all."""
    return [float(sum(v <= bound for v in values)) for bound in (*ROLLING_BOUNDS, INF)]


@given(st.lists(seconds, min_size=1, max_size=50), st.sampled_from((0.5, 0.9, 0.99)))
def test_a_quantile_lies_in_the_right_bucket(values: list[float], share: float) -> None:
    lately = RollingHistogram(ROLLING_BOUNDS)
    lately.update(totals([]), 0.0)
    lately.update(totals(values), 1.0)
    found = lately.quantile(share)
    true = float(np.quantile(values, share, method="inverted_cdf"))
    assert found is not None
    assert bisect_left(ROLLING_BOUNDS, found) == bisect_left(ROLLING_BOUNDS, true)
    assert lately.count == len(values)


@given(st.lists(seconds, max_size=20), st.lists(seconds, min_size=1, max_size=20))
def test_what_is_older_than_the_window_is_gone(old: list[float], new: list[float]) -> None:
    lately, fresh = RollingHistogram(ROLLING_BOUNDS), RollingHistogram(ROLLING_BOUNDS)
    lately.update(totals([]), 0.0)
    lately.update(totals(old), 10.0)
    lately.update(totals(old), 10.0 + WINDOW)
    assert lately.count == 0 and lately.quantile(0.5) is None
    lately.update(totals(old + new), 11.0 + WINDOW)
    fresh.update(totals([]), 0.0)
    fresh.update(totals(new), 1.0)
    assert lately.count == len(new)
    assert lately.quantile(0.5) == fresh.quantile(0.5)


def test_beyond_the_last_bound_nothing_is_known_but_the_bound() -> None:
    lately = RollingHistogram(ROLLING_BOUNDS)
    lately.update(totals([]), 0.0)
    lately.update(totals([50.0]), 1.0)
    assert lately.quantile(0.5) == ROLLING_BOUNDS[-1]
