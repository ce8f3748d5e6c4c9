"""When tokenizers are told of this group: after each change of its standing, and now and then.

Knows which engines are there, and no requests.
"""

from __future__ import annotations

from collections.abc import Callable

from pipeinfer.beats import period
from pipeinfer.core import EVERYONE, Send
from pipeinfer.messages import GroupStatus, Standing
from pipeinfer.scheduler.options import SchedulerOptions
from pipeinfer.scheduler.ranks import Ranks


class Announcer:
    """Remembers what was said, and when. `ranks`: of the group `group`, by what is said of them;
    `engines`: their numbers, by stage id. `incarnation`: of this scheduler."""

    def __init__(self, group: int, incarnation: int, options: SchedulerOptions) -> None:
        self._every = period(options.groups)
        self.group = group
        self.incarnation = incarnation
        self.ranks = Ranks(options.host_loss)
        self.engines = {f"engine-{group}-{rank}": rank for rank in range(options.tp)}
        self._said: Standing | None = None
        self._at = float("-inf")

    def say(self, standing: Standing, now: float, told: Callable[[], GroupStatus]) -> list[Send]:
        """What is to be published now; `told()` makes it. `now`: monotonic seconds."""
        if standing == self._said and now - self._at < self._every:
            return []
        self._said = standing
        self._at = now
        return [Send("group", EVERYONE, told())]
