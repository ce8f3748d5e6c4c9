"""The sockets of one stage: an inbox, one outbox per peer, what it publishes and listens to.

Knows no message's meaning. Receiving is driven by the event loop's readers on ZeroMQ's file
descriptors: no task and no future per message. Nothing is ever dropped here by a high-water mark
except telemetry; the gateway's queue limit bounds what is under way.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import zmq

from pipeinfer.bus import addresses, frames
from pipeinfer.core import EVERYONE, Send
from pipeinfer.messages import PROTOCOL, Header, Message
from pipeinfer.runtime.topology import Identity, Topology

log = logging.getLogger(__name__)

BURST = 128  # messages handled before other events of the loop get their turn
LINGER_MS = 1_000  # how long closing waits for messages that were sent but have not left
TELEMETRY_HWM = 1_000
PUBLISHED = ("telemetry", "plan")

Handler = Callable[[str, Header, Message], None]


class Bus:
    """All sockets of the stage `identity`.

    Bind before connect is not needed: ZeroMQ queues for peers that are not there yet (inboxes)
    and publishers' silence is repaired by numbered plans and repeated heartbeats.
    """

    def __init__(
        self,
        identity: Identity,
        incarnation: int,
        topology: Topology,
        context: zmq.Context[zmq.Socket[bytes]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.identity, self.incarnation = identity, incarnation
        self.bad_frames = 0
        self._topology, self._context, self._clock = topology, context, clock
        self._address = topology.address(identity.id)
        self._outboxes: dict[str, zmq.Socket[bytes]] = {}
        self._publishers: dict[str, zmq.Socket[bytes]] = {}
        self._readers: list[zmq.Socket[bytes]] = []
        self._sequence: dict[tuple[str, str], int] = {}
        self._handler: Handler | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._warned: set[str] = set()

    def bind(self) -> None:
        """Opens the inbox and the publishers. zmq.ZMQError if an address is taken."""
        inbox = self._socket(zmq.PULL)
        inbox.bind(addresses.derive(self._address, "inbox"))
        self._readers.append(inbox)
        for channel in PUBLISHED:
            if channel == "plan" and self.identity.name != "scheduler":
                continue
            publisher = self._socket(zmq.PUB)
            if channel == "telemetry":
                publisher.sndhwm = TELEMETRY_HWM
            publisher.bind(addresses.derive(self._address, channel))
            self._publishers[channel] = publisher

    def listen(self, stage: str, channel: str) -> None:
        """Subscribes to what `stage` publishes on `channel` ("plan" or "telemetry")."""
        subscriber = self._socket(zmq.SUB)
        subscriber.subscribe(channel.encode())
        subscriber.connect(addresses.derive(self._topology.address(stage), channel))
        self._readers.append(subscriber)

    def start(self, handler: Handler) -> None:
        """From now on `handler(channel, header, message)` gets every frame, on the running loop."""
        self._handler, self._loop = handler, asyncio.get_running_loop()
        for socket in self._readers:
            self._loop.add_reader(socket.fileno(), self._drain, socket)
            self._loop.call_soon(self._drain, socket)  # the descriptor only tells of changes

    def send(self, send: Send) -> None:
        """Sends or publishes one message; never blocks."""
        key = (send.channel, send.to)
        number = self._sequence.get(key, 0)
        self._sequence[key] = number + 1
        header = Header(PROTOCOL, self.identity.id, self.incarnation, number, self._clock())
        parts = frames.encode(send.channel, header, send.message)
        if send.to == EVERYONE:
            self._publishers[send.channel].send_multipart(parts, zmq.NOBLOCK)
        else:
            self._outbox(send.to).send_multipart(parts, zmq.NOBLOCK)

    def close(self) -> None:
        """Closes every socket; what was sent has LINGER_MS to leave."""
        for socket in self._readers:
            if self._loop is not None and not socket.closed:
                self._loop.remove_reader(socket.fileno())
            socket.close(linger=0)
        for socket in (*self._outboxes.values(), *self._publishers.values()):
            socket.close(linger=LINGER_MS)

    def _outbox(self, stage: str) -> zmq.Socket[bytes]:
        outbox = self._outboxes.get(stage)
        if outbox is None:
            outbox = self._outboxes[stage] = self._socket(zmq.PUSH)
            outbox.connect(addresses.derive(self._topology.address(stage), "inbox"))
        return outbox

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.sndhwm = socket.rcvhwm = 0
        socket.ipv6 = True
        return socket

    def _drain(self, socket: zmq.Socket[bytes]) -> None:
        """Reads until the socket is empty: its descriptor is edge-triggered."""
        for _ in range(BURST):
            if socket.closed:
                return
            try:
                parts = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._receive(parts)
        assert self._loop is not None
        self._loop.call_soon(self._drain, socket)

    def _receive(self, parts: list[bytes]) -> None:
        assert self._handler is not None
        try:
            channel, header, message = frames.decode(parts)
        except frames.BadFrame as error:
            self.bad_frames += 1
            if str(error) not in self._warned and len(self._warned) < 1_000:
                self._warned.add(str(error))  # once for each kind: a peer may repeat it for ever
                log.warning("dropped a frame: %s", error)
            return
        self._handler(channel, header, message)
