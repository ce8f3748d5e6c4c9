"""Keeps out what a process sent before another one took over its stage, and lets it know.

Messages of a dead process may still lie in sockets when its successor has been told what to go on
from; heard late, they would contradict that. Sans-IO; knows headers and its own message alone.
"""

from __future__ import annotations

import logging

from pipeinfer.bus.frames import Header
from pipeinfer.messages import Fenced

log = logging.getLogger(__name__)

NOTICE_INTERVAL = 1.0  # seconds; a process that does not know goes on speaking


class FencedOut(Exception):
    """What this process says is not heard. `newest`: the number of the process that is.

    `superseded`: that one has come later and is in this one's place. Otherwise it was there before,
    and its number is greater because the clock was set back: a greater one is to be taken.
    """

    def __init__(self, told: Fenced, by: str, age: float) -> None:
        """`told` by the stage `by`, to a process that is `age` seconds old."""
        self.newest = told.newest
        self.superseded = told.since < age
        why = "has taken over" if self.superseded else "was there before: the clock was set back"
        super().__init__(
            f"{told.stage}: process {told.incarnation} is fenced out: {by} has heard process "
            f"{told.newest}, which {why}"
        )


class IncarnationFilter:
    """Lets the newest process of each sender pass. `dropped`: frames of older ones."""

    def __init__(self) -> None:
        self.dropped = 0
        self._newest: dict[str, int] = {}
        self._since: dict[str, float] = {}  # when the newest was first heard, in seconds
        self._notified: dict[str, tuple[int, float]] = {}  # which older one was told last, and when

    def accepts(self, header: Header, now: float) -> bool:
        """False if a newer process of the same stage was heard before. `now`: monotonic seconds."""
        newest = self._newest.get(header.sender, -1)
        if header.incarnation < newest:
            self.dropped += 1
            return False
        if header.incarnation > newest:
            self._newest[header.sender] = header.incarnation
            self._since[header.sender] = now
        return True

    def notice(self, header: Header, now: float) -> Fenced | None:
        """What the sender of a frame that did not pass is to be told now, if anything."""
        stage, number = header.sender, header.incarnation
        before, at = self._notified.get(stage, (-1, 0.0))
        if before == number and now - at < NOTICE_INTERVAL:
            return None
        self._notified[stage] = number, now
        newest = self._newest[stage]
        if before != number:
            log.warning("%s: process %d is not heard, process %d was", stage, number, newest)
        since = now - self._since[stage]
        return Fenced(stage=stage, incarnation=number, newest=newest, since=since)
