"""The parts of a frame through a ZeroMQ socket.

As pyzmq's own multipart calls, which spend three times as long on sums of flags that are enums, and
on asking the socket after each part whether there is another.
"""

from __future__ import annotations

from collections.abc import Sequence

import zmq
from zmq.backend import Socket

_LAST = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_send, _recv = Socket.send, Socket.recv


def send(socket: zmq.Socket[bytes], parts: Sequence[bytes]) -> None:
    """Sends all parts as one message, without waiting; zmq.Again if that cannot be."""
    *first, last = parts
    for part in first:
        _send(socket, part, _MORE)
    _send(socket, last, _LAST)


def receive(socket: zmq.Socket[bytes]) -> list[bytes]:
    """The parts of the next message; zmq.Again if there is none."""
    frame = _recv(socket, _LAST, False)
    parts = [frame.bytes]
    while frame.more:
        frame = _recv(socket, _LAST, False)
        parts.append(frame.bytes)
    return parts
