"""Engines that stand still while a test prepares what must happen before an answer's end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from servers import Server

MOMENT = 0.02  # seconds that engines compute at a time, and that they rest


class HeldEngines:
    """All engines of a server, or those processes, which stand still while the block runs, but for
    moments. One that is killed meanwhile is none of them any more."""

    def __init__(self, server: Server | None, pids: Iterable[int] = ()) -> None:
        stages = [] if server is None else server.health()["stages"]
        self._pids = [*pids, *(one["pid"] for one in stages if one["name"] == "engine")]

    def __enter__(self) -> HeldEngines:
        self._signal(signal.SIGSTOP)
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """They compute again. Twice is no error."""
        self._signal(signal.SIGCONT)

    def compute_until(self, condition: Callable[[], object], seconds: float = 60.0) -> None:
        """Lets them compute for moments until it is true; they stand still then."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "never happened while engines compute for moments"
            self._signal(signal.SIGCONT)
            time.sleep(MOMENT)
            self._signal(signal.SIGSTOP)
            time.sleep(MOMENT)

    def _signal(self, number: int) -> None:
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
