"""One process of the client: sends its share of the requests and says what it saw.

Started by measuring.py, which says what to do and when to begin.
"""

from __future__ import annotations

import asyncio
import queue
from typing import BinaryIO

import aiohttp
import msgspec
import uvloop

from pipeinfer import pipes
from pipeinfer.bench import jobs, streaming
from pipeinfer.bench.endpoint import Prepared
from pipeinfer.bench.jobs import Begin, Job, Report, Result
from pipeinfer.bench.lag import Watch
from pipeinfer.bench.latency import Timeline

EVERY = 0.25  # seconds between two reports


class Sending:
    """The requests of this process, those that run included."""

    def __init__(self, client: aiohttp.ClientSession, job: Job) -> None:
        self._client, self._job = client, job
        self.lines: list[Timeline] = []
        self._running: dict[int, Timeline] = {}
        self._failed = self._tokens = 0

    def prepared(self, index: int) -> Prepared:
        """The request of that number."""
        return self._job.endpoint.prepared(self._job.source.request(index))

    async def send(self, asked: Prepared, due: float) -> None:
        """One request to its end."""
        line = Timeline(due, prompt=asked.prompt, asked=asked.output)
        self.lines.append(line)
        number = len(self.lines)
        self._running[number] = line
        await streaming.follow(self._client, self._job.endpoint, asked, line)
        del self._running[number]
        self._failed += not line.complete
        self._tokens += len(line.pieces)

    def report(self, result: Result | None = None) -> Report:
        """How far it is."""
        running = len(self._running)
        tokens = self._tokens + sum(len(line.pieces) for line in self._running.values())
        return Report(len(self.lines) - running, self._failed, running, tokens, result)


async def work(heard: queue.SimpleQueue[bytes], answers: BinaryIO) -> None:
    """One job, from beginning to end."""
    job = msgspec.msgpack.decode(await asyncio.to_thread(heard.get), type=Job)
    async with streaming.session(job.endpoint) as client:
        sending = Sending(client, job)
        pipes.write(answers, jobs.encoded(sending.report()))
        begin = msgspec.msgpack.decode(await asyncio.to_thread(heard.get), type=Begin)
        watch = Watch()
        beside = [asyncio.create_task(one) for one in (watch.watch(), _tell(sending, answers))]
        await job.load.drive(begin.at, sending)
        own = watch.seen()
        for task in beside:
            task.cancel()
        await asyncio.wait(beside)
    pipes.write(answers, jobs.encoded(sending.report(Result(sending.lines, own))))


async def _tell(sending: Sending, answers: BinaryIO) -> None:
    while True:
        await asyncio.sleep(EVERY)
        pipes.write(answers, jobs.encoded(sending.report()))


if __name__ == "__main__":
    uvloop.run(work(*pipes.served()))
