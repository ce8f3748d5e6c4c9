"""Processes that stand still while a test prepares what must happen before an answer's end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

from servers import START, Server

MOMENT = 0.02  # seconds that they run at a time, and that they stand still


class HeldProcesses:
    """Processes that stand still by SIGSTOP while the block runs, but for moments. One that is
    killed meanwhile is none of them any more."""

    def __init__(self, *pids: int) -> None:
        self._pids = pids

    def __enter__(self) -> HeldProcesses:
        self._signal(signal.SIGSTOP)
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """They run again. Twice is no error."""
        self._signal(signal.SIGCONT)

    def compute_until(self, condition: Callable[[], object], seconds: float = START) -> None:
        """Lets them run for moments until it is true; they stand still then."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "never happened while they run for moments"
            self._signal(signal.SIGCONT)
            time.sleep(MOMENT)
            self._signal(signal.SIGSTOP)
            time.sleep(MOMENT)

    def _signal(self, number: int) -> None:
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def held_engines(server: Server) -> HeldProcesses:
    """All engines of a server."""
    stages = server.health()["stages"]
    return HeldProcesses(*(one["pid"] for one in stages if one["name"] == "engine"))
