"""A worker process of the load generator: sends its share of the requests when they are due, and
reports timings.

- `OpenLoop`: planned arrivals, drawn from a Poisson process or read from a trace: JSON lines with
  `timestamp` (seconds), `input_length` and `output_length` (tokens)
- `ClosedLoop`: concurrent streams, each of which sends its next request when the last one has ended
- `WorkerSender`: sends requests, and keeps their timings

Started by runner.py, which sends a WorkerJob and then a StartSignal over the pipe.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import queue
import random
import sys
import time
from collections.abc import Iterable
from itertools import islice, takewhile
from pathlib import Path
from typing import Annotated, BinaryIO, Protocol

import aiohttp
import msgspec
import uvloop
from msgspec import Meta

from pipeinfer import pipes
from pipeinfer.bench.client import EncodedRequest, Endpoint, session, stream_into
from pipeinfer.bench.dataset import CustomDataset, RandomDataset
from pipeinfer.bench.metrics import ClientLoad, LoopLagMonitor, RequestTiming
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
        pipes.write(answers, encode_message(sender.progress()))
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
    pipes.write(answers, encode_message(sender.progress(WorkerResult(sender.timings, load))))


async def _report_progress(sender: WorkerSender, answers: BinaryIO) -> None:
    while True:
        await asyncio.sleep(PROGRESS_SECONDS)
        pipes.write(answers, encode_message(sender.progress()))


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


if __name__ == "__main__":
    uvloop.run(work(*pipes.served()))
