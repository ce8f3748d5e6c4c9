"""How far the clocks of several recordings are apart, from what they heard of each other.

A message that clock i stamped at s and clock j received at r says that j is ahead of i by at most
r - s, because no message arrives before it was sent. The smallest such numbers along all ways
between two clocks, both ways round, bound their distance; the middle is the estimate, as in NTP
(Mills, RFC 5905) but over any number of hops. Knows recordings' entries only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeinfer.replay.recording import Recording

FAR = float("inf")


class Offset(NamedTuple):
    """Seconds to subtract from a recording's times; right to within `error` seconds, which is
    infinite where the two have only the wall clocks of their hosts in common."""

    seconds: float
    error: float


def offsets(recordings: Sequence[Recording]) -> list[Offset]:
    """Of each recording against the first. Zero wherever that is possible: the stages of one host
    share a monotonic clock, and two hosts that were not started together never come so close."""
    if not recordings:
        return []
    bounds = _bounds(recordings)
    found = []
    for at, recording in enumerate(recordings):
        most, least = bounds[0][at], -bounds[at][0]
        if least <= 0.0 <= most and max(most, -least) < FAR:
            found.append(Offset(0.0, 0.0))
        elif most < FAR and least > -FAR:
            found.append(Offset((most + least) / 2, (most - least) / 2))
        else:
            found.append(Offset(_by_wall_clock(recordings[0], recording), FAR))
    return found


def _bounds(recordings: Sequence[Recording]) -> list[list[float]]:
    """[i][j]: clock j is ahead of clock i by at most so many seconds (Floyd and Warshall)."""
    number = {recording.stage: at for at, recording in enumerate(recordings)}
    count = len(recordings)
    bounds = [[0.0 if i == j else FAR for j in range(count)] for i in range(count)]
    for at, recording in enumerate(recordings):
        for entry in recording.entries:
            sender = number.get(entry.peer)
            if entry.direction == "in" and entry.sent and sender is not None:
                bounds[sender][at] = min(bounds[sender][at], entry.time - entry.sent)
    for k in range(count):
        for i in range(count):
            for j in range(count):
                bounds[i][j] = min(bounds[i][j], bounds[i][k] + bounds[k][j])
    return bounds


def _by_wall_clock(first: Recording, other: Recording) -> float:
    """Monotonic clocks against wall clocks, which somebody keeps right."""
    a, b = first.header, other.header
    return (b.monotonic - b.wall) - (a.monotonic - a.wall)
