"""Feeds a core the recorded inputs, one after the other, and compares what it answers.

Knows a core and exchanges of entries; no file, no device and no clock but the recorded one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipeinfer.core import LOCAL, Core, Send
from pipeinfer.replay.comparison import Skips
from pipeinfer.replay.difference import Difference, first_difference
from pipeinfer.replay.recording import Entry, Exchange

Deliver = Callable[[Any], None]
DEVICE = ("Compute", "Capture")  # what a device does whose steps are played


class Player:
    """Plays exchanges on `core`. `until`: the sequence number to stop before; `halt(core, entry)`
    is called there, once. `deliver` gets what the core sends to its device.

    current: the exchange that is being played, also after its input raised.
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
        self.current: Exchange | None = None
        self.inputs = self.outputs = 0

    def reached(self, exchange: Exchange) -> bool:
        """True from the exchange on that holds message `until`."""
        return self._until is not None and exchange.last_seq >= self._until

    def feed(self, exchange: Exchange) -> Difference | None:
        """Plays one exchange; raises what the core raises."""
        self.current = exchange
        entry = exchange.input
        if self._halt is not None and self.reached(exchange):
            halt, self._halt = self._halt, None
            halt(self._core, entry)
        sends = self._core.handle(entry.message, entry.time)
        self.inputs += 1
        kept = [send for send in sends if not self._for_the_device(send)]
        self.outputs += len(kept)
        return first_difference(exchange, kept, self._skips, tail=exchange.is_last)

    def _for_the_device(self, send: Send) -> bool:
        """Whoever computes gets it. Arrays for a device are not in the recording."""
        kind = type(send.message).__name__
        if send.channel != LOCAL or kind not in DEVICE:
            return False
        if self._deliver is not None:
            self._deliver(send.message)
        return kind == "Compute"
