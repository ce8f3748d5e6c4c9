"""What is counted in plain numbers is exposed as the library's own metrics would be."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import choose_encoder

from pipeinfer.gateway.metrics import CounterFamily, SecondsHistogram

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
