"""Feeds a core the recorded inputs, one after the other, and compares what it answers.

Knows a core and groups of entries; no file, no device and no clock but the recorded one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipeinfer.core import LOCAL, Core, Send
from replay.comparison import Skips
from replay.difference import Difference, first_difference
from replay.recording import Entry, Group

Deliver = Callable[[Any], None]


class Player:
    """Plays groups on `core`. `until`: the sequence number to stop before; `halt(core, entry)` is
    called there, once. `deliver` gets what the core sends to its driver and no recording holds.

    current: the group that is being played, also after its input raised.
    """

    def __init__(
        self,
        core: Core,
        skips: Skips,
        deliver: Deliver | None = None,
        until: int | None = None,
        halt: Callable[[Core, Entry], None] | None = None,
    ) -> None:
        self._core, self._skips, self._deliver = core, skips, deliver
        self._until, self._halt = until, halt
        self.current: Group | None = None
        self.inputs = self.outputs = 0

    def reached(self, group: Group) -> bool:
        """True from the group on that holds message `until`."""
        return self._until is not None and group.last_seq >= self._until

    def feed(self, group: Group) -> Difference | None:
        """Plays one group; raises what the core raises."""
        self.current = group
        entry = group.input
        if self._halt is not None and self.reached(group):
            halt, self._halt = self._halt, None
            halt(self._core, entry)
        sends = self._core.handle(entry.message, entry.time)
        self.inputs += 1
        kept = [send for send in sends if not self._for_the_device(send)]
        self.outputs += len(kept)
        return first_difference(group, kept, self._skips, tail=group.is_last)

    def _for_the_device(self, send: Send) -> bool:
        """Arrays for a device are not in the recording: whoever computes gets them."""
        if send.channel != LOCAL or type(send.message).__name__ != "Compute":
            return False
        if self._deliver is not None:
            self._deliver(send.message)
        return True
