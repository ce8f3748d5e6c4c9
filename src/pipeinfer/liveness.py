"""Heartbeats and silence: how often stages say that they are there, and by which clock others are
judged.

Knows times in seconds, a stage's ticks and numbers of stages; nothing of who waits for whom.
"""

from __future__ import annotations

# Seconds between two heartbeats of a stage, up to 50 stages.
HEARTBEAT_SECONDS = 0.5
# Times --host-loss: so long a lost host may come back to what nobody else can go on with. It may
# have to boot, and to load a model.
GIVE_UP_FACTOR = 10
# Times --host-loss: after that what is kept for a lost host is dropped: nobody waits for its
# answer.
FORGET_FACTOR = 2 * GIVE_UP_FACTOR
# Heartbeats a second of all stages together. All of them reach every gateway, and what schedulers
# publish of their groups every tokenizer; each takes 0.2 ms where nothing else is to be done.
MAX_HEARTBEAT_RATE = 100
# Seconds. A stage gets a tick twice a second or more often. A stage without a tick for so long was
# stopped, or so busy that others' answers wait as well.
MAX_TICK_GAP = 1.0


def heartbeat_period(stages: int) -> float:
    """Seconds between two heartbeats of a stage in a deployment of so many stages."""
    return max(HEARTBEAT_SECONDS, stages / MAX_HEARTBEAT_RATE)


def silence_limit(stages: int, least: float = 5.0) -> float:
    """Seconds without a heartbeat after which a stage counts as lost, at least `least`."""
    return max(least, 3 * heartbeat_period(stages))


class SuspendAwareClock:
    """A clock that stands still while this process does: stopped by a signal, or on a sleeping
    machine. So nobody else is late because nobody was here to read the answer.

    It is the clock of the events, less all but MAX_TICK_GAP seconds of each longer gap between
    ticks.
    """

    def __init__(self) -> None:
        self._slept = 0.0
        self._ticked = float("inf")  # no gap ends before the first tick

    def tick(self, now: float) -> None:
        """A tick came at `now`."""
        self._slept += self._gap(now)
        self._ticked = now

    def at(self, now: float) -> float:
        """The time of this clock at `now`; never less than before."""
        return now - self._slept - self._gap(now)

    def _gap(self, now: float) -> float:
        """Seconds since the last tick in which the stage must have slept."""
        return max(now - self._ticked - MAX_TICK_GAP, 0.0)
