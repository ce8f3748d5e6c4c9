"""Launches steps and collects their results on the event loop, which takes no waiting for either.

While steps are in flight the loop does not sleep: it asks again and again whether the oldest one
has ended. Threads for launching or waiting would compete with the loop for the interpreter, and a
core that sleeps between two steps runs the code of the next one with cold caches. Knows a runner
that launches, and an event loop; no plan and no model.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from pipeinfer.engine.cuda.buffers import PARITIES
from pipeinfer.engine.executor import Watch
from pipeinfer.steps.step import Sampled, Step


class Launcher(Protocol):
    """What launches steps without waiting for them; `launch` in order, `wait` in that order."""

    def launch(self, step: Step, /) -> Any:
        """Queues the step on the device; returns what the other two need."""
        ...

    def ended(self, flight: Any, /) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self, flight: Any, /) -> tuple[Sampled, float, float]:
        """What it gave; seconds that the device computed; seconds that it idled before."""
        ...


class StreamExecutor:
    """As engine/executor.py's Executor, with steps in flight on the device.

    `busy_seconds` and `idle_seconds` are the device's own, by its events, since the first step.
    """

    def __init__(
        self,
        launcher: Launcher,
        on_done: Callable[[Step, Sampled, float], None],
        on_error: Callable[[Step, Exception], None],
        loop: asyncio.AbstractEventLoop | None = None,
        watch: Watch | None = None,
    ) -> None:
        """`loop`: the running one if None."""
        self._launcher = launcher
        self._on_done, self._on_error = on_done, on_error
        self._loop = loop or asyncio.get_running_loop()
        self._watch = watch
        # (step, what `launch` gave or raised), then (step, what came of it), oldest first.
        self._flights: deque[tuple[Step, Any]] = deque()
        self._ended: deque[tuple[Step, Any]] = deque()
        self._asking = self._closed = False
        self.steps = 0
        self.busy_seconds = 0.0
        self.idle_seconds = 0.0

    @property
    def pending(self) -> int:
        """Steps submitted and not yet reported."""
        return len(self._flights) + len(self._ended)

    def submit(self, step: Step) -> None:
        """Launches `step`; call it on the loop. RuntimeError when closed. What the launch raises is
        reported as the step's end, in its place.

        With two steps in flight it waits for the first of them, which the depth of the overlap loop
        rules out on rank 0; another rank hears plans at the pace of that one.
        """
        if self._closed:
            raise RuntimeError(f"step {step.number} submitted to a closed executor")
        while len(self._flights) >= PARITIES:  # the third writes where the first one's ids lie
            self._collect()
        try:
            if self._watch is not None:
                self._watch.before(step)
            flight = self._launcher.launch(step)
        except Exception as error:  # whatever it is, it belongs to this step's owner
            flight = error
        self._flights.append((step, flight))
        if not self._asking:
            self._asking = True
            self._loop.call_soon(self._ask)

    def close(self) -> None:
        """Waits for the launched steps; their reports may still come. No step follows."""
        if not self._closed:
            self._closed = True
            if self._watch is not None:
                self._watch.close()
        while self._flights:
            self._collect()

    def _ask(self) -> None:
        """Reports what has ended, and asks again in the loop's next turn while anything flies."""
        while self._flights and self._over(self._flights[0][1]):
            self._collect()
        while self._ended:
            step, outcome = self._ended.popleft()
            if isinstance(outcome, Exception):
                self._on_error(step, outcome)
            else:
                self._on_done(step, *outcome)
        self._asking = self.pending > 0
        if self._asking:
            self._loop.call_soon(self._ask)

    def _over(self, flight: Any) -> bool:
        return isinstance(flight, Exception) or self._launcher.ended(flight)

    def _collect(self) -> None:
        """The oldest flight's outcome, waited for if need be."""
        step, flight = self._flights.popleft()
        outcome = flight
        if not isinstance(flight, Exception):
            try:
                sampled, busy, idle = self._launcher.wait(flight)
            except Exception as error:  # a fault of a kernel shows only here
                outcome = error
            else:
                self.steps += 1
                self.busy_seconds += busy
                self.idle_seconds += idle
                outcome = sampled, busy
        self._ended.append((step, outcome))
