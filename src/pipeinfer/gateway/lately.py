"""What clients got in the last minute, from metrics that only grow.

Knows histograms by their buckets, and no request. The time is passed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pipeinfer.gateway.metrics import ITL_BUCKETS, TTFT_BUCKETS, Metrics
from pipeinfer.gateway.tallies import SecondsHistogram

QUANTILES = (50, 90, 99)  # in percent: those that are shown
WINDOW = 60.0  # seconds
SNAPSHOT_INTERVAL = 1.0  # seconds between two snapshots that are kept


class RollingHistogram:
    """What fell into each bucket in the last WINDOW seconds. `bounds`: upper ends, in seconds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = (0.0, *bounds)
        self._snapshots: deque[tuple[float, list[float]]] = deque()
        self._latest: list[float] = []

    def update(self, totals: Sequence[float], now: float) -> None:
        """`totals`: how many were at most each bound, and how many there were; since ever."""
        if not self._snapshots or now - self._snapshots[-1][0] >= SNAPSHOT_INTERVAL:
            self._snapshots.append((now, list(totals)))
        while len(self._snapshots) > 1 and now - self._snapshots[1][0] >= WINDOW:
            self._snapshots.popleft()
        self._latest = list(totals)

    @property
    def count(self) -> int:
        """How many there were in that time."""
        return int(self._latest[-1] - self._snapshots[0][1][-1])

    def quantile(self, share: float) -> float | None:
        """Seconds; as evenly spread within a bucket as may be. None if there were none."""
        grown = [now - then for now, then in zip(self._latest, self._snapshots[0][1], strict=True)]
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


class RollingLatencies:
    """The last minute of one gateway, for its heartbeats."""

    def __init__(self, metrics: Metrics) -> None:
        self._tokens = metrics.generated_tokens
        self._kinds = (
            ("ttft", metrics.time_to_first_token, RollingHistogram(TTFT_BUCKETS)),
            ("itl", metrics.inter_token, RollingHistogram(ITL_BUCKETS)),
        )

    def stats(self, now: float) -> dict[str, float]:
        """How many first outputs and later ones there were, and their quantiles in milliseconds
        where there are any. `now`: monotonic seconds."""
        told = {"output_tokens_total": float(self._tokens.count)}
        for name, histogram, lately in self._kinds:
            lately.update(_cumulative_counts(histogram), now)
            told[f"{name}_count"] = float(lately.count)
            for share in QUANTILES:
                told[f"{name}_ms_p{share}"] = (lately.quantile(share / 100) or 0.0) * 1e3
        return told


def _cumulative_counts(times: SecondsHistogram) -> list[float]:
    """How many were at most each bound, and all of them."""
    (family,) = times.collect()
    return [one.value for one in family.samples if one.name.endswith("_bucket")]
