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

Find = Callable[[str, int], Submit | None]
Feed = Callable[[Message], None]


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


class _Place:
    """A worker, and the thread that talks to it."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.pool = ThreadPoolExecutor(1, "errand")
        self.busy = False
        self.starting = True


class Errands:
    """They wait for up to `most` workers; `make` makes the next one when all others are busy, and
    nobody waits for its start who could have another. `find(request_id, attempt)`: the request,
    None if nobody wants it any more; asked when its turn comes."""

    def __init__(self, most: int, make: Callable[[], Worker], find: Find) -> None:
        self._most = most
        self._make = make
        self._find = find
        self._places: list[_Place] = []
        self._waiting: FairQueue[Encode | Try] = FairQueue()
        self._feed: Feed | None = None

    @property
    def workers(self) -> list[Worker]:
        """Those that there are by now."""
        return [place.worker for place in self._places]

    def start(self, feed: Feed) -> None:
        """Within the loop of the stage; `feed` is told what workers say. They start later."""
        self._feed = feed
        self._loop = asyncio.get_running_loop()

    def add(self, asked: Encode | Try, weight: int) -> None:
        """One more; `weight` as in FairQueue."""
        self._waiting.put(asked.client, weight, asked)
        self._next()

    async def stop(self) -> None:
        """Ends the processes; what they were at is dropped."""
        self._feed = None
        for place in self._places:
            place.worker.close()
        for place in self._places:
            await self._loop.run_in_executor(None, place.pool.shutdown)
            place.worker.kill()

    def _next(self) -> None:
        while len(self._waiting) and self._feed is not None:
            place = next((place for place in self._places if not place.busy), None)
            if place is None:
                self._grow()
                return
            asked = self._waiting.take()
            submit = self._find(asked.request_id, asked.attempt)
            if submit is not None:
                self._run(place, partial(place.worker.work, submit))

    def _grow(self) -> None:
        """One worker more, if there may be."""
        if len(self._places) < self._most and not any(place.starting for place in self._places):
            place = _Place(self._make())
            self._places.append(place)
            self._run(place, place.worker.start)

    def _run(self, place: _Place, call: Callable[[], Message | None]) -> None:
        place.busy = True
        done = self._loop.run_in_executor(place.pool, call)
        done.add_done_callback(partial(self._done, place))

    def _done(self, place: _Place, future: asyncio.Future[Message | None]) -> None:
        place.busy = place.starting = False
        if self._feed is not None and not future.cancelled():
            said = future.result()
            if said is not None:
                self._feed(said)
            self._next()
