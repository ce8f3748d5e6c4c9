"""What is measured in one run, point by point: a load, and what came of it.

Knows loads and statistics; prints nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from pipeinfer.bench import arrivals, lag, latency
from pipeinfer.bench.defaults import REQUESTS, ROUNDS
from pipeinfer.bench.endpoint import Endpoint
from pipeinfer.bench.lag import ClientStats
from pipeinfer.bench.latency import BenchmarkMetrics, GoodputTarget, RequestTiming
from pipeinfer.bench.load import ClosedLoop, Load, OpenLoop
from pipeinfer.bench.measuring import ProgressCallback, run_load
from pipeinfer.bench.prompts import CustomDataset, RandomDataset

STREAMS_PER_WORKER = 64  # that a process of the client follows without being late


@dataclass(frozen=True)
class LoadPoint:
    """A load with its name; `rate` is requests a second, `streams` how many at a time."""

    label: str
    load: Load
    rate: float | None = None
    streams: int | None = None

    @property
    def requests(self) -> int | None:
        """How many there will be, if that is known."""
        return self.load.requests

    def processes(self, cores: int) -> int:
        """Enough for it, as far as that can be told before."""
        together = self.load.streams if self.rate is None else 4 * self.rate
        return max(1, min(cores, math.ceil(together / STREAMS_PER_WORKER)))


@dataclass(frozen=True)
class LoadLimits:
    """How much is sent at each point: so many requests, or for so many seconds."""

    requests: int | None = None
    seconds: float | None = None

    def requests_or_default(self, least: int = REQUESTS) -> int | None:
        return least if self.requests is None and self.seconds is None else self.requests


def closed_loop_point(streams: int, bounds: LoadLimits) -> LoadPoint:
    """So many streams at a time."""
    requests = bounds.requests_or_default(max(REQUESTS, ROUNDS * streams))
    load = ClosedLoop(streams, requests, bounds.seconds)
    return LoadPoint(f"{streams} stream{'s' if streams > 1 else ''}", load, streams=streams)


def poisson_point(rate: float, bounds: LoadLimits, seed: int) -> LoadPoint:
    """Poisson arrivals."""
    times = arrivals.poisson_arrivals(rate, seed, bounds.requests_or_default(), bounds.seconds)
    return LoadPoint(f"{rate:g}/s", OpenLoop(list(enumerate(times))), rate=rate)


def burst_point(bounds: LoadLimits) -> LoadPoint:
    """All at once."""
    count = bounds.requests_or_default() or REQUESTS
    return LoadPoint("all at once", OpenLoop([(index, 0.0) for index in range(count)]))


def trace_point(trace: Sequence[arrivals.TraceEntry], speed: float) -> LoadPoint:
    """When a trace says, `speed` times as fast."""
    times = [entry.timestamp / speed for entry in trace]
    return LoadPoint("trace", OpenLoop(list(enumerate(times))))


@dataclass(frozen=True)
class PointResult:
    """What came of a point: every request, the metrics of all, and how the client itself did."""

    point: LoadPoint
    timings: Sequence[RequestTiming]
    metrics: BenchmarkMetrics
    client: ClientStats
    notes: Sequence[str]

    def errors(self) -> dict[str, tuple[int, str]]:
        """Of each kind of failure how many there were, and what one of them said."""
        said = {
            line.failure_kind: line.error for line in reversed(self.timings) if line.failure_kind
        }
        return {kind: (many, said[kind]) for kind, many in self.metrics["failures"].items()}

    def to_json(self) -> dict[str, object]:
        """For JSON."""
        return {
            "load": self.point.label,
            "rate": self.point.rate,
            "concurrency": self.point.streams,
            **self.metrics,
            "client": msgspec.to_builtins(self.client),
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class Benchmark:
    """What is the same at all points. `source` makes the prompts of each, by its number: no point
    finds those of another in a cache."""

    endpoint: Endpoint
    dataset: Callable[[int], RandomDataset | CustomDataset]
    target: GoodputTarget
    processes: Callable[[LoadPoint], int]

    def run_point(self, number: int, point: LoadPoint, progress: ProgressCallback) -> PointResult:
        """Sends one point's load. Raises ClientDied."""
        source = self.dataset(number)
        found = run_load(self.endpoint, source, point.load, self.processes(point), progress)
        summary, client = (
            latency.benchmark_metrics(found.timings, self.target),
            lag.client_stats(found.client_loads, found.timings),
        )
        notes = [*lag.client_warnings(client, summary), *self._notes(found.timings)]
        return PointResult(point, found.timings, summary, client, notes)

    def _notes(self, lines: Sequence[RequestTiming]) -> list[str]:
        """What else a reader should know of the numbers."""
        complete = [line for line in lines if line.success]
        short = sum(line.output_tokens < line.max_tokens for line in complete)
        notes: list[str] = []
        if self.endpoint.ignore_eos and short:
            notes.append(
                f"{short} answers have fewer tokens than asked for: the server does not know "
                "ignore_eos, or its context ended"
            )
        chunked = [line for line in complete if not line.has_usage]
        if chunked:
            notes.append(
                f"{len(chunked)} answers came without usage: their tokens are their pieces, and "
                "their prompts are not counted"
            )
        pieces, tokens = (
            sum(len(line.chunk_times) for line in complete),
            sum(line.output_tokens for line in complete),
        )
        if tokens > 1.2 * pieces:
            notes.append(
                f"a piece has {tokens / pieces:.1f} tokens on average: ITL is the time between "
                "pieces, TPOT that of a token"
            )
        return notes
