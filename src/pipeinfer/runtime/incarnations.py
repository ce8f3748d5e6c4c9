"""Incarnations: numbers of processes, of which the later process of a stage has the greater; and
the filter that keeps out what an older process sent.

An incarnation is the time when it was given, in Unix nanoseconds, or, where the clock was set back
since the last one, that one and a little more. Whoever starts a process gives it. Messages of a
dead process may still lie in sockets when its successor has been told what to go on from; read
late, they would contradict that. Sans-IO.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, MutableMapping

from pipeinfer.bus.frames import FrameHeader
from pipeinfer.messages import Fenced

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


log = logging.getLogger(__name__)

NOTICE_INTERVAL = 1.0  # seconds; a process that does not know goes on speaking


class FencedOut(Exception):
    """Another process of this stage has a greater incarnation, so that others drop our frames.

    newest: that incarnation.
    superseded: the other process was started later, and is in this one's place. Otherwise it was
        there before, and its number is greater because the clock was set back: this process takes a
        greater one.
    """

    def __init__(self, fenced: Fenced, by: str, age: float) -> None:
        """`fenced` came from the stage `by`, to a process that is `age` seconds old."""
        self.newest = fenced.newest
        self.superseded = fenced.since < age
        why = "has taken over" if self.superseded else "was there before: the clock was set back"
        super().__init__(
            f"{fenced.stage}: process {fenced.incarnation} is fenced out: {by} has heard process "
            f"{fenced.newest}, which {why}"
        )


class IncarnationFilter:
    """Accepts frames of the newest process of each sender. `dropped`: frames of older ones."""

    def __init__(self) -> None:
        self.dropped = 0
        self._newest: dict[str, int] = {}
        self._since: dict[str, float] = {}  # when the newest was first heard, in seconds
        self._notified: dict[
            str, tuple[int, float]
        ] = {}  # the older process notified last, and when

    def accepts(self, header: FrameHeader, now: float) -> bool:
        """False if a newer process of the same stage was heard before. `now`: monotonic seconds."""
        newest = self._newest.get(header.sender, -1)
        if header.incarnation < newest:
            self.dropped += 1
            return False
        if header.incarnation > newest:
            self._newest[header.sender] = header.incarnation
            self._since[header.sender] = now
        return True

    def notice(self, header: FrameHeader, now: float) -> Fenced | None:
        """The message to the sender of a frame that was not accepted; None if it got one lately."""
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
