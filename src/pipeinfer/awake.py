"""A clock that stands still while this process does: stopped by a signal, or on a sleeping machine.

Others are judged by it. One that has long answered is not late because nobody was there to read the
answer. Knows times in seconds and the stage's ticks; nothing of who waits for whom.
"""

from __future__ import annotations

# A stage is told of a tick twice a second or more often. One that hears of none for so long was
# stopped, or so busy that others' answers wait as well.
MAX_TICK_GAP = 1.0


class SuspendAwareClock:
    """As the clock of the events, less all but PAUSE seconds of each longer gap between ticks."""

    def __init__(self) -> None:
        self._slept = 0.0
        self._ticked = float("inf")  # no gap ends before the first tick

    def tick(self, now: float) -> None:
        """A tick came at `now`."""
        self._slept += self._gap(now)
        self._ticked = now

    def at(self, now: float) -> float:
        """What this clock says at `now`; never less than what it said before."""
        return now - self._slept - self._gap(now)

    def _gap(self, now: float) -> float:
        """Seconds since the last tick in which the stage must have slept."""
        return max(now - self._ticked - MAX_TICK_GAP, 0.0)
