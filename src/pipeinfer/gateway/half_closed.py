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
LOOKS = (0.01, 0.05, 0.2, 1.0)
CLOSE_WAIT = 8  # of linux/tcp_states.h: the peer has stopped sending and nothing else


def watch(
    transport: asyncio.Transport, wanted: Callable[[], bool], probe: Callable[[], None]
) -> None:
    """Aborts `transport` as soon as its peer is known to be gone, while `wanted()`.

    `probe()` sends something that the peer must ignore, where it can.
    """
    loop = asyncio.get_running_loop()

    def ask() -> None:
        if wanted() and not transport.is_closing():
            probe()
            loop.call_later(LOOKS[0], look, 0)

    def look(number: int) -> None:
        if not wanted() or transport.is_closing():
            return
        if not only_half_closed(transport):
            transport.abort()
        elif number + 1 < len(LOOKS):
            loop.call_later(LOOKS[number + 1] - LOOKS[number], look, number + 1)
        else:
            ask()

    ask()


def only_half_closed(transport: asyncio.Transport) -> bool:
    """Whether the peer, which has stopped sending, may still receive. Where the system does not
    tell, it is believed to, until a write fails."""
    raw = transport.get_extra_info("socket")
    if raw is None or not hasattr(socket, "TCP_INFO"):
        return True
    return raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == CLOSE_WAIT
