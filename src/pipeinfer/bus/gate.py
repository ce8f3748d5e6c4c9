"""The gate of a process with CURVE keys: who may connect, and a log line a minute for who may not.

Answers libzmq's authentication requests (ZAP, ZeroMQ RFC 27) and hears of handshakes that failed
before it was asked. Runs in a thread of its own, so a busy stage keeps nobody waiting. Knows no
messages.
"""

from __future__ import annotations

import logging
import threading
import time
from queue import SimpleQueue

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from pipeinfer.bus.refusals import Refusals

log = logging.getLogger(__name__)

ZAP = "inproc://zeromq.zap.01"
POLL_MS = 1_000
BY_PROTOCOL, BY_KEY = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_AUTH
BROKEN_OFF = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class Gate:
    """Lets holders of `allowed` keys connect to the sockets of `context`. One for a context."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allowed: frozenset[bytes]) -> None:
        self._context = context
        self._allowed = {z85.decode(key) for key in allowed}
        self._refusals = Refusals(log)
        self._zap = context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind(ZAP)
        place = f"inproc://gate-{id(self)}"
        self._bell = context.socket(zmq.PAIR)
        self._hears = context.socket(zmq.PAIR)
        self._hears.bind(place)
        self._bell.connect(place)
        self._new: SimpleQueue[tuple[zmq.Socket[bytes], str]] = SimpleQueue()
        self._watched = 0
        self._thread = threading.Thread(target=self._run, name="gate", daemon=True)
        self._thread.start()

    @property
    def refused(self) -> int:
        """Handshakes that were refused or failed, since the start."""
        return self._refusals.total

    def watch(self, socket: zmq.Socket[bytes], peer: str) -> None:
        """Hears of the failed handshakes of `socket`, before it binds or connects to `peer`.

        `peer`: "" for a socket that binds.
        """
        self._watched += 1
        place = f"inproc://gate-{id(self)}-{self._watched}"
        socket.monitor(place, BY_PROTOCOL | BY_KEY | BROKEN_OFF)
        monitor = self._context.socket(zmq.PAIR)
        monitor.linger, monitor.rcvhwm = 0, 0
        monitor.connect(place)
        self._new.put((monitor, peer))
        self._bell.send(b"new")

    def close(self) -> None:
        """Nobody is let in any more. Call it when the watched sockets are closed."""
        self._bell.send(b"")
        self._thread.join()
        self._bell.close(linger=0)

    # ---------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        peers: dict[zmq.Socket[bytes], str] = {}
        poller = zmq.Poller()
        for socket in (self._zap, self._hears):
            poller.register(socket, zmq.POLLIN)
        open_ = True
        while open_:
            for socket, _ in poller.poll(POLL_MS):
                if socket is self._zap:
                    self._answer(self._zap.recv_multipart())
                elif socket is self._hears:
                    open_ = bool(self._hears.recv())
                elif not self._hear(socket.recv_multipart(), peers[socket]):
                    poller.unregister(socket)
                    del peers[socket]
                    socket.close(linger=0)
            while not self._new.empty():
                monitor, peer = self._new.get()
                peers[monitor] = peer
                poller.register(monitor, zmq.POLLIN)
            self._refusals.report(time.monotonic())
        for socket in (self._zap, self._hears, *peers):
            socket.close(linger=0)

    def _answer(self, request: list[bytes]) -> None:
        """One ZAP request: version, id, domain, address, identity, mechanism, credentials."""
        if len(request) < 6:  # libzmq asks otherwise; but without an answer nobody else gets one
            self._refusals.note(f"a question of {len(request)} parts about nobody")
            number = request[1] if len(request) > 1 else b""
            self._zap.send_multipart([b"1.0", number, b"500", b"malformed", b"", b""])
            return
        version, number, _, address, _, mechanism, *credentials = request
        key = credentials[0] if mechanism == b"CURVE" and credentials else b""
        if key in self._allowed:
            status, text = b"200", b"OK"
        else:
            self._refusals.note(f"{address.decode('ascii', 'replace')} shows an unknown key")
            # Not 400: told that, a peer never tries again, and its queue is lost with the attempt.
            status, text = b"300", b"unknown key"
        self._zap.send_multipart([version, number, status, text, b"", b""])

    def _hear(self, parts: list[bytes], peer: str) -> bool:
        """One event of a watched socket; False when it was the last."""
        try:
            said = parse_monitor_message(parts)
        except (RuntimeError, ValueError) as error:
            self._refusals.note(f"an event of a socket that cannot be read: {error}")
            return True
        event, place = said["event"], said["endpoint"].decode("ascii", "replace")
        if event == zmq.EVENT_MONITOR_STOPPED:
            return False
        if peer:
            self._refusals.note(f"{peer} at {place} breaks off the handshake; is each key right?")
        elif event != BY_KEY:  # that one is known from the ZAP request, with its address
            self._refusals.note(f"somebody at {place} does not know its key")
        return True
