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
from pipeinfer.bench.endpoint import EncodedRequest
from pipeinfer.bench.jobs import StartSignal, WorkerJob, WorkerProgress, WorkerResult
from pipeinfer.bench.lag import LoopLagMonitor
from pipeinfer.bench.latency import RequestTiming

PROGRESS_SECONDS = 0.25  # seconds between two reports


class WorkerSender:
    """The requests of this process, those that run included."""

    def __init__(self, client: aiohttp.ClientSession, job: WorkerJob) -> None:
        self._client, self._job = client, job
        self.timings: list[RequestTiming] = []
        self._running: dict[int, RequestTiming] = {}
        self._failed = self._tokens = 0

    def encode(self, index: int) -> EncodedRequest:
        """The request of that number."""
        return self._job.endpoint.encode(self._job.dataset.sample(index))

    async def send(self, asked: EncodedRequest, due: float) -> None:
        """One request to its end."""
        line = RequestTiming(due, prompt_tokens=asked.prompt_len, max_tokens=asked.output_len)
        self.timings.append(line)
        number = len(self.timings)
        self._running[number] = line
        await streaming.stream_into(self._client, self._job.endpoint, asked, line)
        del self._running[number]
        self._failed += not line.success
        self._tokens += len(line.chunk_times)

    def progress(self, result: WorkerResult | None = None) -> WorkerProgress:
        """How far it is."""
        running = len(self._running)
        tokens = self._tokens + sum(len(line.chunk_times) for line in self._running.values())
        return WorkerProgress(len(self.timings) - running, self._failed, running, tokens, result)


async def work(heard: queue.SimpleQueue[bytes], answers: BinaryIO) -> None:
    """One job, from beginning to end."""
    job = msgspec.msgpack.decode(await asyncio.to_thread(heard.get), type=WorkerJob)
    async with streaming.session(job.endpoint) as client:
        sending = WorkerSender(client, job)
        pipes.write(answers, jobs.encode_message(sending.progress()))
        begin = msgspec.msgpack.decode(await asyncio.to_thread(heard.get), type=StartSignal)
        watch = LoopLagMonitor()
        beside = [asyncio.create_task(one) for one in (watch.run(), _tell(sending, answers))]
        await job.load.run(begin.at, sending)
        own = watch.client_load()
        for task in beside:
            task.cancel()
        await asyncio.wait(beside)
    pipes.write(answers, jobs.encode_message(sending.progress(WorkerResult(sending.timings, own))))


async def _tell(sending: WorkerSender, answers: BinaryIO) -> None:
    while True:
        await asyncio.sleep(PROGRESS_SECONDS)
        pipes.write(answers, jobs.encode_message(sending.progress()))


if __name__ == "__main__":
    uvloop.run(work(*pipes.served()))
