"""Runs loads: starts worker processes, lets them begin together, and joins what they measured.

- `run_load` sends one load from several processes, and gives every request's timing.
- `LoadPoint` is a load of a benchmark, `PointResult` its metrics.
- `Benchmark` is what all points share.

Requests are always sent by other processes than this one, so that its own work, such as showing
progress, delays none of them.
"""

from __future__ import annotations

import math
import select
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

from pipeinfer import pipes
from pipeinfer.bench.client import Endpoint
from pipeinfer.bench.dataset import (
    MIN_REQUESTS,
    MIN_REQUESTS_PER_STREAM,
    CustomDataset,
    RandomDataset,
)
from pipeinfer.bench.metrics import (
    BenchmarkMetrics,
    ClientLoad,
    ClientStats,
    GoodputTarget,
    RequestTiming,
    benchmark_metrics,
    client_stats,
    client_warnings,
)
from pipeinfer.bench.worker import (
    ClosedLoop,
    Load,
    OpenLoop,
    StartSignal,
    TraceRequest,
    WorkerJob,
    WorkerProgress,
    WorkerResult,
    encode_message,
    poisson_arrivals,
)

WORKER_MODULE = "pipeinfer.bench.worker"
START_DELAY = 0.1  # seconds until all begin, once all are ready

ProgressCallback = Callable[[WorkerProgress], None]


class WorkerDied(RuntimeError):
    """A worker process ended before its work did; what it printed is on stderr."""


@dataclass(frozen=True)
class LoadResult:
    """What all workers measured: every request's timing, and how busy each worker was."""

    timings: list[RequestTiming]
    client_loads: list[ClientLoad]


def run_load(
    endpoint: Endpoint,
    dataset: RandomDataset | CustomDataset,
    load: Load,
    processes: int = 1,
    progress: ProgressCallback = lambda progress: None,
) -> LoadResult:
    """Sends the load from up to `processes` workers. `progress` is called with their total.

    Raises WorkerDied.
    """
    count = max(min(processes, load.streams), 1)
    workers: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="pipeinfer-bench-") as folder:
        try:
            for rank in range(count):
                workers.append(pipes.start(WORKER_MODULE, {}))
                job = WorkerJob(endpoint, dataset, load.share(Path(folder), rank, count))
                _send(workers[-1], job)
            progresses = [_receive(worker) for worker in workers]  # all are ready
            start = StartSignal(time.perf_counter() + START_DELAY)
            for worker in workers:
                _send(worker, start)
            return join_results(_collect(workers, progresses, progress))
        finally:
            for worker in workers:
                _end(worker)


def join_results(results: Sequence[WorkerResult]) -> LoadResult:
    """All workers' results as one, in the order in which requests were due."""
    timings = [timing for result in results for timing in result.timings]
    timings.sort(key=lambda timing: timing.due)
    return LoadResult(timings, [result.client_load for result in results])


def total_progress(progresses: Sequence[WorkerProgress]) -> WorkerProgress:
    """The sums of all workers' counts."""
    return WorkerProgress(
        done=sum(progress.done for progress in progresses),
        failed=sum(progress.failed for progress in progresses),
        running=sum(progress.running for progress in progresses),
        tokens=sum(progress.tokens for progress in progresses),
    )


def _collect(
    workers: Sequence[subprocess.Popen[bytes]],
    progresses: list[WorkerProgress],
    progress: ProgressCallback,
) -> list[WorkerResult]:
    """Receives progress from all workers until each has sent its result."""
    results: dict[int, WorkerResult] = {}
    ranks = {cast(BinaryIO, worker.stdout).fileno(): n for n, worker in enumerate(workers)}
    while len(results) < len(workers):
        waiting = [fd for fd, number in ranks.items() if number not in results]
        for fd in select.select(waiting, [], [])[0]:
            number = ranks[fd]
            progresses[number] = _receive(workers[number])
            result = progresses[number].result
            if result is not None:
                results[number] = result
        progress(total_progress(progresses))
    return [results[number] for number in range(len(workers))]


def _send(worker: subprocess.Popen[bytes], message: WorkerJob | StartSignal) -> None:
    try:
        pipes.write(cast(BinaryIO, worker.stdin), encode_message(message))
    except BrokenPipeError:
        raise _died(worker) from None


def _receive(worker: subprocess.Popen[bytes]) -> WorkerProgress:
    frame = pipes.read(cast(BinaryIO, worker.stdout).fileno())
    if frame is None:
        raise _died(worker)
    return msgspec.msgpack.decode(frame, type=WorkerProgress)


def _died(worker: subprocess.Popen[bytes]) -> WorkerDied:
    return WorkerDied(f"a process of the client ended with {worker.wait()}")


def _end(worker: subprocess.Popen[bytes]) -> None:
    """Closes its pipes, which ends a worker whatever it does, and waits for it."""
    for pipe in (worker.stdin, worker.stdout):
        cast(BinaryIO, pipe).close()
    worker.wait()


STREAMS_PER_WORKER = 64  # that one worker follows without being late


