"""Tells a client that has only stopped sending from one that is gone.

Both look the same at first: the end of what they send. But whoever is gone answers whatever is sent
to it with a reset, which then shows in the socket's state. Knows sockets, and no HTTP.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

# Seconds after a probe at which the answer to it is looked for; after the last the next probe is
# sent. The first is long enough for a client on this host, the second for one far away.
CHECK_DELAYS = (0.01, 0.05, 0.2, 1.0)
CLOSE_WAIT = 8  # of linux/tcp_states.h: the peer has stopped sending and nothing else


def abort_when_gone(
    transport: asyncio.Transport, wanted: Callable[[], bool], probe: Callable[[], None]
) -> None:
    """Aborts `transport` as soon as its peer is known to be gone, while `wanted()`.

    `probe()` sends something that the peer must ignore, where it can.
    """
    _PeerProbe(transport, wanted, probe).send_probe()


class _PeerProbe:
    """Of one transport. Only the loop's next call knows it, so it ends with the last look."""

    def __init__(
        self, transport: asyncio.Transport, wanted: Callable[[], bool], probe: Callable[[], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self._wanted = wanted
        self._probe = probe

    def send_probe(self) -> None:
        """Sends a probe, and looks for the answer to it from then on."""
        if self._needed():
            self._probe()
            self._loop.call_later(CHECK_DELAYS[0], self._check, 0)

    def _check(self, number: int) -> None:
        if not self._needed():
            return
        if not only_half_closed(self._transport):
            self._transport.abort()
        elif number + 1 < len(CHECK_DELAYS):
            self._loop.call_later(
                CHECK_DELAYS[number + 1] - CHECK_DELAYS[number], self._check, number + 1
            )
        else:
            self.send_probe()

    def _needed(self) -> bool:
        return self._wanted() and not self._transport.is_closing()


def only_half_closed(transport: asyncio.Transport) -> bool:
    """Whether the peer, which has stopped sending, may still receive. Where the system does not
    tell, it is believed to, until a write fails."""
    raw = transport.get_extra_info("socket")
    if raw is None or not hasattr(socket, "TCP_INFO"):
        return True
    return raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == CLOSE_WAIT
