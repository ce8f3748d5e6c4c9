"""Engine processes that must end: whom no epoch begins with any more, and whom to complain of.

Knows ranks and incarnations, and times in seconds; sends nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

ASK_AGAIN = 1.0  # seconds after which ranks that should have ended are complained of again


class Condemned:
    """Of one group."""

    def __init__(self) -> None:
        self._shunned: set[int] = set()
        self._doomed: dict[int, int] = {}  # by rank: of whom nobody has said that they ended
        self._complained = 0.0

    def __contains__(self, incarnation: int) -> bool:
        """Whether no epoch may begin with it."""
        return incarnation in self._shunned

    def add(self, processes: Mapping[int, int], now: float, shun: bool) -> None:
        """These must end, incarnations by rank, in the place of those before. `shun`: they cannot
        go on even if they answer again."""
        self._doomed = dict(processes)
        if shun:
            self._shunned.update(processes.values())
        self._complained = now

    @property
    def doomed(self) -> tuple[int, ...]:
        """Incarnations of processes that are to end, and of which nobody has said that they did."""
        return tuple(self._doomed[rank] for rank in sorted(self._doomed))

    def gone(self, rank: int, incarnation: int) -> None:
        """The rank's processes up to `incarnation` have ended, or answer again."""
        if self._doomed.get(rank, inf) <= incarnation:
            del self._doomed[rank]

    def complain(self, now: float) -> bool:
        """Whether it is time to say again who must end."""
        if not self._doomed or now - self._complained < ASK_AGAIN:
            return False
        self._complained = now
        return True
