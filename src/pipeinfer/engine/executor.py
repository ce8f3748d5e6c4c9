"""A thread that runs steps in order, so that the event loop stays free while the device works.

Knows a function that runs a step, and an event loop to report to; no plan and no model.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from pipeinfer.steps.step import Sampled, Step

# Steps submitted and not yet finished. The overlap loop needs two; of several ranks, one that is
# not rank 0 may be told of a third: plans go by the results of rank 0.
MOST_PENDING = 4


class Watch(Protocol):
    """Looks on, on the thread that launches steps, and must not change them."""

    def before(self, step: Step, /) -> None:
        """`step` is about to be launched."""
        ...

    def close(self) -> None:
        """No step follows."""
        ...


class Reports:
    """Counts the steps that an executor owes a report, and brings each report to the loop.

    `on_done(step, sampled, seconds)` or `on_error(step, error)` is called on `loop`, in the order
    of `done` and `failed`, which any one thread may call.
    """

    def __init__(
        self,
        on_done: Callable[[Step, Sampled, float], None],
        on_error: Callable[[Step, Exception], None],
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """`loop`: the running one if None."""
        self._on_done = on_done
        self._on_error = on_error
        self._loop = loop or asyncio.get_running_loop()
        self.pending = 0
        self.closed = False
        # Not `pending`: a loop that takes plan after plan comes to its reports late.
        self._expected = 0  # by the loop
        self._finished = 0  # by the executor's thread

    def expect(self, step: Step) -> None:
        """`step` is about to be queued; call it on the loop. Raises RuntimeError when closed or
        when too many steps are unfinished, which the depth of the overlap loop rules out.
        """
        if self.closed:
            raise RuntimeError(f"step {step.number} submitted to a closed executor")
        unfinished = self._expected - self._finished
        if unfinished >= MOST_PENDING:
            raise RuntimeError(f"step {step.number} submitted while {unfinished} are pending")
        self._expected += 1
        self.pending += 1

    def done(self, step: Step, sampled: Sampled, seconds: float) -> None:
        """From the executor's thread: the step gave `sampled`."""
        self._report(self._on_done, step, sampled, seconds)

    def failed(self, step: Step, error: Exception) -> None:
        """From the executor's thread: the step raised."""
        self._report(self._on_error, step, error)

    def _report(self, call: Callable[..., None], *arguments: object) -> None:
        self._finished += 1
        try:
            self._loop.call_soon_threadsafe(self._settle, call, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():  # a stage that has stopped wants no more reports
                raise

    def _settle(self, call: Callable[..., None], *arguments: object) -> None:
        self.pending -= 1
        call(*arguments)


class Executor:
    """Runs `run(step)` for each submitted step on a thread of its own, in order.

    `on_done(step, sampled, seconds)` or `on_error(step, error)` is called on `loop`, in order,
    exactly once for each step; after an error later steps run as usual. `busy_seconds` is wall time
    inside `run`, `idle_seconds` wall time between steps with none queued, both since the first one.
    """

    def __init__(
        self,
        run: Callable[[Step], Sampled],
        on_done: Callable[[Step, Sampled, float], None],
        on_error: Callable[[Step, Exception], None],
        loop: asyncio.AbstractEventLoop | None = None,
        watch: Watch | None = None,
    ) -> None:
        """`loop`: the running one if None."""
        self._run = run
        self._watch = watch
        self._reports = Reports(on_done, on_error, loop)
        self._steps: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
        self.steps = 0
        self.busy_seconds = 0.0
        self.idle_seconds = 0.0
        self._thread = threading.Thread(target=self._work, name="steps", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> int:
        """Steps submitted and not yet reported."""
        return self._reports.pending

    def submit(self, step: Step) -> None:
        """Queues `step`; call it on the loop. Raises RuntimeError when closed or when too many
        steps are pending, which the depth of the overlap loop rules out.
        """
        self._reports.expect(step)
        self._steps.put(step)

    def close(self) -> None:
        """Waits for the queued steps and ends the thread; their reports may still come."""
        if not self._reports.closed:
            self._reports.closed = True
            self._steps.put(None)
        self._thread.join()

    def _work(self) -> None:
        ended = 0.0
        while True:
            starved = self._steps.empty()
            step = self._steps.get()
            begin = time.perf_counter()
            if step is None:
                break
            if starved and self.steps:
                self.idle_seconds += begin - ended
            try:
                if self._watch is not None:
                    self._watch.before(step)
                sampled = self._run(step)
            except Exception as error:  # whatever it is, it belongs to this step's owner
                self._reports.failed(step, error)
            else:
                self._reports.done(step, sampled, time.perf_counter() - begin)
            ended = time.perf_counter()
            self.steps += 1
            self.busy_seconds += ended - begin
        if self._watch is not None:
            self._watch.close()
