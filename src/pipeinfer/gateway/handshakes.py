"""Connections on their way to TLS: each counts as one of the gateway's as soon as it is accepted.

An event loop's own server shows a connection only after its handshake, so sockets are accepted
here. Knows no HTTP, and not who counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable

from pipeinfer.runtime.listening import BACKLOG

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT = 10.0  # seconds for a handshake
TLS_CLOSE_TIMEOUT = 5.0  # seconds for the client's part in the end of TLS
OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
ACCEPT_RETRY = 1.0  # seconds until one more is tried where there was no room for it


class Acceptor:
    """Hands each connection that comes to `listener` to `accepted`, until it is closed."""

    def __init__(self, listener: socket.socket, accepted: Callable[[socket.socket], None]) -> None:
        self._listener = listener
        self._accepted = accepted
        self._loop = asyncio.get_running_loop()
        self._open = True
        self._listen()

    def close(self) -> None:
        """What waits to be accepted is for others who have the socket."""
        self._open = False
        self._loop.remove_reader(self._listener)
        self._listener.close()

    def _listen(self) -> None:
        if self._open:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(BACKLOG):
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in OUT_OF_FILES:
                    raise
                log.error("cannot accept a connection: %s", error.strerror)
                self._loop.remove_reader(self._listener)  # else it would be told again at once
                self._loop.call_later(ACCEPT_RETRY, self._listen)
                return
            accepted.setblocking(False)
            self._accepted(accepted)


class Handshake:
    """Of one accepted socket. `head_since`: see connections.Counted."""

    def __init__(self, accepted: socket.socket) -> None:
        self.head_since: float | None = None
        self._accepted = accepted

    async def run(self, context: ssl.SSLContext, make: Callable[[], asyncio.Protocol]) -> None:
        """Ends with the handshake. What `make()` gives is connected then, if it went well; if not,
        that is a stranger's noise, and the socket is closed."""
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(
                make,
                self._accepted,
                ssl=context,
                ssl_handshake_timeout=HANDSHAKE_TIMEOUT,
                ssl_shutdown_timeout=TLS_CLOSE_TIMEOUT,
            )

    def evict(self) -> None:
        """The transport, which owns the socket, finds its end and closes it."""
        with contextlib.suppress(OSError):
            self._accepted.shutdown(socket.SHUT_RDWR)
