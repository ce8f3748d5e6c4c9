"""When requests are sent: open, at times that are planned, or closed, so many streams at a time.

Knows indices and times; what a request is and who sends it, others know.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
import time
from pathlib import Path
from typing import Protocol

import msgspec

from pipeinfer.bench.endpoint import EncodedRequest

COUNTER_FILE = "tickets"


class RequestSender(Protocol):
    """Makes requests and sends them."""

    def encode(self, index: int) -> EncodedRequest:
        """The request of that number, made before it is due."""
        ...

    async def send(self, asked: EncodedRequest, due: float) -> None:
        """Returns when the answer has ended, however it did."""
        ...


class OpenLoop(msgspec.Struct, frozen=True, tag=True):
    """Each request is sent when it is due, whatever became of those before.

    arrivals: (number of the request, seconds after the start), in order.
    """

    arrivals: list[tuple[int, float]]

    @property
    def streams(self) -> int:
        """How many there may be at a time."""
        return len(self.arrivals)

    @property
    def requests(self) -> int | None:
        """How many there will be."""
        return len(self.arrivals)

    def share(self, folder: Path, first: int, many: int) -> OpenLoop:
        """What the process `first` of `many` does."""
        return OpenLoop(self.arrivals[first::many])

    async def run(self, begin: float, sender: RequestSender) -> None:
        """Sends all of it; `begin` is of time.perf_counter()."""
        async with asyncio.TaskGroup() as sending:
            for index, at in self.arrivals:
                asked, due = sender.encode(index), begin + at
                await asyncio.sleep(due - time.perf_counter())
                sending.create_task(sender.send(asked, due))


class ClosedLoop(msgspec.Struct, frozen=True, tag=True):
    """Streams that each send a request when the one before has ended: so many requests in all, or
    for so many seconds. The processes draw the numbers of requests from one file.
    """

    streams: int
    requests: int | None = None
    seconds: float | None = None
    counter_file: str = ""

    def share(self, folder: Path, first: int, many: int) -> ClosedLoop:
        """What the process `first` of `many` does; they share a folder."""
        path = folder / COUNTER_FILE
        path.touch()
        streams = self.streams // many + (first < self.streams % many)
        return msgspec.structs.replace(self, streams=streams, tickets=str(path))

    async def run(self, begin: float, sender: RequestSender) -> None:
        """Sends all of it; `begin` is of time.perf_counter()."""
        await asyncio.sleep(begin - time.perf_counter())
        end = begin + (sys.maxsize if self.seconds is None else self.seconds)
        most = sys.maxsize if self.requests is None else self.requests
        with Path(self.counter_file).open("r+b", buffering=0) as tickets:

            async def one() -> None:
                while (index := _next(tickets.fileno(), most)) is not None:
                    asked, now = sender.encode(index), time.perf_counter()
                    if now >= end:
                        return
                    await sender.send(asked, now)

            async with asyncio.TaskGroup() as streams:
                for _ in range(self.streams):
                    streams.create_task(one())


Load = OpenLoop | ClosedLoop


def _next(file: int, most: int) -> int | None:
    """The next number below `most` that no process has taken; None if there is none."""
    fcntl.lockf(file, fcntl.LOCK_EX)
    try:
        taken = int.from_bytes(os.pread(file, 8, 0), "little")
        if taken >= most:
            return None
        os.pwrite(file, (taken + 1).to_bytes(8, "little"), 0)
        return taken
    finally:
        fcntl.lockf(file, fcntl.LOCK_UN)
