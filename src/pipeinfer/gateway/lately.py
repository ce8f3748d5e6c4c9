"""Quantiles of the last minute, from counters that only grow.

Knows histograms by their buckets, and no request. The time is passed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

QUANTILES = (50, 90, 99)  # in percent: those that are shown
WINDOW = 60.0  # seconds
EVERY = 1.0  # seconds between two snapshots that are kept


class Lately:
    """What fell into each bucket in the last WINDOW seconds. `bounds`: upper ends, in seconds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = (0.0, *bounds)
        self._kept: deque[tuple[float, list[float]]] = deque()

    def take(self, totals: Sequence[float], now: float) -> None:
        """`totals`: how many were at most each bound, and how many there were; since ever."""
        if not self._kept or now - self._kept[-1][0] >= EVERY:
            self._kept.append((now, list(totals)))
        while len(self._kept) > 1 and now - self._kept[1][0] >= WINDOW:
            self._kept.popleft()
        self._now = list(totals)

    @property
    def count(self) -> int:
        """How many there were in that time."""
        return int(self._now[-1] - self._kept[0][1][-1])

    def quantile(self, share: float) -> float | None:
        """Seconds; as evenly spread within a bucket as may be. None if there were none."""
        grown = [now - then for now, then in zip(self._now, self._kept[0][1], strict=True)]
        if grown[-1] <= 0:
            return None
        wanted = share * grown[-1]
        below = 0.0
        for number, upto in enumerate(grown[:-1]):
            if upto >= wanted and upto > below:
                low, high = self._bounds[number], self._bounds[number + 1]
                return low + (high - low) * (wanted - below) / (upto - below)
            below = upto
        return self._bounds[-1]
