"""Whether the engine ranks of a group are there, by what they and whoever starts them say.

Knows no epoch: ranks that are there may not have agreed on anything yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from pipeinfer.messages import Ended, RankStatus, State

BEGINNING: tuple[State, ...] = ("starting", "loading")  # of a process that comes after another one
SILENCE = 3.0  # seconds


@dataclass(frozen=True)
class _Known:
    """What a rank said last, and when (seconds); `over`: its process has ended since."""

    incarnation: int
    state: State
    heard: float
    over: bool = False


class Ranks:
    """The ranks of one group that were ever heard. `gone`: one of them has no process that could
    hand anything over, as far as is known, or none that was heard for `host_loss` seconds.
    `silent`: one of those that were there has not been heard for SILENCE."""

    def __init__(self, host_loss: float = inf) -> None:
        self.gone = self.silent = False
        self._host_loss = host_loss
        self._known: dict[int, _Known] = {}

    def hear(self, told: RankStatus, now: float) -> None:
        """A late word of a process before the one that was heard last does not count."""
        known = self._known.get(told.rank)
        if known is None or (known.incarnation, known.over) <= (told.incarnation, False):
            self._know(told.rank, _Known(told.incarnation, told.state, now), now)

    def ended(self, rank: int, told: Ended, now: float) -> None:
        """Its process has ended, unless the next one has been heard already."""
        known = self._known.get(rank)
        if known is None or known.incarnation <= told.incarnation:
            self._know(rank, _Known(told.incarnation, "starting", now, over=True), now)

    def check(self, now: float) -> bool:
        """Looks who has been silent for too long; True if that is so long that a rank is lost.
        `now`: seconds of a clock that stands still while nobody listens."""
        lost = any(
            now - known.heard > self._host_loss and not known.over for known in self._known.values()
        )
        self.silent = any(
            now - known.heard > SILENCE and not known.over for known in self._known.values()
        )
        self.gone = lost or any(
            known.over or (known.state in BEGINNING and now - known.heard <= SILENCE)
            for known in self._known.values()
        )
        return lost

    def alive(self) -> list[tuple[int, int]]:
        """(rank, incarnation) of the processes that are there, as far as is known."""
        return [(rank, one.incarnation) for rank, one in self._known.items() if not one.over]

    def _know(self, rank: int, known: _Known, now: float) -> None:
        self._known[rank] = known
        self.check(now)
