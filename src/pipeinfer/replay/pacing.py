"""How fast a recording is played: as fast as possible, or at the pace at which it was recorded.

Knows times, no messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Pace:
    """`wait(t)` returns seconds to wait before what was recorded at `t` is due; 0 if not in real
    time, or late."""

    def __init__(
        self, realtime: bool, first: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._realtime, self._first, self._clock = realtime, first, clock
        self._begun = clock()

    def wait(self, recorded: float) -> float:
        if not self._realtime:
            return 0.0
        return max(0.0, recorded - self._first - (self._clock() - self._begun))
