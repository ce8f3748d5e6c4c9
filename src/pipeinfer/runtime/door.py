"""The sockets for HTTP, which gateways inherit before anybody listens on them.

A gateway that has come early waits at a pipe until the door opens. So it has loaded its modules
while the engine loads its own, and nobody can connect before. Knows no gateway and no engine.
"""

from __future__ import annotations

import os
import socket

from pipeinfer.runtime import listening

WAIT_FLAG = "--wait-fd"


class InheritedSockets:
    """Shut until `open`; without sockets before `bind`."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []
        self._source = self._sink = -1  # of the pipe, while the door is shut

    def bind(self, host: str, port: int) -> None:
        """Takes the addresses. ConfigurationError if somebody listens there."""
        self._sockets = listening.bound_sockets(host, port)
        self._source, self._sink = os.pipe()

    @property
    def port(self) -> int:
        """That which was taken, once it is bound."""
        return int(self._sockets[0].getsockname()[1])

    @property
    def descriptors(self) -> list[int]:
        """What a process inherits."""
        return [*(one.fileno() for one in self._sockets), *self._pipe_fds]

    @property
    def arguments(self) -> list[str]:
        """How it is told of them."""
        words = [word for one in self._sockets for word in ("--listen-fd", str(one.fileno()))]
        return words + [word for one in self._pipe_fds for word in (WAIT_FLAG, str(one))]

    def listen(self) -> None:
        """Listens, and lets those begin who wait. ConfigurationError if somebody else listens."""
        listening.listen(self._sockets)
        os.write(self._sink, b".")
        self._close_pipe()

    def close(self) -> None:
        """Only what others inherited is left, and those who still wait end."""
        listening.close_all(self._sockets)
        self._close_pipe()

    @property
    def _pipe_fds(self) -> list[int]:
        return [self._source] if self._source >= 0 else []

    def _close_pipe(self) -> None:
        if self._source >= 0:
            os.close(self._source)
            os.close(self._sink)
        self._source = self._sink = -1


def wait_until_listening(descriptor: int) -> bool:
    """Waits at the door; False if whoever was to open it has gone."""
    with open(descriptor, "rb", buffering=0) as pipe:
        return pipe.read(1) != b""
