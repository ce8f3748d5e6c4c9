"""Metrics as plain numbers that a scrape reads, since some are counted for every token.

Prometheus' own counters take a lock and check themselves at every count. These belong to one event
loop. Knows the library's families and nothing of what is counted.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from math import inf

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pipeinfer.histogram import Histogram


class Counter:
    """A count that only grows."""

    __slots__ = ("count", "created")

    def __init__(self) -> None:
        self.count = 0
        self.created = time.time()

    def inc(self, amount: int = 1) -> None:
        """Counts so many more."""
        self.count += amount


class CounterFamily(Collector):
    """A family of counters, one for each tuple of values of its `labels`."""

    def __init__(self, name: str, text: str, labels: Sequence[str] = ()) -> None:
        self._about = name, text, tuple(labels)
        self._counters: dict[tuple[str, ...], Counter] = {}

    def labels(self, *values: str) -> Counter:
        """The counter with these values; there from now on."""
        tally = self._counters.get(values)
        if tally is None:
            tally = self._counters[values] = Counter()
        return tally

    def collect(self) -> Iterator[Metric]:
        name, text, labels = self._about
        family = CounterMetricFamily(name, text, labels=labels)
        for values, tally in self._counters.items():
            family.add_metric(values, float(tally.count), tally.created)
        yield family


class SecondsHistogram(Collector):
    """A histogram of seconds. `bounds`: upper ends of its buckets, but for the last, infinite."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._about = name, text
        self._histogram = Histogram(bounds)
        self._created = time.time()
        self.observe = self._histogram.observe

    def collect(self) -> Iterator[Metric]:
        name, text = self._about
        family = HistogramMetricFamily(name, text)
        add_histogram(family, (), self._histogram.at_most(), self._histogram.total)
        family.add_sample(f"{name}_created", {}, self._created)
        yield family


def add_histogram(
    family: HistogramMetricFamily,
    labels: Sequence[str],
    at_most: Iterable[tuple[float, float]],
    total: float,
) -> None:
    """Adds what Histogram.at_most gives, under the values of the family's labels."""
    buckets = [(_bound(bound), float(count)) for bound, count in at_most]
    family.add_metric(labels, buckets, total)


def _bound(bound: float) -> str:
    """As Prometheus writes it."""
    return "+Inf" if bound == inf else str(float(bound))
