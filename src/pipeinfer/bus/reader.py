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
from pipeinfer.bus.frames import FrameHeader
from pipeinfer.bus.sockets import receive_multipart
from pipeinfer.messages import Message

log = logging.getLogger(__name__)

BURST = 128  # messages handled before other events of the loop get their turn
MAX_WARNINGS = 100  # reasons for dropping that are logged, once each
MAX_REASON_CHARS = 300  # of a logged reason; a stranger chooses some of them

NOT_BUSY_POLLED = (
    "telemetry",
    "group",
    "link",
)  # what comes there comes all the time, and can wait

Handler = Callable[[str, FrameHeader, Message], None]


class Reader:
    """Calls `handler(channel, header, message)` for every frame of the sockets that were added.

    A frame that does not decode is dropped and logged; an exception of the handler is logged, and
    ends nothing either.

    bad_frames: how many were dropped.
    body: of the frame that is being handled, as it came.
    busy_polling: whether the loop does not sleep at present (see `start`).
    """

    def __init__(self) -> None:
        self.bad_frames = 0
        self.body = b""
        self.busy_polling = False
        self._busy_poll = self._last_frame = 0.0
        self._sockets: list[zmq.Socket[bytes]] = []
        self._logged: set[str] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._handler: Handler | None = None

    def add(self, socket: zmq.Socket[bytes]) -> None:
        """Takes over a PULL or SUB socket, before or after `start`."""
        self._sockets.append(socket)
        if self._loop is not None:
            self._watch(socket)

    def start(self, handler: Handler, busy_poll: float = 0.0) -> None:
        """Begins to read, on the running loop.

        busy_poll: after a frame that came within so many seconds of the one before, the loop polls
        that long without sleeping; 0 for never. A process that was put to sleep answers late, by a
        tenth of a millisecond and at times by a whole one, and with cold caches; but polling takes
        a core.
        """
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        self._busy_poll = busy_poll
        for socket in self._sockets:
            self._watch(socket)

    def close(self) -> None:
        """Closes all sockets."""
        for socket in self._sockets:
            if self._loop is not None:
                self._loop.remove_reader(socket.fileno())
            socket.close(linger=0)
        self._sockets.clear()

    def drop(self, reason: str) -> None:
        """Counts a dropped frame; logged once a reason, for a peer may repeat it for ever."""
        self.bad_frames += 1
        reason = reason[:MAX_REASON_CHARS]
        if reason not in self._logged and len(self._logged) < MAX_WARNINGS:
            self._logged.add(reason)
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
                parts = receive_multipart(socket)
            except zmq.Again:
                return
            try:
                channel, header, message = frames.decode(parts)
            except frames.BadFrame as error:
                self.drop(str(error))
                continue
            self.body = parts[2]
            if self._busy_poll and channel not in NOT_BUSY_POLLED:
                self._note_frame()
            try:
                self._handler(channel, header, message)
            except Exception:  # else the next frames would wait until yet another one comes
                log.exception(
                    "a %s of %s", type(message).__name__, header.sender[:MAX_REASON_CHARS]
                )
        self._loop.call_soon(self._drain, socket)

    def _note_frame(self) -> None:
        """A frame came: begins to poll if another came shortly before."""
        now = time.monotonic()
        soon, self._last_frame = now - self._last_frame < self._busy_poll, now
        if soon and not self.busy_polling and self._loop is not None:
            self.busy_polling = True
            self._loop.call_soon(self._poll_again)

    def _poll_again(self) -> None:
        """A turn of the loop that looks for frames without waiting for one."""
        assert self._loop is not None
        os.sched_yield()  # the thread that brings the next frame may have been given this core
        if self._sockets and time.monotonic() - self._last_frame < self._busy_poll:
            self._loop.call_soon(self._poll_again)
        else:
            self.busy_polling = False
