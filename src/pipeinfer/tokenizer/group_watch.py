"""From what schedulers say of their groups, to what a router wants to know of each.

Knows how long silence may last; sends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeinfer.beats import silence
from pipeinfer.messages import Ended, GroupStatus
from pipeinfer.tokenizer.routing import Report

SILENCE = 3.0  # seconds without a word, after which a scheduler counts as lost, or more (beats.py)


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
    """The latest of each of `groups`. One of which nothing was heard counts as up: it starts."""

    def __init__(self, groups: int = 1) -> None:
        self._silence = silence(groups, SILENCE)
        self._groups: dict[int, _Known] = {}

    def hear(self, told: GroupStatus, now: float) -> Report | None:
        """The group's report; None for a late word of a scheduler, or of an epoch, before. `now`:
        monotonic s."""
        known = self._groups.get(told.group)
        if known is not None and _when(told) < _when(known.told):
            return None
        known = self._groups[told.group] = _Known(told, now)
        return known.report

    def ended(self, told: Ended) -> tuple[int, Report | None]:
        """Somebody has ended. If that is the scheduler of a group, and news: its number and report;
        else (-1, None)."""
        name, _, number = told.stage.rpartition("-")
        if name != "scheduler" or not number.isdecimal():
            return -1, None
        known = self._groups.get(int(number))
        if known is None or known.lost or told.incarnation < known.told.incarnation:
            return -1, None
        known.lost = True
        return known.told.group, known.report

    def silent(self, now: float) -> list[tuple[int, Report]]:
        """Groups that are down from now on because their scheduler has not been heard."""
        gone: list[tuple[int, Report]] = []
        for number, known in self._groups.items():
            if now - known.heard > self._silence and not known.lost:
                was, known.lost = known.report.up, True
                if was:
                    gone.append((number, known.report))
        return gone

    def is_deserted(self, group: int) -> bool:
        """Whether the scheduler of `group` has no engines, and can hand its requests over."""
        return group in self._groups and self._groups[group].deserted

    def deserted(self) -> list[int]:
        """All such groups."""
        return sorted(group for group, known in self._groups.items() if known.deserted)


def _when(told: GroupStatus) -> tuple[int, int]:
    return told.incarnation, told.epoch
