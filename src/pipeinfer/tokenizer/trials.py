"""Tries grammars in processes of their own while the stage goes on.

The smallest goes first. One that takes long holds one of a few processes up, which is ended when
its time is over. Knows no routing, no prompt and no recording.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from pipeinfer.grammars.trial import SECONDS, Setup, Trial
from pipeinfer.messages import Message, Submit
from pipeinfer.params import StructuredOutputs
from pipeinfer.tokenizer.events import Tried, Try

LANES = 3  # processes; the second starts when the first is busy

Find = Callable[[str, int], Submit | None]
Job = tuple[int, int, Try]  # weight, number, what to try


class _Lane:
    """A process, started when it is first needed, and the thread that talks to it."""

    def __init__(self, setup: Setup, seconds: float) -> None:
        self.trial = Trial(setup, seconds)
        self.pool = ThreadPoolExecutor(1, "grammars")
        self.busy = False


class Trials:
    """A part of the tokenizer's driver. `find(request_id, attempt)`: the request, None if nobody
    wants it any more. `setup`: the model's vocabulary; None if it has none for grammars, because of
    `none`."""

    def __init__(
        self, setup: Setup | None, find: Find, none: str = "", seconds: float = SECONDS
    ) -> None:
        self._setup = setup
        self._none = none
        self._find = find
        self._seconds = seconds
        self._lanes: list[_Lane] = []
        self._waiting: list[Job] = []
        self._count = 0
        self._feed: Callable[[Message], None] | None = None

    async def start(self, feed: Callable[[Message], None]) -> None:
        """Processes start with the first grammar."""
        self._feed = feed
        self._loop = asyncio.get_running_loop()

    def deliver(self, message: Try) -> None:
        """One more."""
        if self._none:
            self._loop.call_soon(
                self._tell, Tried(message.request_id, message.attempt, 400, self._none)
            )
            return
        self._count += 1
        heapq.heappush(self._waiting, (message.weight, self._count, message))
        self._next()

    async def stop(self) -> None:
        """Ends the processes; what they were at is dropped."""
        self._feed = None
        for lane in self._lanes:
            lane.trial.close()
        for lane in self._lanes:
            await asyncio.get_running_loop().run_in_executor(None, lane.pool.shutdown)
            lane.trial.kill()

    def stats(self) -> dict[str, float]:
        """Processes that grammars have cost."""
        return {"trials_ended_total": sum(lane.trial.ended for lane in self._lanes)}

    def _next(self) -> None:
        while self._waiting and self._feed is not None:
            lane = self._idle()
            if lane is None:
                return
            _, _, asked = heapq.heappop(self._waiting)
            submit = self._find(asked.request_id, asked.attempt)
            spec = None if submit is None else submit.params.structured_outputs
            if spec is None:
                continue
            lane.busy = True
            done = self._loop.run_in_executor(lane.pool, _tried, lane.trial, asked, spec)
            done.add_done_callback(partial(self._done, lane))

    def _idle(self) -> _Lane | None:
        for lane in self._lanes:
            if not lane.busy:
                return lane
        if len(self._lanes) == LANES:
            return None
        assert self._setup is not None
        self._lanes.append(_Lane(self._setup, self._seconds))
        return self._lanes[-1]

    def _done(self, lane: _Lane, future: asyncio.Future[Tried]) -> None:
        lane.busy = False
        if self._feed is not None and not future.cancelled():
            self._feed(future.result())
            self._next()

    def _tell(self, said: Tried) -> None:
        if self._feed is not None:
            self._feed(said)


def _tried(trial: Trial, asked: Try, spec: StructuredOutputs) -> Tried:
    try:
        message = trial.verdict(spec)
    except (RuntimeError, OSError) as error:
        return Tried(asked.request_id, asked.attempt, 500, f"the grammar was not tried: {error}")
    return Tried(asked.request_id, asked.attempt, 400 if message else 0, message)
