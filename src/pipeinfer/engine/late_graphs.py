"""Graphs that are captured while the engine serves: one after the other, while there is no step.

Until then their steps take the next larger graph. Whoever comes amid a capture waits for its end,
so the next one begins only when the event loop has looked for messages. Knows how many are left and
an event loop; no plan and no kind of device.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from pipeinfer.engine.device import Mark
from pipeinfer.runtime.logs import DETAILS

if TYPE_CHECKING:
    from pipeinfer.engine.runner import Runner

log, details = logging.getLogger(__name__), logging.getLogger(DETAILS)

FIRST = 0.5  # seconds that the engine is left to meet its scheduler
QUIET = 0.05  # seconds without a step: who sends one request after the other is not disturbed
GAP = 0.01  # seconds between two captures


class LateGraphs:
    """Of one engine; all calls are on the event loop. `runner` has them.

    That one is due is told to the core, as everything that steps depend on: so a recorded engine
    has each graph from the same step on again.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._quiet: Callable[[], float] = lambda: 0.0
        self._due: Callable[[], None] = lambda: None
        self._next: asyncio.TimerHandle | None = None
        self._closed = False
        self._began = 0.0

    def start(self, quiet: Callable[[], float], due: Callable[[], None]) -> None:
        """Begins; quiet(): for how many seconds there was no step, 0.0 while there is one. due():
        has `capture` called, at once or never."""
        self._quiet, self._due = quiet, due
        self._began = asyncio.get_running_loop().time()
        self._later(FIRST)

    def close(self) -> None:
        """No capture begins any more; to be called before its device is closed."""
        self._closed = True
        if self._next is not None:
            self._next.cancel()

    def stats(self) -> dict[str, float]:
        """Numbers of graphs."""
        return {"graphs": self._runner.graphs, "graphs_left": self._runner.graphs_left}

    def capture(self) -> None:
        """Captures the next one, if any is left, and looks for a moment for another."""
        if not self._runner.graphs_left:
            return
        loop = asyncio.get_running_loop()
        try:
            mark = self._runner.capture_next()
        except Exception as error:  # a GPU's captures are made before it returns
            self._failed(error)
            return
        mark.then(loop, lambda: self._captured(mark))

    def _later(self, seconds: float) -> None:
        if self._runner.graphs_left and not self._closed:
            self._next = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        quiet = self._quiet()
        if quiet < QUIET:
            self._later(QUIET - quiet)
        else:
            self._due()

    def _captured(self, mark: Mark) -> None:
        try:
            mark.wait()
        except Exception as error:
            self._failed(error)
            return
        if self._runner.graphs_left:
            self._later(GAP)
        else:
            took = asyncio.get_running_loop().time() - self._began
            details.info("all %d CUDA graphs are there, %.1f s later", self._runner.graphs, took)

    def _failed(self, error: Exception) -> None:
        """Without it the engine is slower and not wrong. If the device is out of order, the next
        step says so, and ends the process."""
        self._runner.leave_graphs()
        log.warning("no more CUDA graphs than %d: %s", self._runner.graphs, error, exc_info=error)
