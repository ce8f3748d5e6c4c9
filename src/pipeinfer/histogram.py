"""Histograms of durations, as plain numbers that heartbeats can carry. Reads no clock."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

# Upper bounds of buckets in seconds, for latencies of requests. From 0.3 on they are those of
# vLLM's dashboards; the shorter ones resolve the latencies of an idle server.
OF_REQUESTS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0,
    30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip


class Histogram:
    """Counts of observations since the start.

    bounds: upper bounds of the buckets, ascending, in the observations' unit; the last bucket has
        none.
    counts: observations of each bucket alone, len(bounds) + 1 numbers.
    total: the sum of all observations.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = OF_REQUESTS) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Counts one observation."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def at_most(self) -> Iterator[tuple[float, int]]:
        """(bound, number of observations at or below it) for each bound; last (infinity, all
        observations).
        """
        upto = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            upto += count
            yield bound, upto

    def statistics(self, name: str) -> dict[str, float]:
        """The histogram as statistics of a heartbeat, under the names of `names_of`."""
        values = (*(float(count) for _, count in self.at_most()), self.total)
        return dict(zip(names_of(name, self.bounds), values, strict=True))


def names_of(name: str, bounds: Sequence[float] = OF_REQUESTS) -> list[str]:
    """The names of a histogram's statistics: `NAME_seconds_le_BOUND` for each bound,
    `NAME_seconds_count` and `NAME_seconds_sum`.
    """
    buckets = [f"{name}_seconds_le_{bound:g}" for bound in bounds]
    return [*buckets, f"{name}_seconds_count", f"{name}_seconds_sum"]


def read(
    statistics: Mapping[str, float], name: str, bounds: Sequence[float] = OF_REQUESTS
) -> tuple[list[tuple[float, float]], float] | None:
    """Reads a histogram back from the statistics of a heartbeat.

    Returns what `at_most` and `total` of the histogram were; None if `statistics` have no histogram
    `name`.
    """
    *buckets, count, total = names_of(name, bounds)
    if count not in statistics:
        return None
    counts = (statistics.get(one, 0.0) for one in (*buckets, count))
    return list(zip((*bounds, float("inf")), counts, strict=True)), statistics.get(total, 0.0)
