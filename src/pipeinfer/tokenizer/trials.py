"""Tries grammars in processes of their own while the stage goes on.

Two of them, since one grammar may take seconds; the second starts when the first is busy. What was
found before is answered at once. Knows no routing and no recording.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from pipeinfer.grammars.trial import SECONDS, Trial
from pipeinfer.messages import Message, Submit
from pipeinfer.params import StructuredOutputs
from pipeinfer.tokenizer.events import Tried, Try
from pipeinfer.tokenizer.trying import Checkpoint

PROCESSES = 2
MODULE = "pipeinfer.tokenizer.trying"

Find = Callable[[str, int], Submit | None]


class Bench:
    """A process, and a thread that talks to it."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.trial = Trial(Checkpoint(str(folder)), seconds, MODULE)
        self.pool = ThreadPoolExecutor(1, "grammar")
        self.busy: StructuredOutputs | None = None  # what it tries


class Trials:
    """Part of the tokenizer's driver. `find`: as for Lanes. `seconds`: that a grammar may take."""

    def __init__(self, folder: Path, find: Find, seconds: float = SECONDS) -> None:
        self._benches = tuple(Bench(folder, seconds) for _ in range(PROCESSES))
        self._find = find
        self._waiting: deque[Try] = deque()
        self._feed: Callable[[Message], None] | None = None

    async def start(self, feed: Callable[[Message], None]) -> None:
        """Processes start with the first grammar."""
        self._feed = feed
        self._loop = asyncio.get_running_loop()

    def deliver(self, message: Try) -> None:
        """Takes one of the core's local outputs."""
        self._waiting.append(message)
        self._loop.call_soon(self._next)

    async def stop(self) -> None:
        """Ends the processes; what they were at is dropped."""
        self._feed = None
        for bench in self._benches:
            bench.trial.stop()
        for bench in self._benches:
            await asyncio.get_running_loop().run_in_executor(bench.pool, bench.trial.kill)
            bench.pool.shutdown()

    @property
    def ended(self) -> int:
        """Processes that a grammar has cost."""
        return sum(bench.trial.ended for bench in self._benches)

    def _next(self) -> None:
        """Answers what is known, also past those that wait, and begins with the first others."""
        rest: deque[Try] = deque()
        while self._waiting and self._feed is not None:
            asked = self._waiting.popleft()
            spec = self._spec(asked)
            if spec is None:
                continue
            known = next((v for b in self._benches if (v := b.trial.known(spec)) is not None), None)
            begun = any(bench.busy == spec for bench in self._benches)
            free = next((bench for bench in self._benches if bench.busy is None), None)
            if known is not None:
                self._feed(_tried(asked, known))
            elif free is not None and not begun:
                free.busy = spec
                done = self._loop.run_in_executor(free.pool, _verdict, free.trial, asked, spec)
                done.add_done_callback(partial(self._done, free))
            else:
                rest.append(asked)
        self._waiting.extendleft(reversed(rest))

    def _spec(self, asked: Try) -> StructuredOutputs | None:
        """None if nobody wants the request any more."""
        submit = self._find(asked.request_id, asked.attempt)
        return None if submit is None else submit.params.structured_outputs

    def _done(self, bench: Bench, future: asyncio.Future[Tried]) -> None:
        bench.busy = None
        if self._feed is not None and not future.cancelled():
            self._feed(future.result())
            self._next()


def _tried(asked: Try, verdict: str) -> Tried:
    if not verdict:
        return Tried(asked.request_id, asked.attempt)
    return Tried(asked.request_id, asked.attempt, 400, f"structured_outputs: {verdict}")


def _verdict(trial: Trial, asked: Try, spec: StructuredOutputs) -> Tried:
    try:
        return _tried(asked, trial.verdict(spec))
    except (OSError, RuntimeError) as error:
        message = f"structured_outputs could not be tried: {error}"
        return Tried(asked.request_id, asked.attempt, 500, message)