@dataclass(frozen=True)
class LoadPoint:
    """One load of a benchmark.

    label: its name in results.
    rate: requests a second, of a Poisson process; None: another load.
    streams: of a closed loop; None: another load.
    """

    label: str
    load: Load
    rate: float | None = None
    streams: int | None = None

    @property
    def requests(self) -> int | None:
        """How many requests are sent, if that is known before."""
        return self.load.requests

    def processes(self, cores: int) -> int:
        """Workers that are enough for the load, at most `cores`."""
        together = self.load.streams if self.rate is None else 4 * self.rate
        return max(1, min(cores, math.ceil(together / STREAMS_PER_WORKER)))


@dataclass(frozen=True)
class LoadLimits:
    """How much is sent at each point: a number of requests, or all within some seconds."""

    requests: int | None = None
    seconds: float | None = None

    def requests_or_default(self, least: int = MIN_REQUESTS) -> int | None:
        return least if self.requests is None and self.seconds is None else self.requests


def closed_loop_point(streams: int, limits: LoadLimits) -> LoadPoint:
    """A closed loop of so many streams."""
    requests = limits.requests_or_default(max(MIN_REQUESTS, MIN_REQUESTS_PER_STREAM * streams))
    load = ClosedLoop(streams, requests, limits.seconds)
    return LoadPoint(f"{streams} stream{'s' if streams > 1 else ''}", load, streams=streams)


def poisson_point(rate: float, limits: LoadLimits, seed: int) -> LoadPoint:
    """Poisson arrivals."""
    times = poisson_arrivals(rate, seed, limits.requests_or_default(), limits.seconds)
    return LoadPoint(f"{rate:g}/s", OpenLoop(list(enumerate(times))), rate=rate)


def burst_point(limits: LoadLimits) -> LoadPoint:
    """All requests at once."""
    count = limits.requests_or_default() or MIN_REQUESTS
    return LoadPoint("all at once", OpenLoop([(index, 0.0) for index in range(count)]))


def trace_point(trace: Sequence[TraceRequest], speed: float) -> LoadPoint:
    """The arrivals of a trace, `speed` times as fast."""
    times = [entry.timestamp / speed for entry in trace]
    return LoadPoint("trace", OpenLoop(list(enumerate(times))))


@dataclass(frozen=True)
class PointResult:
    """What was measured at one point.

    timings: of every request.
    metrics: over all of them.
    client: how busy the client itself was.
    notes: sentences about what limits the numbers.
    """

    point: LoadPoint
    timings: Sequence[RequestTiming]
    metrics: BenchmarkMetrics
    client: ClientStats
    notes: Sequence[str]

    def errors(self) -> dict[str, tuple[int, str]]:
        """By kind of failure, how many there were and the error of one of them."""
        errors = {
            timing.failure_kind: timing.error
            for timing in reversed(self.timings)
            if timing.failure_kind
        }
        return {kind: (count, errors[kind]) for kind, count in self.metrics["failures"].items()}

    def to_json(self) -> dict[str, object]:
        """As it stands in a result file."""
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
    """What all points of a benchmark share.

    dataset: the prompts of a point, by its number: no point finds another's in a prefix cache.
    target: what counts for goodput.
    processes: how many workers send a point.
    """

    endpoint: Endpoint
    dataset: Callable[[int], RandomDataset | CustomDataset]
    target: GoodputTarget
    processes: Callable[[LoadPoint], int]

    def run_point(self, number: int, point: LoadPoint, progress: ProgressCallback) -> PointResult:
        """Sends one point's load and computes its metrics. Raises WorkerDied."""
        dataset = self.dataset(number)
        result = run_load(self.endpoint, dataset, point.load, self.processes(point), progress)
        metrics = benchmark_metrics(result.timings, self.target)
        client = client_stats(result.client_loads, result.timings)
        notes = [*client_warnings(client, metrics), *self._notes(result.timings)]
        return PointResult(point, result.timings, metrics, client, notes)

    def _notes(self, timings: Sequence[RequestTiming]) -> list[str]:
        """Sentences about answers that were shorter, not counted, or came in large chunks."""
        succeeded = [timing for timing in timings if timing.success]
        short = sum(timing.output_tokens < timing.max_tokens for timing in succeeded)
        notes: list[str] = []
        if self.endpoint.ignore_eos and short:
            notes.append(
                f"{short} answers have fewer tokens than asked for: the server does not know "
                "ignore_eos, or its context ended"
            )
        uncounted = [timing for timing in succeeded if not timing.has_usage]
        if uncounted:
            notes.append(
                f"{len(uncounted)} answers came without usage: their tokens are their pieces, and "
                "their prompts are not counted"
            )
        chunks = sum(len(timing.chunk_times) for timing in succeeded)
        tokens = sum(timing.output_tokens for timing in succeeded)
        if tokens > 1.2 * chunks:
            notes.append(
                f"a piece has {tokens / chunks:.1f} tokens on average: ITL is the time between "
                "pieces, TPOT that of a token"
            )
        return notes
