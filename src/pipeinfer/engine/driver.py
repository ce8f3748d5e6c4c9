"""The engine's I/O beside the bus: it hands steps to the executor's thread and reports their end.

Knows no plan and no memory; a step that fails ends the process, because what it left on the device
is unknown.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pipeinfer.engine.core import Compute, StepFailed
from pipeinfer.engine.executor import Executor
from pipeinfer.engine.step import Step
from pipeinfer.messages import Message, StepDone, pack

log = logging.getLogger(__name__)


class DeviceDriver:
    """Runs `run(step)` for every Compute that the core sends, in order, off the event loop.

    `parts`: wall seconds of the parts of `run` so far, by name, kept up to date by it.
    """

    def __init__(
        self, run: Callable[[Step], np.ndarray], parts: Mapping[str, float] | None = None
    ) -> None:
        self._run = run
        self._parts = {} if parts is None else parts
        self._executor: Executor | None = None
        self._feed: Callable[[Message], None] | None = None

    async def start(self, feed: Callable[[Message], None]) -> None:
        self._feed = feed
        self._executor = Executor(self._run, self._done, self._failed)

    def deliver(self, message: Any) -> None:
        assert self._executor is not None
        assert isinstance(message, Compute)
        self._executor.submit(message.step)

    async def stop(self) -> None:
        if self._executor is not None:
            self._executor.close()

    def stats(self) -> dict[str, float]:
        """Seconds in which the device computed, in which it had no step queued, and of `parts`."""
        executor = self._executor
        if executor is None:
            return {}
        return {
            "busy_seconds": executor.busy_seconds,
            "idle_seconds": executor.idle_seconds,
            **{f"{part}_seconds": seconds for part, seconds in self._parts.items()},
        }

    def _done(self, step: Step, ids: np.ndarray, seconds: float) -> None:
        assert self._feed is not None
        self._feed(StepDone(step.epoch, step.number, pack(ids), seconds))

    def _failed(self, step: Step, error: Exception) -> None:
        assert self._feed is not None
        log.error("step %d of epoch %d", step.number, step.epoch, exc_info=error)
        self._feed(StepFailed(step.epoch, step.number, str(error)))
