"""Ends a process when the process that started it has gone, also while it still imports modules.

Whoever starts a stage holds the other end of the pipe that it reports through, as long as it lives:
that tells of a death before this process asked for anything. Knows no stage.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from pipeinfer.runtime.exit_codes import FAILED, ORDERLY

CHECK = 0.5  # seconds
GRACE = 10.0  # seconds that an orderly end may take


class ParentWatch:
    """Watches on a thread of its own, since imports and builds hold the others.

    sink: the writing end of a pipe that the parent reads, -1 without one. A command around this
    process may have closed the pipe, or forked with it: then the end of the process right above,
    which may be that command, counts alone.
    """

    def __init__(self, sink: int = -1) -> None:
        self._sink = sink
        self._parent = os.getppid()
        self._end: Callable[[], object] = lambda: os._exit(ORDERLY)
        threading.Thread(target=self._run, name="parent", daemon=True).start()

    def set_stop(self, end: Callable[[], object]) -> None:
        """From now on there is something to be ended in good order, by `end`, on the thread."""
        self._end = end

    def _run(self) -> None:
        poller = select.poll()
        if self._sink >= 0:
            poller.register(self._sink, 0)  # POLLERR is always told: nobody can read any more
        while os.getppid() == self._parent and not poller.poll(1_000 * CHECK):
            pass
        with suppress(RuntimeError):  # the loop is closed: it ends already
            self._end()
        time.sleep(GRACE)
        os._exit(FAILED)
