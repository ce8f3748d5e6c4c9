"""What requests wait for and other processes do, while the stage goes on.

The lightest goes first. Knows neither what is done nor in which process.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

from pipeinfer.messages import Message, Submit
from pipeinfer.tokenizer.events import Encode, Try

Find = Callable[[str, int], Submit | None]
Feed = Callable[[Message], None]
Job = tuple[int, int, Encode | Try]  # weight, number, what is asked for


class Worker(Protocol):
    """A process, started when it is first needed."""

    def work(self, submit: Submit) -> Message:
        """What the core is told; blocks, and is always called by the same thread."""
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


class Errands:
    """They wait for up to `most` workers; `make` makes the next one when all others are busy.
    `find(request_id, attempt)`: the request, None if nobody wants it any more; asked when its turn
    comes."""

    def __init__(self, most: int, make: Callable[[], Worker], find: Find) -> None:
        self._most = most
        self._make = make
        self._find = find
        self._places: list[_Place] = []
        self._waiting: list[Job] = []
        self._count = 0
        self._feed: Feed | None = None

    @property
    def workers(self) -> list[Worker]:
        """Those that there are by now."""
        return [place.worker for place in self._places]

    def start(self, feed: Feed) -> None:
        """Within the loop of the stage; `feed` is told what workers say."""
        self._feed = feed
        self._loop = asyncio.get_running_loop()

    def add(self, asked: Encode | Try) -> None:
        """One more."""
        self._count += 1
        heapq.heappush(self._waiting, (asked.weight, self._count, asked))
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
        while self._waiting and self._feed is not None:
            place = self._idle()
            if place is None:
                return
            _, _, asked = heapq.heappop(self._waiting)
            submit = self._find(asked.request_id, asked.attempt)
            if submit is not None:
                place.busy = True
                done = self._loop.run_in_executor(place.pool, place.worker.work, submit)
                done.add_done_callback(partial(self._done, place))

    def _idle(self) -> _Place | None:
        for place in self._places:
            if not place.busy:
                return place
        if len(self._places) == self._most:
            return None
        self._places.append(_Place(self._make()))
        return self._places[-1]

    def _done(self, place: _Place, future: asyncio.Future[Message]) -> None:
        place.busy = False
        if self._feed is not None and not future.cancelled():
            self._feed(future.result())
            self._next()
