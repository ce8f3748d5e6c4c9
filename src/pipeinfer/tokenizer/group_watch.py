"""From what schedulers say of their groups, to what a router wants to know of each.

Knows how long silence may last; sends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from pipeinfer.liveness import SuspendAwareClock, silence_limit
from pipeinfer.messages import Ended, GroupStatus
from pipeinfer.tokenizer.routing import Report

SILENCE = (
    3.0  # seconds without a word, after which a scheduler counts as lost, or more (liveness.py)
)
NEVER = -1  # instead of an incarnation: no scheduler was heard


@dataclass
class _Known:
    """What its scheduler said last, when (seconds), and whether it is silent or has ended since."""

    told: GroupStatus
    heard: float
    lost: bool = False

    @property
    def report(self) -> Report:
        told = self.told
        up = told.standing == "serves" and not self.lost
        return Report(up, told.tokens, told.capacity, told.evicted, told.epoch, told.requests)

    @property
    def deserted(self) -> bool:
        return self.told.standing == "deserted" and not self.lost


class GroupWatch:
    """The latest of each of `groups`. One of which nothing was heard counts as up: it starts.

    host_loss: seconds of silence after which nobody waits for a group any more; no less than what
    many groups may take to speak. Seconds in which this stage was stopped do not count.
    """

    def __init__(self, groups: int = 1, host_loss: float = inf) -> None:
        self.groups = tuple(range(groups))
        self.host_loss = max(host_loss, silence_limit(groups, 0.0))
        self._silence = min(silence_limit(groups, SILENCE), self.host_loss)
        self._unheard = set(self.groups)
        self._awake = SuspendAwareClock()
        self._groups: dict[int, _Known] = {}

    def hear(self, told: GroupStatus, now: float) -> Report | None:
        """The group's report; None for a late word of a scheduler, or of an epoch, before. `now`:
        monotonic s."""
        known = self._groups.get(told.group)
        if known is not None and _epoch(told) < _epoch(known.told):
            return None
        self._unheard.discard(told.group)
        known = self._groups[told.group] = _Known(told, self._awake.at(now))
        return known.report

    def ended(self, told: Ended) -> tuple[int, Report | None]:
        """Somebody has ended. If that is the scheduler of a group, and news: its number and report;
        else (-1, None)."""
        name, _, number = told.stage.rpartition("-")
        if name != "scheduler" or not number.isdecimal():
            return -1, None
        known = self._groups.get(int(number))
        if known is None or known.lost or not NEVER < known.told.incarnation <= told.incarnation:
            return -1, None
        known.lost = True
        return known.told.group, known.report

    def tick(self, now: float) -> None:
        """This stage's timer fired."""
        self._awake.tick(now)

    def silent(self, now: float) -> list[tuple[int, Report]]:
        """Groups that are down from now on because their scheduler has not been heard."""
        now = self._awake.at(now)
        self._wait_for_unheard(now)
        gone: list[tuple[int, Report]] = []
        for number, known in self._groups.items():
            started = known.told.incarnation != NEVER
            patience = self._silence if started else self.host_loss
            if now - known.heard > patience and not known.lost:
                was, known.lost = known.report.up, True
                if was:
                    gone.append((number, known.report))
        return gone

    def lost(self, now: float) -> list[tuple[int, float]]:
        """Groups whose scheduler has not been heard for `host_loss`, with the seconds since."""
        now = self._awake.at(now)
        silences = [(number, now - known.heard) for number, known in self._groups.items()]
        return [(number, seconds) for number, seconds in silences if seconds > self.host_loss]

    def is_deserted(self, group: int) -> bool:
        """Whether the scheduler of `group` has no engines, and can hand its requests over."""
        return group in self._groups and self._groups[group].deserted

    def deserted(self) -> list[int]:
        """All such groups."""
        return sorted(group for group, known in self._groups.items() if known.deserted)

    def _wait_for_unheard(self, now: float) -> None:
        """From the first time on that somebody asks."""
        for group in self._unheard:
            told = GroupStatus(group=group, incarnation=NEVER, standing="serves")
            self._groups[group] = _Known(told, now)
        self._unheard.clear()


def _epoch(status: GroupStatus) -> tuple[int, int]:
    return status.incarnation, status.epoch
