"""Whether a group is to sleep, and which requests wait until it has fallen asleep.

Knows no engine and no clock. That the ranks do it is the business of Epochs.
"""

from __future__ import annotations

from pipeinfer.messages import SetSleep, SleepMode
from pipeinfer.scheduler.request import Request


class SleepRequest:
    """What was asked for last.

    level: see SetSleep; 0: to be awake. held: by id, requests that have come since, while those
    before are answered. settled: what holds is known, so no engine's word of earlier times counts.
    """

    def __init__(self) -> None:
        self.level = 0
        self.held: dict[str, Request] = {}
        self.settled = False
        self._refuses = False
        self._mode: SleepMode = "wait"
        self._told: tuple[int, bool] = (0, False)  # level and refusals that ranks were told of

    @property
    def refuses(self) -> bool:
        """Whether requests that come now are refused."""
        return self.level > 0 and self._refuses

    @property
    def falls(self) -> bool:
        """Whether the group is awake, and is to sleep."""
        return self.level > 0 and not self._told[0]

    def ask(self, asked: SetSleep) -> None:
        """It is to sleep. Who asks again may hurry, or want a deeper sleep, but no lighter one."""
        self.settled = True
        self.level = max(self.level, asked.level)
        self._mode, self._refuses = asked.mode, asked.refuses

    def due(self, live: int) -> bool:
        """Whether ranks are to be told now. live: requests that the group has, with `held`."""
        if not self.level or self._told == (self.level, self._refuses):
            return False
        return not self.falls or self._mode == "keep" or live == len(self.held)

    def begin(self) -> list[Request]:
        """Ranks are told; returns those that were held, which now wait as for any engine."""
        self._told = self.level, self._refuses
        return self._take_held()

    def wake_up(self) -> list[Request]:
        """It is to be awake; returns those that were held."""
        self.settled = True
        self.level, self._told = 0, (0, False)
        return self._take_held()

    def _take_held(self) -> list[Request]:
        held, self.held = list(self.held.values()), {}
        return held
