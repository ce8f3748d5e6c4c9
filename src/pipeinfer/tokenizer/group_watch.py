"""From what schedulers say of their groups, to what a router wants to know of each.

Knows how long silence may last; sends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from pipeinfer.awake import SuspendAwareClock
from pipeinfer.beats import silence
from pipeinfer.messages import Ended, GroupStatus
from pipeinfer.tokenizer.routing import GroupReport

MAX_SILENCE_SECONDS = (
    3.0  # seconds without a word, after which a scheduler counts as lost, or more (beats.py)
)
NO_INCARNATION = -1  # instead of an incarnation: no scheduler was heard


@dataclass
class _GroupState:
    """What its scheduler said last, when (seconds), and whether it is silent or has ended since."""

    status: GroupStatus
    received_at: float
    lost: bool = False

    @property
    def report(self) -> GroupReport:
        told = self.status
        up = told.standing == "serves" and not self.lost
        return GroupReport(up, told.tokens, told.capacity, told.evicted, told.epoch, told.requests)

    @property
    def deserted(self) -> bool:
        return self.status.standing == "deserted" and not self.lost


class GroupMonitor:
    """The latest of each of `groups`. One of which nothing was heard counts as up: it starts.

    host_loss: seconds of silence after which nobody waits for a group any more; no less than what
    many groups may take to speak. Seconds in which this stage was stopped do not count.
    """

    def __init__(self, groups: int = 1, host_loss: float = inf) -> None:
        self.groups = tuple(range(groups))
        self.host_loss = max(host_loss, silence(groups, 0.0))
        self._max_silence = min(silence(groups, MAX_SILENCE_SECONDS), self.host_loss)
        self._not_started = set(self.groups)
        self._awake = SuspendAwareClock()
        self._groups: dict[int, _GroupState] = {}

    def on_status(self, status: GroupStatus, now: float) -> GroupReport | None:
        """The group's report; None for a late word of a scheduler, or of an epoch, before. `now`:
        monotonic s."""
        known = self._groups.get(status.group)
        if known is not None and _epoch(status) < _epoch(known.status):
            return None
        self._not_started.discard(status.group)
        known = self._groups[status.group] = _GroupState(status, self._awake.at(now))
        return known.report

    def on_ended(self, event: Ended) -> tuple[int, GroupReport | None]:
        """Somebody has ended. If that is the scheduler of a group, and news: its number and report;
        else (-1, None)."""
        name, _, number = event.stage.rpartition("-")
        if name != "scheduler" or not number.isdecimal():
            return -1, None
        known = self._groups.get(int(number))
        if (
            known is None
            or known.lost
            or not NO_INCARNATION < known.status.incarnation <= event.incarnation
        ):
            return -1, None
        known.lost = True
        return known.status.group, known.report

    def tick(self, now: float) -> None:
        """This stage's timer fired."""
        self._awake.tick(now)

    def newly_silent(self, now: float) -> list[tuple[int, GroupReport]]:
        """Groups that are down from now on because their scheduler has not been heard."""
        now = self._awake.at(now)
        self._expect_all(now)
        gone: list[tuple[int, GroupReport]] = []
        for number, known in self._groups.items():
            started = known.status.incarnation != NO_INCARNATION
            patience = self._max_silence if started else self.host_loss
            if now - known.received_at > patience and not known.lost:
                was, known.lost = known.report.up, True
                if was:
                    gone.append((number, known.report))
        return gone

    def lost(self, now: float) -> list[tuple[int, float]]:
        """Groups whose scheduler has not been heard for `host_loss`, with the seconds since."""
        now = self._awake.at(now)
        silences = [(number, now - known.received_at) for number, known in self._groups.items()]
        return [(number, seconds) for number, seconds in silences if seconds > self.host_loss]

    def is_deserted(self, group: int) -> bool:
        """Whether the scheduler of `group` has no engines, and can hand its requests over."""
        return group in self._groups and self._groups[group].deserted

    def deserted(self) -> list[int]:
        """All such groups."""
        return sorted(group for group, known in self._groups.items() if known.deserted)

    def _expect_all(self, now: float) -> None:
        """From the first time on that somebody asks."""
        for group in self._not_started:
            told = GroupStatus(group=group, incarnation=NO_INCARNATION, standing="serves")
            self._groups[group] = _GroupState(told, now)
        self._not_started.clear()


def _epoch(status: GroupStatus) -> tuple[int, int]:
    return status.incarnation, status.epoch
