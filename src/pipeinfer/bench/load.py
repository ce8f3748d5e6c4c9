"""When requests are sent: an open loop of planned arrivals, or a closed loop of concurrent streams.

Arrivals are drawn from a Poisson process or read from a trace: JSON lines with `timestamp`
(seconds), `input_length` and `output_length` (tokens).
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import sys
import time
from collections.abc import Iterable
from itertools import islice, takewhile
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from pipeinfer.bench.client import EncodedRequest
from pipeinfer.settings import ConfigurationError


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
