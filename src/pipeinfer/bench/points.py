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
from pipeinfer.bench.lag import ClientFacts
from pipeinfer.bench.latency import Summary, Target, Timeline
from pipeinfer.bench.load import Closed, Load, Open
from pipeinfer.bench.measuring import Progress, measure
from pipeinfer.bench.prompts import Drawn, Listed

STREAMS_EACH = 64  # that a process of the client follows without being late


@dataclass(frozen=True)
class Point:
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
        return max(1, min(cores, math.ceil(together / STREAMS_EACH)))


@dataclass(frozen=True)
class Bounds:
    """How much is sent at each point: so many requests, or for so many seconds."""

    requests: int | None = None
    seconds: float | None = None

    def or_default(self, least: int = REQUESTS) -> int | None:
        return least if self.requests is None and self.seconds is None else self.requests


def closed(streams: int, bounds: Bounds) -> Point:
    """So many streams at a time."""
    requests = bounds.or_default(max(REQUESTS, ROUNDS * streams))
    load = Closed(streams, requests, bounds.seconds)
    return Point(f"{streams} stream{'s' if streams > 1 else ''}", load, streams=streams)


def opened(rate: float, bounds: Bounds, seed: int) -> Point:
    """Poisson arrivals."""
    times = arrivals.poisson(rate, seed, bounds.or_default(), bounds.seconds)
    return Point(f"{rate:g}/s", Open(list(enumerate(times))), rate=rate)


def burst(bounds: Bounds) -> Point:
    """All at once."""
    count = bounds.or_default() or REQUESTS
    return Point("all at once", Open([(index, 0.0) for index in range(count)]))


def recorded(trace: Sequence[arrivals.Entry], speed: float) -> Point:
    """When a trace says, `speed` times as fast."""
    times = [entry.timestamp / speed for entry in trace]
    return Point("trace", Open(list(enumerate(times))))


@dataclass(frozen=True)
class Seen:
    """What came of a point: every request, the metrics of all, and how the client itself did."""

    point: Point
    lines: Sequence[Timeline]
    summary: Summary
    client: ClientFacts
    notes: Sequence[str]

    def errors(self) -> dict[str, tuple[int, str]]:
        """Of each kind of failure how many there were, and what one of them said."""
        said = {line.kind: line.error for line in reversed(self.lines) if line.kind}
        return {kind: (many, said[kind]) for kind, many in self.summary["failures"].items()}

    def metrics(self) -> dict[str, object]:
        """For JSON."""
        return {
            "load": self.point.label,
            "rate": self.point.rate,
            "concurrency": self.point.streams,
            **self.summary,
            "client": msgspec.to_builtins(self.client),
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class Run:
    """What is the same at all points. `source` makes the prompts of each, by its number: no point
    finds those of another in a cache."""

    endpoint: Endpoint
    source: Callable[[int], Drawn | Listed]
    target: Target
    processes: Callable[[Point], int]

    def measure(self, number: int, point: Point, progress: Progress) -> Seen:
        """Sends one point's load. Raises ClientDied."""
        source = self.source(number)
        found = measure(self.endpoint, source, point.load, self.processes(point), progress)
        summary, client = (
            latency.summary(found.lines, self.target),
            lag.facts(found.owns, found.lines),
        )
        notes = [*lag.warnings(client, summary), *self._notes(found.lines)]
        return Seen(point, found.lines, summary, client, notes)

    def _notes(self, lines: Sequence[Timeline]) -> list[str]:
        """What else a reader should know of the numbers."""
        complete = [line for line in lines if line.complete]
        short = sum(line.tokens < line.asked for line in complete)
        notes: list[str] = []
        if self.endpoint.ignore_eos and short:
            notes.append(
                f"{short} answers have fewer tokens than asked for: the server does not know "
                "ignore_eos, or its context ended"
            )
        chunked = [line for line in complete if not line.counted]
        if chunked:
            notes.append(
                f"{len(chunked)} answers came without usage: their tokens are their pieces, and "
                "their prompts are not counted"
            )
        pieces, tokens = (
            sum(len(line.pieces) for line in complete),
            sum(line.tokens for line in complete),
        )
        if tokens > 1.2 * pieces:
            notes.append(
                f"a piece has {tokens / pieces:.1f} tokens on average: ITL is the time between "
                "pieces, TPOT that of a token"
            )
        return notes
