"""The sockets of one stage: an inbox, one outbox per peer, what it publishes and listens to.

Knows no message's meaning. Nothing is ever dropped here by a high-water mark except telemetry; the
gateway's queue limit bounds what is under way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from math import inf
from pathlib import Path

import zmq

from pipeinfer.bus import frames, links
from pipeinfer.bus import parts as multipart
from pipeinfer.bus.frames import FRAME_BYTES, TELEMETRY_BYTES, Header
from pipeinfer.bus.links import Links
from pipeinfer.bus.reader import Handler, Reader
from pipeinfer.bus.wires import Wires
from pipeinfer.control import CHANNEL as CONTROL
from pipeinfer.core import EVERYONE, Send
from pipeinfer.messages import PROTOCOL, Message
from pipeinfer.settings import ConfigurationError
from pipeinfer.topology import addresses
from pipeinfer.topology.topology import Identity, Topology

LINGER_MS = 1_000  # how long closing waits for messages that were sent but have not left
TELEMETRY_HWM = 1_000
# Frames of one peer that wait to be read; then the peer waits with the others. None is dropped.
INBOX_HWM = 1_000
SUBSCRIPTION_BYTES = 1_024  # the same for what a subscriber says
REMIND = 1.0  # seconds after which somebody is asked what has come of the frames that are kept


class NoSuchStage(ValueError):
    """A message to a stage that the topology does not know: somebody named it wrongly."""


class Bus:
    """All sockets of the stage `identity`.

    Stages may start in any order: ZeroMQ queues for an inbox that is not there yet, and what a
    publisher said too early is repaired by numbered plans and repeated heartbeats. `patience`:
    seconds after which a frame that its inbox has not taken is dropped, where TCP may lose it.
    """

    def __init__(
        self,
        identity: Identity,
        incarnation: int,
        topology: Topology,
        context: zmq.Context[zmq.Socket[bytes]],
        clock: Callable[[], float] = time.monotonic,
        patience: float = inf,
    ) -> None:
        self.identity = identity
        self.incarnation = incarnation
        self.reader = Reader()
        self._topology = topology
        self._clock = clock
        self._wires = Wires(topology, context, identity.id)
        self._address = topology.address(identity.id)
        self._outboxes: dict[str, zmq.Socket[bytes]] = {}
        self._publishers: dict[str, zmq.Socket[bytes]] = {}
        self._sequence: dict[tuple[str, str], int] = {}
        far = frozenset(topology.over_tcp())
        everybody = frozenset(topology.ids() if far else ())
        self._links = Links(
            incarnation, everybody, far, self._say_of_link, self._push, self._drop,
            int(min(patience / REMIND, 1 << 30)),
        )  # fmt: skip
        self._reminder: asyncio.TimerHandle | None = None

    def bind(self) -> None:
        """Opens the inbox and the publishers. AddressTaken if somebody has an address,
        ConfigurationError if keys are wrong, or the address is not one of this host.
        """
        transport, rest = addresses.split(self._address)
        if transport == "ipc":
            Path(rest).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._wires.open()
        inbox = self._socket(zmq.PULL)
        inbox.rcvhwm, inbox.maxmsgsize = INBOX_HWM, FRAME_BYTES
        self.reader.add(inbox)
        self._wires.bind(inbox, "inbox")
        channels = ("telemetry", "plan") if self.identity.name == "scheduler" else ("telemetry",)
        for channel in channels:
            publisher = self._publishers[channel] = self._socket(zmq.PUB)
            if channel == "telemetry":
                publisher.sndhwm = TELEMETRY_HWM
            publisher.maxmsgsize = SUBSCRIPTION_BYTES
            self._wires.bind(publisher, channel)
        for channel in ("group", CONTROL):  # both for whoever listens
            self._publishers[channel] = self._publishers["telemetry"]

    def listen(self, stage: str, *channels: str) -> None:
        """Subscribes to what `stage` publishes on `channels`: "plan", or some of "group",
        "telemetry" and "control"."""
        subscriber = self._socket(zmq.SUB)
        subscriber.maxmsgsize = FRAME_BYTES if "plan" in channels else TELEMETRY_BYTES
        for channel in channels:
            subscriber.subscribe(channel.encode())
        self._wires.connect(subscriber, stage, "plan" if "plan" in channels else "telemetry")
        self.reader.add(subscriber)

    def start(self, handler: Handler, patience: float = 0.0) -> None:
        """From now on `handler(channel, header, message)` gets every frame, on the running loop.
        `patience`: see Reader.start.
        """
        if not self._topology.has_tcp():
            self.reader.start(handler, patience)
            return

        def passed(channel: str, header: Header, message: Message) -> None:
            if self._passes(channel, header, message):
                handler(channel, header, message)

        self.reader.start(passed, patience)
        self._remind(asyncio.get_running_loop())

    def send(self, send: Send) -> tuple[int, float, bytes]:
        """Sends or publishes one message; never blocks. Returns its number, time and body.

        Raises Unencodable or NoSuchStage; then nothing was sent, and the next message has its
        number.
        """
        key = (send.channel, send.to)
        number = self._sequence.get(key, 0)
        sent = self._clock()
        link = self._links.to(send.to)
        counted = 0 if link is None else link.next
        header = Header(PROTOCOL, self.identity.id, self.incarnation, number, sent, counted)
        parts = frames.encode(send.channel, header, send.message)
        if send.to == EVERYONE:
            multipart.send(self._publishers[send.channel], parts)
        else:
            self._push(send.to, parts)
        if link is not None:
            link.keep(parts)
        self._sequence[key] = number + 1
        return number, sent, parts[2]

    def close(self) -> None:
        """Closes every socket; what was sent has LINGER_MS to leave."""
        if self._reminder is not None:
            self._reminder.cancel()
        self.reader.close()
        for socket in (*self._outboxes.values(), *self._publishers.values()):
            socket.close(linger=LINGER_MS)
        self._wires.close()

    @property
    def refused(self) -> int:
        """Handshakes with strangers that failed, since the start."""
        return self._wires.refused

    @property
    def repeated(self) -> int:
        """Frames that were sent once more, since the start: a connection had taken them along."""
        return self._links.repeated

    def _passes(self, channel: str, header: Header, message: Message) -> bool:
        """Whether a frame is for the stage, and has not come before."""
        who, process = header.sender, header.incarnation
        if channel == links.CHANNEL:
            self._links.hear(who, process, message, self._clock())
            return False
        if not header.link:
            return True
        size = len(self.reader.body)
        return self._links.take(who, process, header.link, size, self._clock())

    def _say_of_link(self, stage: str, message: Message) -> None:
        header = Header(PROTOCOL, self.identity.id, self.incarnation, 0, self._clock())
        self._push(stage, frames.encode(links.CHANNEL, header, message))

    def _drop(self, stage: str) -> None:
        """Frames to `stage` are kept no longer; libzmq's queue goes, and a new one is made when
        something is sent. What is still kept is asked for when the stage is there."""
        outbox = self._outboxes.pop(stage, None)
        if outbox is not None:
            outbox.close(linger=0)

    def _remind(self, loop: asyncio.AbstractEventLoop) -> None:
        self._links.remind()
        self._reminder = loop.call_later(REMIND, self._remind, loop)

    def _push(self, stage: str, parts: list[bytes]) -> None:
        try:
            multipart.send(self._outbox(stage), parts)
        except zmq.Again:  # there is no mark to be reached: libzmq has given the peer up
            address = self._topology.address(stage)
            raise RuntimeError(f"{stage} at {address}: one of us has CURVE keys, one not") from None

    def _outbox(self, stage: str) -> zmq.Socket[bytes]:
        outbox = self._outboxes.get(stage)
        if outbox is None:
            try:
                self._topology.address(stage)
            except ConfigurationError as error:
                raise NoSuchStage(str(error)) from None
            outbox = self._outboxes[stage] = self._socket(zmq.PUSH)
            self._wires.connect(outbox, stage, "inbox")
        return outbox

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._wires.socket(kind)
        socket.sndhwm = socket.rcvhwm = 0
        return socket
