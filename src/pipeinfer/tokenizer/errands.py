"""What requests wait for and other processes do, while the stage goes on.

Clients take turns (fair_queue.py). Knows neither what is done nor in which process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

from pipeinfer.fair_queue import FairQueue
from pipeinfer.messages import Message, Submit
from pipeinfer.tokenizer.events import Encode, Try

FindSubmit = Callable[[str, int], Submit | None]
FeedCore = Callable[[Message], None]


class Worker(Protocol):
    """A process. All but `close` is called by one thread."""

    def start(self) -> None:
        """Has it ready before there is work; blocks. Where that fails, `work` says so."""
        ...

    def work(self, submit: Submit) -> Message:
        """What is said of it; blocks."""
        ...

    def close(self) -> None:
        """From any thread: ends the process also while it works, and starts none from now on."""
        ...

    def kill(self) -> None:
        """Clears up, after `close` and while nobody works."""
        ...


class _WorkerSlot:
    """A worker, and the thread that talks to it."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.pool = ThreadPoolExecutor(1, "errand")
        self.busy = False
        self.starting = True


class WorkerPool:
    """They wait for up to `most` workers; `make` makes the next one when all others are busy, and
    nobody waits for its start who could have another. `find(request_id, attempt)`: the request,
    None if nobody wants it any more; asked when its turn comes."""

    def __init__(
        self, max_workers: int, make_worker: Callable[[], Worker], find_submit: FindSubmit
    ) -> None:
        self._max_workers = max_workers
        self._make_worker = make_worker
        self._find_submit = find_submit
        self._slots: list[_WorkerSlot] = []
        self._waiting: FairQueue[Encode | Try] = FairQueue()
        self._feed: FeedCore | None = None

    @property
    def workers(self) -> list[Worker]:
        """Those that there are by now."""
        return [place.worker for place in self._slots]

    def start(self, feed: FeedCore) -> None:
        """Within the loop of the stage; `feed` is told what workers say. They start later."""
        self._feed = feed
        self._loop = asyncio.get_running_loop()

    def submit(self, job: Encode | Try, weight: int) -> None:
        """One more; `weight` as in FairQueue."""
        self._waiting.put(job.client, weight, job)
        self._start_waiting()

    async def stop(self) -> None:
        """Ends the processes; what they were at is dropped."""
        self._feed = None
        for place in self._slots:
            place.worker.close()
        for place in self._slots:
            await self._loop.run_in_executor(None, place.pool.shutdown)
            place.worker.kill()

    def _start_waiting(self) -> None:
        while len(self._waiting) and self._feed is not None:
            place = next((place for place in self._slots if not place.busy), None)
            if place is None:
                self._add_worker()
                return
            asked = self._waiting.take()
            submit = self._find_submit(asked.request_id, asked.attempt)
            if submit is not None:
                self._run(place, partial(place.worker.work, submit))

    def _add_worker(self) -> None:
        """One worker more, if there may be."""
        if len(self._slots) < self._max_workers and not any(
            place.starting for place in self._slots
        ):
            place = _WorkerSlot(self._make_worker())
            self._slots.append(place)
            self._run(place, place.worker.start)

    def _run(self, place: _WorkerSlot, call: Callable[[], Message | None]) -> None:
        place.busy = True
        done = self._loop.run_in_executor(place.pool, call)
        done.add_done_callback(partial(self._on_done, place))

    def _on_done(self, place: _WorkerSlot, future: asyncio.Future[Message | None]) -> None:
        place.busy = place.starting = False
        if self._feed is not None and not future.cancelled():
            said = future.result()
            if said is not None:
                self._feed(said)
            self._start_waiting()
