"""Keeps out what a process sent before another one took over its stage.

Messages of a dead process may still lie in sockets when its successor has been told what to go on
from; heard late, they would contradict that. Knows headers, no messages.
"""

from __future__ import annotations

from pipeinfer.bus.frames import Header


class Fence:
    """Lets the newest process of each sender pass. `dropped`: frames of older ones."""

    def __init__(self) -> None:
        self.dropped = 0
        self._newest: dict[str, int] = {}

    def passes(self, header: Header) -> bool:
        """False if a newer process of the same stage was heard before."""
        newest = self._newest.get(header.sender, 0)
        if header.incarnation < newest:
            self.dropped += 1
            return False
        if header.incarnation > newest:
            self._newest[header.sender] = header.incarnation
        return True
