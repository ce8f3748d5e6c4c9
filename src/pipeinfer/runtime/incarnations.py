"""Numbers of processes: of two that were the same stage, the later has the greater number.

A number is the time when it was given, or, where the clock was set back since the last one, that
one and a little more. Whoever makes a stage serve gives it. Knows no process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, MutableMapping

# Of nanoseconds, between two processes of one stage. Epochs and a supervisor's last word of a
# process count on from its number.
MIN_GAP_NS = 1_000_000_000
INCARNATION_VARIABLE = "PIPEINFER_INCARNATION"  # in the environment of a stage: its number


def own_incarnation(environ: MutableMapping[str, str]) -> int:
    """The number of this process, taken out of `environ`; the time where nobody gave one."""
    number = environ.pop(INCARNATION_VARIABLE, "")
    return int(number) if number.isdecimal() and len(number) < 20 else time.time_ns()


def incarnation_after(last: int, now: int) -> int:
    """A number for the process that comes after process `last`, at the time `now` (Unix, in ns)."""
    return max(now, last + MIN_GAP_NS)


class IncarnationNumbers:
    """Gives numbers, one greater than the other whoever they are for."""

    def __init__(self, clock: Callable[[], int] = time.time_ns) -> None:
        self._clock = clock
        self._last = 0

    def next(self, last: int) -> int:
        """For a process that comes after process `last`, 0 for none."""
        self._last = max(incarnation_after(last, self._clock()), self._last + 1)
        return self._last

    def now(self) -> int:
        """Below all numbers that will be given, and not below those that were."""
        self._last = max(self._clock(), self._last)
        return self._last
