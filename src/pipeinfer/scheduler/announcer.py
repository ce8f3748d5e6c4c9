"""When the tokenizers are told of this group: when its standing has changed, and twice a second.

Knows the message, and neither requests nor engines.
"""

from __future__ import annotations

from collections.abc import Callable

from pipeinfer.beats import HEARTBEAT
from pipeinfer.core import EVERYONE, Send
from pipeinfer.messages import Group, Standing


class Announcer:
    """Remembers what was said, and when."""

    def __init__(self) -> None:
        self._said: Standing | None = None
        self._at = float("-inf")

    def say(self, standing: Standing, now: float, told: Callable[[], Group]) -> list[Send]:
        """What is to be published now; `told()` makes it. `now`: monotonic seconds."""
        if standing == self._said and now - self._at < HEARTBEAT:
            return []
        self._said, self._at = standing, now
        return [Send("group", EVERYONE, told())]
