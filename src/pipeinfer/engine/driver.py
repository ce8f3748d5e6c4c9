"""The engine's I/O beside the bus: it hands steps to the executor's threads and reports their end.

Knows no plan and no memory; a step that fails ends the process, because what it left on the device
is unknown.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from pipeinfer.engine.core import Compute, StepFailed
from pipeinfer.engine.step import Step
from pipeinfer.messages import Message, StepDone, pack

log = logging.getLogger(__name__)


class StepExecutor(Protocol):
    """See engine/executor.py and engine/cuda/executor.py."""

    busy_seconds: float
    idle_seconds: float

    def submit(self, step: Step) -> None: ...

    def close(self) -> None: ...


StartExecutor = Callable[
    [Callable[[Step, np.ndarray, float], None], Callable[[Step, Exception], None]], StepExecutor
]


class DeviceDriver:
    """Hands every Compute that the core sends to an executor, in order, off the event loop.

    `begin(on_done, on_error)` makes the executor, on the running loop. `parts`: wall seconds of the
    parts of a step so far, by name, kept up to date by whoever runs it.
    """

    def __init__(self, begin: StartExecutor, parts: Mapping[str, float] | None = None) -> None:
        self._begin = begin
        self._parts = {} if parts is None else parts
        self._executor: StepExecutor | None = None
        self._feed: Callable[[Message], None] | None = None

    async def start(self, feed: Callable[[Message], None]) -> None:
        self._feed = feed
        self._executor = self._begin(self._done, self._failed)

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
