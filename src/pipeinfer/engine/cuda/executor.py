"""Launches steps on the event loop, which takes no waiting, and waits for results on a thread.

A thread for launching would compete with the loop for the interpreter: both took twice as long.

Knows a runner that can launch and wait, and an event loop to report to; no plan and no model.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from pipeinfer.engine.executor import Reports, Watch
from pipeinfer.engine.step import Step


class Launcher(Protocol):
    """What launches steps without waiting for them; `launch` in order, `wait` in that order."""

    def launch(self, step: Step, /) -> Any:
        """Queues the step on the device; returns what `wait` needs."""
        ...

    def wait(self, flight: Any, /) -> tuple[np.ndarray, float, float]:
        """Ids int32 [S]; seconds that the device computed; seconds that it idled before."""
        ...


class StreamExecutor:
    """As engine/executor.py's Executor, with steps in flight on the device.

    `busy_seconds` and `idle_seconds` are the device's own, by its events, since the first step.
    """

    def __init__(
        self,
        launcher: Launcher,
        on_done: Callable[[Step, np.ndarray, float], None],
        on_error: Callable[[Step, Exception], None],
        loop: asyncio.AbstractEventLoop | None = None,
        watch: Watch | None = None,
    ) -> None:
        """`loop`: the running one if None."""
        self._launcher = launcher
        self._watch = watch
        self._reports = Reports(on_done, on_error, loop)
        self._flights: queue.SimpleQueue[tuple[Step, Any, Exception | None] | None] = (
            queue.SimpleQueue()
        )
        self.steps = 0
        self.busy_seconds = 0.0
        self.idle_seconds = 0.0
        self._thread = threading.Thread(target=self._collect, name="results", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> int:
        """Steps submitted and not yet reported."""
        return self._reports.pending

    def submit(self, step: Step) -> None:
        """Launches `step`; call it on the loop. RuntimeError when closed or too many are pending.
        What the launch raises is reported as the step's end, in its place.
        """
        self._reports.expect(step)
        try:
            if self._watch is not None:
                self._watch.before(step)
            flight = self._launcher.launch(step)
        except Exception as error:  # whatever it is, it belongs to this step's owner
            self._flights.put((step, None, error))
        else:
            self._flights.put((step, flight, None))

    def close(self) -> None:
        """Waits for the launched steps and ends the thread; their reports may still come."""
        if not self._reports.closed:
            self._reports.closed = True
            if self._watch is not None:
                self._watch.close()
            self._flights.put(None)
        self._thread.join()

    def _collect(self) -> None:
        while (item := self._flights.get()) is not None:
            step, flight, error = item
            if error is None:
                try:
                    ids, busy, idle = self._launcher.wait(flight)
                except Exception as raised:  # a fault of a kernel shows only here
                    error = raised
                else:
                    self.steps += 1
                    self.busy_seconds += busy
                    self.idle_seconds += idle
                    self._reports.done(step, ids, busy)
            if error is not None:
                self._reports.failed(step, error)
