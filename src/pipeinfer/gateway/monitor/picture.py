"""What is shown of a running pipeline at one moment: JSON for a page, lines for a terminal.

Knows the health table and names of statistics (docs/reference/statistics.md); no HTTP and no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from pipeinfer.gateway.health import Health, StageStatus
from pipeinfer.gateway.lately import QUANTILES
from pipeinfer.passages.durations import MINUTE

RATE_WINDOW = 5.0  # seconds over which rates are taken, at all places


class StageSnapshot(msgspec.Struct, frozen=True):
    """One process. `up`, `heard`: seconds since it began, and since it was heard. `rate`: what it
    did a second, in `unit`. `latency_ms`: see docs/page.md."""

    stage: str
    name: str
    group: int
    rank: int
    state: str
    reason: str
    pid: int
    up: float | None
    restarts: int
    last_restart: float | None
    heard: float | None
    waiting: int | None
    running: int | None
    rate: float
    unit: str
    latency_ms: float | None = None


class EdgeSnapshot(msgspec.Struct, frozen=True):
    """What goes from one kind of stage to another, a second."""

    source: str = msgspec.field(name="from")
    target: str = msgspec.field(name="to")
    rate: float
    unit: str


class KvPagesSnapshot(msgspec.Struct, frozen=True):
    """KV pages of a group: `cached` ones may be evicted, `used` ones not."""

    group: int
    total: int
    free: int
    cached: int
    used: int
    page_tokens: int


class LatencyQuantiles(msgspec.Struct, frozen=True):
    """Milliseconds, over the last minute; None where there was nothing."""

    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    count: int = 0


class PipelineSnapshot(msgspec.Struct, frozen=True):
    """All that is shown but steps and requests."""

    status: str
    reason: str
    stages: tuple[StageSnapshot, ...]
    edges: tuple[EdgeSnapshot, ...]
    pages: tuple[KvPagesSnapshot, ...]
    latency: dict[str, LatencyQuantiles]
    tokens_per_s: float
    requests_running: int
    requests_waiting: int


class StageStatistics(NamedTuple):
    """How a kind of stage is read: what it did a second (a statistic that only grows), in which
    unit, and which statistics are its queue and what it has in hand."""

    counter: str
    unit: str
    waiting: str = ""
    running: str = ""


STAGE_STATISTICS = {
    "gateway": StageStatistics("requests_total", "requests/s", "waiting", "running"),
    "tokenizer": StageStatistics("accepted_total", "requests/s", "encoding"),
    "scheduler": StageStatistics("plans_total", "steps/s", "waiting", "running"),
    "engine": StageStatistics("sampled_tokens_total", "tokens/s", "", "slots_used"),
    "detokenizer": StageStatistics("tokens_total", "tokens/s", "", "running"),
}
EDGES = (
    ("gateway", "tokenizer", "gateway", "requests_total", "requests/s"),
    ("tokenizer", "scheduler", "tokenizer", "accepted_total", "requests/s"),
    ("scheduler", "engine", "scheduler", "plans_total", "steps/s"),
    ("scheduler", "detokenizer", "detokenizer", "tokens_total", "tokens/s"),
    ("detokenizer", "gateway", "gateway", "output_tokens_total", "tokens/s"),
)


class _RateWindow:
    """The heartbeats of a stage between which its rates are taken: the last one, and the last that
    is at least SMOOTH older, or the first there is."""

    __slots__ = ("beats", "incarnation", "step_time")

    def __init__(self) -> None:
        self.beats: deque[tuple[float, Mapping[str, float]]] = deque()
        self.incarnation = 0
        self.step_time: tuple[float, float] | None = None  # an engine's, and when that was seen

    def add(self, row: StageStatus) -> None:
        if row.last_seen is None or (self.beats and row.last_seen == self.beats[-1][0]):
            return
        if row.incarnation != self.incarnation:
            self.beats.clear()
        self.incarnation = row.incarnation
        self.beats.append((row.last_seen, row.stats))
        while len(self.beats) > 1 and self.beats[1][0] <= row.last_seen - RATE_WINDOW:
            self.beats.popleft()
        before = self.beats[-2][1] if len(self.beats) > 1 else row.stats
        if row.stats.get("steps_total", 0.0) > before.get("steps_total", 0.0):
            self.step_time = (
                self.increase("busy_seconds") / self.increase("steps_total"),
                row.last_seen,
            )

    def increase(self, name: str) -> float:
        if not self.beats:
            return 0.0
        return self.beats[-1][1].get(name, 0.0) - self.beats[0][1].get(name, 0.0)

    def rate(self, name: str) -> float:
        seconds = self.beats[-1][0] - self.beats[0][0] if self.beats else 0.0
        return self.increase(name) / seconds if seconds > 0 else 0.0


class PipelineRates:
    """Figures of one pipeline, from its health table. `look` before, as often as is wanted: rates
    are those of the last SMOOTH seconds in which heartbeats were seen."""

    def __init__(self, health: Health) -> None:
        self._health = health
        self._windows = {stage: _RateWindow() for stage in health.stages}

    def update(self) -> None:
        """Notes the heartbeats that have come."""
        for stage, row in self._health.stages.items():
            self._windows[stage].add(row)

    def snapshot(
        self, status: str, now: float, unix: float, latency: Callable[[str], float | None]
    ) -> PipelineSnapshot:
        """Now, as `unix` says it to people. `latency(stage id)`: seconds, where it is known."""
        rows = self._health.stages.values()
        total = self._health.total
        return PipelineSnapshot(
            status=status,
            reason=self._health.reason(),
            stages=tuple(self._stage(row, now, unix, latency(row.stage)) for row in rows),
            edges=tuple(
                EdgeSnapshot(source=source, target=target, rate=self._rate(kind, stat), unit=unit)
                for source, target, kind, stat, unit in EDGES
            ),
            pages=tuple(
                _pages(row)
                for row in rows
                if row.name == "engine" and row.rank == 0 and "pages_total" in row.stats
            ),
            latency={name: self._latency(name) for name in ("ttft_ms", "itl_ms")},
            tokens_per_s=self._rate("engine", "sampled_tokens_total"),
            requests_running=int(total("scheduler", "running")),
            requests_waiting=int(total("scheduler", "waiting")),
        )

    def increase(self, stage: str, name: str) -> float:
        """By how much a statistic of a stage grew in the last SMOOTH seconds."""
        return self._windows[stage].increase(name)

    def rate(self, stage: str, name: str) -> float:
        """The same, a second."""
        return self._windows[stage].rate(name)

    def _stage(
        self, row: StageStatus, now: float, unix: float, seconds: float | None
    ) -> StageSnapshot:
        did, grown = STAGE_STATISTICS[row.name], self._windows[row.stage]
        if (
            row.name == "engine"
            and grown.step_time is not None
            and now - grown.step_time[1] <= MINUTE
        ):
            seconds = grown.step_time[0]
        elif row.name == "gateway" and row.stats.get("ttft_count"):
            seconds = row.stats["ttft_ms_p50"] / 1e3
        since = None if row.restarted_at is None else now - row.restarted_at
        return StageSnapshot(
            stage=row.stage,
            name=row.name,
            group=row.group,
            rank=row.rank,
            state=row.state,
            reason=row.reason,
            pid=row.pid,
            up=row.stats.get("uptime_seconds"),
            restarts=row.restarts,
            last_restart=None if since is None else unix - since,
            heard=None if row.last_seen is None else now - row.last_seen,
            waiting=int(row.stats.get(did.waiting, 0)) if did.waiting else None,
            running=int(row.stats.get(did.running, 0)) if did.running else None,
            rate=grown.rate(did.counter),
            unit=did.unit,
            latency_ms=None if seconds is None else seconds * 1e3,
        )

    def _rate(self, kind: str, stat: str) -> float:
        """Of all groups; ranks of one group all say the same, and rank 0 counts."""
        rows = self._health.stages.values()
        return sum(
            self._windows[row.stage].rate(stat)
            for row in rows
            if row.name == kind and row.rank == 0
        )

    def _latency(self, name: str) -> LatencyQuantiles:
        """Of the gateway that has measured most: quantiles of several cannot be added."""
        gateways = [row.stats for row in self._health.stages.values() if row.name == "gateway"]
        kind = name.removesuffix("_ms")
        best = max(gateways, key=lambda stats: stats.get(f"{kind}_count", 0.0))
        count = int(best.get(f"{kind}_count", 0))
        if not count:
            return LatencyQuantiles()
        p50, p90, p99 = (best[f"{kind}_ms_p{share}"] for share in QUANTILES)
        return LatencyQuantiles(p50, p90, p99, count)


def _pages(row: StageStatus) -> KvPagesSnapshot:
    total, free, cached = (
        int(row.stats.get(name, 0)) for name in ("pages_total", "pages_free", "pages_evictable")
    )
    return KvPagesSnapshot(
        group=row.group,
        total=total,
        free=free,
        cached=cached,
        used=total - free - cached,
        page_tokens=int(row.stats.get("page_tokens", 0)),
    )
