"""A worker process of the load generator: sends its share of the requests and reports timings.

Started by runner.py, which sends a WorkerJob and then a StartSignal over the pipe.
"""

from __future__ import annotations

import asyncio
import queue
from typing import BinaryIO

import aiohttp
import msgspec
import uvloop

from pipeinfer import pipes
from pipeinfer.bench import runner
from pipeinfer.bench.client import EncodedRequest, session, stream_into
from pipeinfer.bench.metrics import LoopLagMonitor, RequestTiming
from pipeinfer.bench.runner import StartSignal, WorkerJob, WorkerProgress, WorkerResult

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
        pipes.write(answers, runner.encode_message(sender.progress()))
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
    pipes.write(answers, runner.encode_message(sender.progress(WorkerResult(sender.timings, load))))


async def _report_progress(sender: WorkerSender, answers: BinaryIO) -> None:
    while True:
        await asyncio.sleep(PROGRESS_SECONDS)
        pipes.write(answers, runner.encode_message(sender.progress()))


if __name__ == "__main__":
    uvloop.run(work(*pipes.served()))
