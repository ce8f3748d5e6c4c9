"""Metrics as plain numbers that a scrape reads, since some are counted for every token.

Prometheus' own counters take a lock and check themselves at every count. These belong to one event
loop. Knows the library's families and nothing of what is counted.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class Tally:
    """A count that only grows."""

    __slots__ = ("count", "created")

    def __init__(self) -> None:
        self.count = 0
        self.created = time.time()

    def inc(self, amount: int = 1) -> None:
        """Counts so many more."""
        self.count += amount


class Tallies(Collector):
    """A family of counters, one for each tuple of values of its `labels`."""

    def __init__(self, name: str, text: str, labels: Sequence[str] = ()) -> None:
        self._about = name, text, tuple(labels)
        self._tallies: dict[tuple[str, ...], Tally] = {}

    def of(self, *values: str) -> Tally:
        """The counter with these values; there from now on."""
        tally = self._tallies.get(values)
        if tally is None:
            tally = self._tallies[values] = Tally()
        return tally

    def collect(self) -> Iterator[Metric]:
        name, text, labels = self._about
        family = CounterMetricFamily(name, text, labels=labels)
        for values, tally in self._tallies.items():
            family.add_metric(values, float(tally.count), tally.created)
        yield family


class Times(Collector):
    """A histogram of seconds. `bounds`: upper ends of its buckets, but for the last, infinite."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._about = name, text
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._created = time.time()

    def observe(self, seconds: float) -> None:
        """Counts one."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def collect(self) -> Iterator[Metric]:
        name, text = self._about
        family, upto = HistogramMetricFamily(name, text), 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            upto += count
            buckets.append((bound, float(upto)))
        family.add_metric((), buckets, self._sum)
        family.add_sample(f"{name}_created", {}, self._created)
        yield family
