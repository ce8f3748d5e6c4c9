"""A thread that runs steps in order, so that the event loop stays free while the device works.

Knows a function that runs a step, and an event loop to report to; no plan and no model.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable

import numpy as np

from pipeinfer.engine.step import Step

MOST_PENDING = 4  # steps submitted and not yet reported; the overlap loop needs two


class Executor:
    """Runs `run(step)` for each submitted step on a thread of its own, in order.

    `on_done(step, ids, seconds)` or `on_error(step, error)` is called on `loop`, in order, exactly
    once for each step; after an error later steps run as usual. `busy_seconds` is wall time inside
    `run`, `idle_seconds` wall time between steps with none queued, both since the first step.
    """

    def __init__(
        self,
        run: Callable[[Step], np.ndarray],
        on_done: Callable[[Step, np.ndarray, float], None],
        on_error: Callable[[Step, Exception], None],
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """`loop`: the running one if None."""
        self._run = run
        self._on_done = on_done
        self._on_error = on_error
        self._loop = loop or asyncio.get_running_loop()
        self._steps: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
        self._pending = 0
        self._closed = False
        self.steps = 0
        self.busy_seconds = 0.0
        self.idle_seconds = 0.0
        self._thread = threading.Thread(target=self._work, name="steps", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> int:
        """Steps submitted and not yet reported."""
        return self._pending

    def submit(self, step: Step) -> None:
        """Queues `step`; call it on the loop. Raises RuntimeError when closed or when too many
        steps are pending, which the depth of the overlap loop rules out.
        """
        if self._closed:
            raise RuntimeError(f"step {step.number} submitted to a closed executor")
        if self._pending >= MOST_PENDING:
            raise RuntimeError(f"step {step.number} submitted while {self._pending} are pending")
        self._pending += 1
        self._steps.put(step)

    def close(self) -> None:
        """Waits for the queued steps and ends the thread; their reports may still come."""
        if not self._closed:
            self._closed = True
            self._steps.put(None)
        self._thread.join()

    def _work(self) -> None:
        ended = 0.0
        while True:
            starved = self._steps.empty()
            step = self._steps.get()
            begin = time.perf_counter()
            if step is None:
                return
            if starved and self.steps:
                self.idle_seconds += begin - ended
            try:
                ids = self._run(step)
            except Exception as error:  # whatever it is, it belongs to this step's owner
                self._report(self._failed, step, error)
            else:
                self._report(self._finished, step, ids, time.perf_counter() - begin)
            ended = time.perf_counter()
            self.steps += 1
            self.busy_seconds += ended - begin

    def _report(self, call: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():  # a stage that has stopped wants no more reports
                raise

    def _finished(self, step: Step, ids: np.ndarray, seconds: float) -> None:
        self._pending -= 1
        self._on_done(step, ids, seconds)

    def _failed(self, step: Step, error: Exception) -> None:
        self._pending -= 1
        self._on_error(step, error)
