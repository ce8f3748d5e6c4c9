"""Runs loads: starts worker processes, lets them begin together, and joins what they measured.

In the process of the command:

- `run_load` sends one load from several processes, and gives every request's timing.
- `LoadPoint` is a load of a benchmark, `PointResult` its metrics.
- `Benchmark` is what all points share.

In each worker process, which is this module run by itself, and gets a WorkerJob and then a
StartSignal over the pipe:

- `OpenLoop`: planned arrivals, drawn from a Poisson process or read from a trace: JSON lines with
  `timestamp` (seconds), `input_length` and `output_length` (tokens)
- `ClosedLoop`: concurrent streams, each of which sends its next request when the last one has ended
- `WorkerSender`: sends requests when they are due, and keeps their timings

Requests are always sent by other processes than the command's, so that its own work, such as
showing progress, delays none of them.
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import os
import queue
import random
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import Annotated, BinaryIO, Protocol, cast

import aiohttp
import msgspec
import uvloop
from msgspec import Meta

from pipeinfer.bench.client import (
    BenchmarkMetrics,
    ClientLoad,
    ClientStats,
    EncodedRequest,
    Endpoint,
    GoodputTarget,
    LoopLagMonitor,
    RequestTiming,
    benchmark_metrics,
    client_stats,
    client_warnings,
    session,
    stream_into,
)
from pipeinfer.bench.dataset import (
    MIN_REQUESTS,
    MIN_REQUESTS_PER_STREAM,
    CustomDataset,
    RandomDataset,
)
from pipeinfer.command_line import counted
from pipeinfer.processes import incoming_frames, read_frame, start_child, write_frame
from pipeinfer.settings import ConfigurationError


class WorkerJob(msgspec.Struct, frozen=True):
    """What one worker sends, and to which server."""

    endpoint: Endpoint
    dataset: RandomDataset | CustomDataset
    load: Load


class StartSignal(msgspec.Struct, frozen=True):
    """When all workers begin: of time.perf_counter(), which they share."""

    at: float


class WorkerResult(msgspec.Struct, frozen=True):
    """What one worker measured."""

    timings: list[RequestTiming]
    client_load: ClientLoad


class WorkerProgress(msgspec.Struct, frozen=True):
    """Counts of a worker so far. Its first message says that it is ready, its last has the result.

    done, failed, running: requests; `done` includes failed ones.
    tokens: of output, by chunks.
    """

    done: int = 0
    failed: int = 0
    running: int = 0
    tokens: int = 0
    result: WorkerResult | None = None


def encode_message(message: WorkerJob | StartSignal | WorkerProgress) -> bytes:
    """The message as MessagePack, for a frame of the pipe."""
    return msgspec.msgpack.encode(message)


PROGRESS_SECONDS = 0.25  # seconds between two reports


class WorkerSender:
    """Sends requests, and keeps their timings, those of running requests included."""

    def __init__(self, client: aiohttp.ClientSession, job: WorkerJob) -> None:
        self._client, self._job = client, job
        self.timings: list[RequestTiming] = []
        self._running: dict[int, RequestTiming] = {}
        self._failed = self._tokens = 0

    def encode(self, index: int) -> EncodedRequest:
        """The request of that index."""
        return self._job.endpoint.encode(self._job.dataset.sample(index))

    async def send(self, request: EncodedRequest, due: float) -> None:
        """Sends one request and reads its answer to the end."""
        timing = RequestTiming(due, prompt_tokens=request.prompt_len, max_tokens=request.output_len)
        self.timings.append(timing)
        number = len(self.timings)
        self._running[number] = timing
        await stream_into(self._client, self._job.endpoint, request, timing)
        del self._running[number]
        self._failed += not timing.success
        self._tokens += len(timing.chunk_times)

    def progress(self, result: WorkerResult | None = None) -> WorkerProgress:
        """The counts so far."""
        running = len(self._running)
        tokens = self._tokens + sum(len(timing.chunk_times) for timing in self._running.values())
        return WorkerProgress(len(self.timings) - running, self._failed, running, tokens, result)


async def work(messages: queue.SimpleQueue[bytes], answers: BinaryIO) -> None:
    """Does one job from beginning to end."""
    job = msgspec.msgpack.decode(await asyncio.to_thread(messages.get), type=WorkerJob)
    async with session(job.endpoint) as client:
        sender = WorkerSender(client, job)
        write_frame(answers, encode_message(sender.progress()))
        start = msgspec.msgpack.decode(await asyncio.to_thread(messages.get), type=StartSignal)
        monitor = LoopLagMonitor()
        tasks = [
            asyncio.create_task(one) for one in (monitor.run(), _report_progress(sender, answers))
        ]
        await job.load.run(start.at, sender)
        load = monitor.client_load()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    write_frame(answers, encode_message(sender.progress(WorkerResult(sender.timings, load))))


async def _report_progress(sender: WorkerSender, answers: BinaryIO) -> None:
    while True:
        await asyncio.sleep(PROGRESS_SECONDS)
        write_frame(answers, encode_message(sender.progress()))


class TraceRequest(msgspec.Struct, frozen=True):
    """One line of a trace: seconds, and tokens of prompt and output."""

    timestamp: float
    input_length: Annotated[int, Meta(ge=1)]
    output_length: Annotated[int, Meta(ge=1)]


def poisson_arrivals(
    rate: float, seed: int, requests: int | None = None, seconds: float | None = None
) -> list[float]:
    """Arrival times in seconds after the start, `rate` a second on average.

    requests: how many; None: all within `seconds`.
    The same seed gives the same arrivals, in proportion, at every rate. An infinite rate needs
    `requests`, which all come at once.
    """
    times: Iterable[float] = _poisson(rate, random.Random(seed))
    if seconds is not None:
        times = takewhile(lambda at: at < seconds, times)
    return list(islice(times, requests))


def _poisson(rate: float, rng: random.Random) -> Iterable[float]:
    at = 0.0
    while True:
        at += rng.expovariate(1.0) / rate
        yield at


def load_trace(path: Path) -> list[TraceRequest]:
    """The lines of a trace in the order of their times, of which the first is 0.

    Raises ConfigurationError that names the line.
    """
    try:
        found = [_entry(path, number, line) for number, line in _lines(path)]
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from None
    if not found:
        raise ConfigurationError(f"{path} has no entries")
    found.sort(key=lambda entry: entry.timestamp)
    start = found[0].timestamp
    return [msgspec.structs.replace(entry, timestamp=entry.timestamp - start) for entry in found]


def _lines(path: Path) -> Iterable[tuple[int, str]]:
    with path.open() as file:
        yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())


def _entry(path: Path, number: int, line: str) -> TraceRequest:
    try:
        return msgspec.json.decode(line, type=TraceRequest)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigurationError(f"{path} line {number}: {error}") from None


COUNTER_FILE = "next_request"  # in the folder that the worker processes share


class RequestSender(Protocol):
    """Encodes requests and sends them."""

    def encode(self, index: int) -> EncodedRequest:
        """The request of that index, encoded before it is due."""
        ...

    async def send(self, request: EncodedRequest, due: float) -> None:
        """Returns when the answer has ended, however it did."""
        ...


class OpenLoop(msgspec.Struct, frozen=True, tag=True):
    """Each request is sent at its arrival time, whether or not earlier ones have ended.

    arrivals: pairs (index of the request, seconds after the start), in order of time.
    """

    arrivals: list[tuple[int, float]]

    @property
    def streams(self) -> int:
        """The most requests that may run at a time."""
        return len(self.arrivals)

    @property
    def requests(self) -> int | None:
        """How many requests are sent."""
        return len(self.arrivals)

    def share(self, folder: Path, rank: int, workers: int) -> OpenLoop:
        """The share of worker `rank` of `workers`."""
        return OpenLoop(self.arrivals[rank::workers])

    async def run(self, begin: float, sender: RequestSender) -> None:
        """Sends all requests. begin: the start, of time.perf_counter()."""
        async with asyncio.TaskGroup() as sending:
            for index, at in self.arrivals:
                request, due = sender.encode(index), begin + at
                await asyncio.sleep(due - time.perf_counter())
                sending.create_task(sender.send(request, due))


class ClosedLoop(msgspec.Struct, frozen=True, tag=True):
    """Concurrent streams, each of which sends its next request when the last one has ended.

    streams: how many.
    requests: how many in all; None: no limit.
    seconds: no request begins later; None: no limit.
    counter_file: has the index of the next request (8 bytes, little-endian), for all workers.
    """

    streams: int
    requests: int | None = None
    seconds: float | None = None
    counter_file: str = ""

    def share(self, folder: Path, rank: int, workers: int) -> ClosedLoop:
        """The share of worker `rank` of `workers`, which share `folder`."""
        path = folder / COUNTER_FILE
        path.touch()
        streams = self.streams // workers + (rank < self.streams % workers)
        return msgspec.structs.replace(self, streams=streams, counter_file=str(path))

    async def run(self, begin: float, sender: RequestSender) -> None:
        """Sends all requests. begin: the start, of time.perf_counter()."""
        await asyncio.sleep(begin - time.perf_counter())
        end = begin + (sys.maxsize if self.seconds is None else self.seconds)
        limit = sys.maxsize if self.requests is None else self.requests
        with Path(self.counter_file).open("r+b", buffering=0) as counter:

            async def stream() -> None:
                while (index := _next_index(counter.fileno(), limit)) is not None:
                    request, now = sender.encode(index), time.perf_counter()
                    if now >= end:
                        return
                    await sender.send(request, now)

            async with asyncio.TaskGroup() as streams:
                for _ in range(self.streams):
                    streams.create_task(stream())


Load = OpenLoop | ClosedLoop


def _next_index(file: int, limit: int) -> int | None:
    """The next index below `limit` that no worker has taken; None if there is none."""
    fcntl.lockf(file, fcntl.LOCK_EX)
    try:
        taken = int.from_bytes(os.pread(file, 8, 0), "little")
        if taken >= limit:
            return None
        os.pwrite(file, (taken + 1).to_bytes(8, "little"), 0)
        return taken
    finally:
        fcntl.lockf(file, fcntl.LOCK_UN)


WORKER_MODULE = "pipeinfer.bench.runner"
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
                workers.append(start_child(WORKER_MODULE, {}))
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
        write_frame(cast(BinaryIO, worker.stdin), encode_message(message))
    except BrokenPipeError:
        raise _died(worker) from None


def _receive(worker: subprocess.Popen[bytes]) -> WorkerProgress:
    frame = read_frame(cast(BinaryIO, worker.stdout).fileno())
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
    return LoadPoint(counted(streams, "stream"), load, streams=streams)


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


if __name__ == "__main__":
    uvloop.run(work(*incoming_frames()))
