"""Counters and histograms of one event loop, cheap enough for every token.

Prometheus' own counters take a lock and check their labels at every count. Knows the library's
families, and not what is counted.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from math import inf

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pipeinfer.core import Histogram


class MetricCounter:
    """A count that only grows. created: Unix seconds."""

    __slots__ = ("count", "created")

    def __init__(self) -> None:
        self.count = 0
        self.created = time.time()

    def inc(self, amount: int = 1) -> None:
        """Adds to the count."""
        self.count += amount


class CounterFamily(Collector):
    """A family of counters, one for each tuple of values of its `labels`."""

    def __init__(self, name: str, text: str, labels: Sequence[str] = ()) -> None:
        self._about = name, text, tuple(labels)
        self._counters: dict[tuple[str, ...], MetricCounter] = {}

    def labels(self, *values: str) -> MetricCounter:
        """The counter with these values of its labels; made on first use."""
        counter = self._counters.get(values)
        if counter is None:
            counter = self._counters[values] = MetricCounter()
        return counter

    def collect(self) -> Iterator[Metric]:
        name, text, labels = self._about
        family = CounterMetricFamily(name, text, labels=labels)
        for values, counter in self._counters.items():
            family.add_metric(values, float(counter.count), counter.created)
        yield family


class SecondsHistogram(Collector):
    """A histogram of seconds. bounds: upper ends of all buckets but the last, infinite one."""

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
    """Adds a histogram, as of Histogram.at_most, to a family, under these values of its labels."""
    buckets = [(_bound(bound), float(count)) for bound, count in at_most]
    family.add_metric(labels, buckets, total)


def _bound(bound: float) -> str:
    """The bound as Prometheus writes it."""
    return "+Inf" if bound == inf else str(float(bound))
