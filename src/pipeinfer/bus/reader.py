"""Reads frames from ZeroMQ sockets on an event loop, without a task or a future per message.

Knows frames and sockets; what a message means is its handler's business.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable

import zmq

from pipeinfer.bus import frames
from pipeinfer.bus import parts as multipart
from pipeinfer.bus.frames import Header
from pipeinfer.messages import Message

log = logging.getLogger(__name__)

BURST = 128  # messages handled before other events of the loop get their turn
WARNINGS = 100  # kinds of bad frames that are logged, once each
LETTERS = 300  # of each; a stranger chooses some of them

UNHURRIED = ("telemetry", "group", "link")  # what comes there comes all the time, and can wait

Handler = Callable[[str, Header, Message], None]


class Reader:
    """Calls `handler(channel, header, message)` for every frame of the sockets that were added.

    A frame that does not decode is counted in `bad_frames`, logged and dropped; an exception of the
    handler is logged, and ends nothing either. `body` is that of
    the frame that is being handled, as it came. `awake`: the loop does not sleep at present, since
    frames come so quickly one after another (see `start`).
    """

    def __init__(self) -> None:
        self.bad_frames = 0
        self.body = b""
        self.awake = False
        self._patience = self._heard = 0.0
        self._sockets: list[zmq.Socket[bytes]] = []
        self._warned: set[str] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._handler: Handler | None = None

    def add(self, socket: zmq.Socket[bytes]) -> None:
        """Takes over a PULL or SUB socket, before or after `start`."""
        self._sockets.append(socket)
        if self._loop is not None:
            self._watch(socket)

    def start(self, handler: Handler, patience: float = 0.0) -> None:
        """Begins to read, on the running loop.

        patience: after a frame that came within so many seconds of the one before, the loop stays
        awake as long. A process that was put to sleep answers late, by a tenth of a millisecond
        and at times by a whole one, and with cold caches; but staying awake takes a core.
        """
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        self._patience = patience
        for socket in self._sockets:
            self._watch(socket)

    def close(self) -> None:
        """Closes all sockets."""
        for socket in self._sockets:
            if self._loop is not None:
                self._loop.remove_reader(socket.fileno())
            socket.close(linger=0)
        self._sockets.clear()

    def bad(self, reason: str) -> None:
        """Counts a dropped frame; logged once a reason, for a peer may repeat it for ever."""
        self.bad_frames += 1
        reason = reason[:LETTERS]
        if reason not in self._warned and len(self._warned) < WARNINGS:
            self._warned.add(reason)
            log.warning("dropped a frame: %s", reason)

    def _watch(self, socket: zmq.Socket[bytes]) -> None:
        assert self._loop is not None
        self._loop.add_reader(socket.fileno(), self._drain, socket)
        self._loop.call_soon(self._drain, socket)  # the descriptor only tells of changes

    def _drain(self, socket: zmq.Socket[bytes]) -> None:
        """Reads until the socket is empty: its descriptor is edge-triggered."""
        assert self._loop is not None and self._handler is not None
        for _ in range(BURST):
            if socket.closed:
                return
            try:
                parts = multipart.receive(socket)
            except zmq.Again:
                return
            try:
                channel, header, message = frames.decode(parts)
            except frames.BadFrame as error:
                self.bad(str(error))
                continue
            self.body = parts[2]
            if self._patience and channel not in UNHURRIED:
                self._stay_awake()
            try:
                self._handler(channel, header, message)
            except Exception:  # else the rest would lie there until the next frame comes, or longer
                log.exception("a %s of %s", type(message).__name__, header.sender[:LETTERS])
        self._loop.call_soon(self._drain, socket)

    def _stay_awake(self) -> None:
        """A frame came."""
        now = time.monotonic()
        brisk, self._heard = now - self._heard < self._patience, now
        if brisk and not self.awake and self._loop is not None:
            self.awake = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """A turn of the loop that looks for frames without waiting for one."""
        assert self._loop is not None
        os.sched_yield()  # the thread that brings the next frame may have been given this core
        if self._sockets and time.monotonic() - self._heard < self._patience:
            self._loop.call_soon(self._turn)
        else:
            self.awake = False
