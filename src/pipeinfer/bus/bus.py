"""The sockets of one process on the bus: a stage's, a listener's, or a command's.

    Bus            of a stage: an inbox, an outbox for each peer, publishers, subscriptions
    Reader         reads frames from its sockets on an event loop, without a task or a future per
                   message
    Listener       subscriptions alone, on an event loop: for supervisors and tools
    ControlClient  blocking, for command lines that send a request on the channel `control`
    SocketFactory  binds and connects by the topology: addresses, keys, timeouts

Also raises the limits of sockets to what a deployment needs. Handlers know the meaning of messages;
this module does not. Only telemetry is ever dropped by a high-water mark; the gateway's queue limit
bounds the messages in flight. Cuts of seconds, which TCP repairs, are not noticed here; longer ones
end a connection, which ZeroMQ opens again.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import time
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path

import zmq
from zmq.backend import Socket

from pipeinfer.bus import frames
from pipeinfer.bus.curve import CurveAuthenticator, Keyring, keyring
from pipeinfer.bus.frames import (
    FRAME_BYTES,
    LINK_CHANNEL,
    TELEMETRY_BYTES,
    FrameHeader,
    ReliableLinks,
)
from pipeinfer.control import CHANNEL as CONTROL
from pipeinfer.core import EVERYONE, Send
from pipeinfer.messages import PROTOCOL, Message
from pipeinfer.settings import ConfigurationError
from pipeinfer.topology import (
    Identity,
    Topology,
    bind_addresses,
    is_loopback,
    is_tcp,
    listen_host,
    socket_address,
    split_address,
)

log = logging.getLogger(__name__)

CONNECT_MS = 3_000  # for a TCP connection; the kernel's own timeout grows up to minutes
# Delay before a connection is tried again; over a network it grows up to RECONNECT_MAX_MS.
RECONNECT_MS, RECONNECT_MAX_MS = 100, 2_000
HANDSHAKE_MS = 10_000
# (idle, interval, probes) of TCP's keepalive: seconds, seconds, count. A subscriber never sends
# anything, so only the probes show that its publisher's host has gone; missed messages are
# repeated. All other connections are probed so that no router between forgets them, and last as
# long as the kernel repeats unacknowledged data (a quarter of an hour): a connection that ends may
# take messages with it.
SUBSCRIBER_PROBES, PROBES = (5, 5, 3), (60, 60, 120)


class AddressTaken(zmq.ZMQError):
    """Another process listens at `place`, "tcp://HOST:PORT"; HOST is a number, or "*" for all."""

    def __init__(self, place: str) -> None:
        super().__init__(errno.EADDRINUSE, f"{place} is taken")
        self.endpoint = place


class SocketFactory:
    """Makes the sockets of stage id `stage`, or of a process that is no stage ("")."""

    def __init__(
        self, topology: Topology, context: zmq.Context[zmq.Socket[bytes]], stage: str = ""
    ) -> None:
        self._topology = topology
        self._context = context
        self._stage = stage
        self._keyring: Keyring | None = None
        self._authenticator: CurveAuthenticator | None = None
        self._open = False

    def load_keys(self, authenticate: bool = True) -> None:
        """Reads the keys, before the first bind or connect; may be called again. Raises
        ConfigurationError for keys that are missing or wrong.

        - authenticate: False if this process has an authenticator already
        """
        if self._open or not self._topology.has_tcp():
            return
        self._keyring = keyring(self._topology, self._stage)
        if authenticate and self._keyring is not None and self._stage in self._topology.ids():
            self._authenticator = CurveAuthenticator(self._context, self._keyring.allowed)
        self._open = True

    @property
    def refused_handshakes(self) -> int:
        """Number of handshakes with unknown peers that failed, since the start."""
        return self._authenticator.refused_handshakes if self._authenticator is not None else 0

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        """A socket that is neither bound nor connected yet."""
        socket = self._context.socket(kind)
        socket.ipv6 = True
        probes = SUBSCRIBER_PROBES if kind == zmq.SUB else PROBES
        socket.tcp_keepalive = 1
        socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl, socket.tcp_keepalive_cnt = probes
        socket.connect_timeout = CONNECT_MS
        socket.reconnect_ivl, socket.reconnect_ivl_max = RECONNECT_MS, RECONNECT_MAX_MS
        socket.handshake_ivl = HANDSHAKE_MS
        return socket

    def bind(self, socket: zmq.Socket[bytes], name: str) -> None:
        """Binds `socket` as this stage's `name` ("inbox", "telemetry", "plan", "group").

        Raises AddressTaken if another process has the address, ConfigurationError if the address is
        not one of this host.
        """
        address = self._topology.address(self._stage)
        if self._keyring is not None and is_tcp(address):
            self._keyring.secure_server(socket)
            if self._authenticator is not None:
                self._authenticator.watch_socket(socket, "")
        bound = 0
        for place in bind_addresses(address, name, self._topology.bind(self._stage)):
            try:
                socket.bind(place)
                bound += 1
            except zmq.ZMQError as error:
                if error.errno == errno.EADDRINUSE:
                    raise AddressTaken(place) from None
                # A name may mean addresses of several hosts.
                if error.errno not in (errno.EADDRNOTAVAIL, errno.ENODEV):
                    raise
        if not bound:
            raise ConfigurationError(
                f"{self._stage}: {address} is no address of this host; where others reach it "
                "through one that is not, bind = HOST says where it listens"
            )

    def connect(self, socket: zmq.Socket[bytes], stage: str, name: str) -> None:
        """Connects `socket` to the socket `name` of stage id `stage`, which need not be there
        yet."""
        address = self._topology.address(stage)
        if self._keyring is not None and is_tcp(address):
            self._keyring.secure_client(socket, stage)
            if self._authenticator is not None:
                self._authenticator.watch_socket(socket, stage)
        if is_loopback(listen_host(address)):
            socket.reconnect_ivl_max = RECONNECT_MS
        socket.connect(socket_address(address, name))

    def secure(self, socket: zmq.Socket[bytes], address: str) -> None:
        """Gives `socket` its keys, before its owner connects it to the stage `address`."""
        if self._keyring is None or not is_tcp(address):
            return
        stage = next(e.identity.id for e in self._topology.entries if e.address == address)
        self._keyring.secure_client(socket, stage)

    def close(self) -> None:
        """Stops accepting peers. The sockets themselves must be closed before."""
        if self._authenticator is not None:
            self._authenticator.close()
            self._authenticator = None


_LAST = int(zmq.NOBLOCK)
_SNDMORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_send, _recv = Socket.send, Socket.recv


def send_multipart(socket: zmq.Socket[bytes], parts: Sequence[bytes]) -> None:
    """Sends all parts as one message, without waiting; raises zmq.Again if it would have to wait.

    Pyzmq's own call takes three times as long: its flags are enums, and for each part received it
    asks the socket whether there is another.
    """
    *first, last = parts
    for part in first:
        _send(socket, part, _SNDMORE)
    _send(socket, last, _LAST)


def receive_multipart(socket: zmq.Socket[bytes]) -> list[bytes]:
    """The parts of the next message; raises zmq.Again if there is none."""
    frame = _recv(socket, _LAST, False)
    parts = [frame.bytes]
    while frame.more:
        frame = _recv(socket, _LAST, False)
        parts.append(frame.bytes)
    return parts


# Sockets of a stage for each other stage: to send, to listen, and with keys to watch both.
SOCKETS_PER_STAGE = 4
# Descriptors of a socket: its mailbox, its connection, and the next one while it reconnects.
DESCRIPTORS_PER_SOCKET = 3
BASE_LIMIT = 1_024  # sockets, and descriptors, for everything else


def raise_socket_limits(context: zmq.Context[zmq.Socket[bytes]], topology: Topology) -> None:
    """Allows as many sockets of `context` as a deployment of the topology's size needs; to be
    called before the first socket. ZeroMQ's own limit is 1,023, and a gateway listens to every
    stage.

    The process's soft limit of descriptors is raised as far as needed and as the hard limit allows;
    a process that may have too few fails when it needs them.
    """
    stages = len(topology.entries)
    context.set(zmq.MAX_SOCKETS, BASE_LIMIT + SOCKETS_PER_STAGE * stages)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = BASE_LIMIT + SOCKETS_PER_STAGE * DESCRIPTORS_PER_SOCKET * stages
    hard_limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and hard_limit > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard))


BURST = 128  # messages handled before other events of the loop get their turn
MAX_WARNINGS = 100  # most reasons for dropping that are logged, once each
MAX_REASON_CHARS = 300  # of a logged reason; an unknown peer may choose some of them

# Channels with constant traffic that can wait.
NOT_BUSY_POLLED = ("telemetry", "group", "link")

Handler = Callable[[str, FrameHeader, Message], None]


class Reader:
    """Calls `handler(channel, header, message)` for every frame of the sockets that were added.

    A frame that does not decode is dropped and logged; an exception of the handler is logged.
    Neither ends the reader.

    Attributes:
    - bad_frames: number of dropped frames
    - body: of the frame that is being handled, as it came
    - busy_polling: whether the loop polls without sleeping at present (see `start`)
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

        - busy_poll: after a frame that came within `busy_poll` seconds of the one before, the loop
          polls that long without sleeping; 0: never. A process that was put to sleep answers late,
          by a tenth of a millisecond and at times by a whole one, and with cold caches; but polling
          takes a core
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
        """Counts a dropped frame; logs each reason once, because a peer may repeat it for ever."""
        self.bad_frames += 1
        reason = reason[:MAX_REASON_CHARS]
        if reason not in self._logged and len(self._logged) < MAX_WARNINGS:
            self._logged.add(reason)
            log.warning("dropped a frame: %s", reason)

    def _watch(self, socket: zmq.Socket[bytes]) -> None:
        assert self._loop is not None
        self._loop.add_reader(socket.fileno(), self._drain, socket)
        self._loop.call_soon(self._drain, socket)  # the descriptor is readable only after changes

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
        """Notes that a frame came; begins to poll if another came shortly before."""
        now = time.monotonic()
        soon, self._last_frame = now - self._last_frame < self._busy_poll, now
        if soon and not self.busy_polling and self._loop is not None:
            self.busy_polling = True
            self._loop.call_soon(self._poll_again)

    def _poll_again(self) -> None:
        """Takes a turn of the loop that looks for frames without waiting for one."""
        assert self._loop is not None
        os.sched_yield()  # the thread that brings the next frame may have been given this core
        if self._sockets and time.monotonic() - self._last_frame < self._busy_poll:
            self._loop.call_soon(self._poll_again)
        else:
            self.busy_polling = False


LINGER_MS = 1_000  # time for which closing waits for messages that were sent but have not left
TELEMETRY_HWM = 1_000
# Most frames of one peer that wait to be read here; further frames wait at the peer. None is
# dropped.
INBOX_HWM = 1_000
SUBSCRIPTION_BYTES = 1_024  # bytes of one message of a subscriber
LINK_TIMER = 1.0  # seconds between questions whether unacknowledged frames have arrived


class NoSuchStage(ValueError):
    """A message to a stage that the topology does not have."""


class Bus:
    """All sockets of the stage `identity`.

    Stages may start in any order: ZeroMQ queues for an inbox that is not there yet, and messages
    that a publisher sent too early are repaired by numbered plans and repeated heartbeats.

    - resend_seconds: seconds after which an unacknowledged frame is dropped, if TCP may lose it

    Attributes:
    - reader: reads the inbox and the subscriptions
    """

    def __init__(
        self,
        identity: Identity,
        incarnation: int,
        topology: Topology,
        context: zmq.Context[zmq.Socket[bytes]],
        clock: Callable[[], float] = time.monotonic,
        resend_seconds: float = inf,
    ) -> None:
        self.identity = identity
        self.incarnation = incarnation
        self.reader = Reader()
        self._topology = topology
        self._clock = clock
        self._sockets = SocketFactory(topology, context, identity.id)
        self._address = topology.address(identity.id)
        self._outboxes: dict[str, zmq.Socket[bytes]] = {}
        self._publishers: dict[str, zmq.Socket[bytes]] = {}
        self._sequence: dict[tuple[str, str], int] = {}
        far = frozenset(topology.over_tcp())
        everybody = frozenset(topology.ids() if far else ())
        self._links = ReliableLinks(
            incarnation, everybody, far, self._send_link_message, self._push, self._close_outbox,
            int(min(resend_seconds / LINK_TIMER, 1 << 30)),
        )  # fmt: skip
        self._link_timer_handle: asyncio.TimerHandle | None = None

    def bind(self) -> None:
        """Opens the inbox and the publishers. Raises AddressTaken if another process has an
        address, ConfigurationError if keys are wrong, or the address is not one of this host."""
        transport, path = split_address(self._address)
        if transport == "ipc":
            Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._sockets.load_keys()
        inbox = self._socket(zmq.PULL)
        inbox.rcvhwm, inbox.maxmsgsize = INBOX_HWM, FRAME_BYTES
        self.reader.add(inbox)
        self._sockets.bind(inbox, "inbox")
        channels = ("telemetry", "plan") if self.identity.name == "scheduler" else ("telemetry",)
        for channel in channels:
            publisher = self._publishers[channel] = self._socket(zmq.PUB)
            if channel == "telemetry":
                publisher.sndhwm = TELEMETRY_HWM
            publisher.maxmsgsize = SUBSCRIPTION_BYTES
            self._sockets.bind(publisher, channel)
        for channel in ("group", CONTROL):  # published to all subscribers
            self._publishers[channel] = self._publishers["telemetry"]

    def listen(self, stage: str, *channels: str) -> None:
        """Subscribes to `channels` of `stage`: "plan", or some of "group", "telemetry" and
        "control"."""
        subscriber = self._socket(zmq.SUB)
        subscriber.maxmsgsize = FRAME_BYTES if "plan" in channels else TELEMETRY_BYTES
        for channel in channels:
            subscriber.subscribe(channel.encode())
        self._sockets.connect(subscriber, stage, "plan" if "plan" in channels else "telemetry")
        self.reader.add(subscriber)

    def start(self, handler: Handler, busy_poll: float = 0.0) -> None:
        """Calls `handler(channel, header, message)` for every frame from now on, on the running
        loop. `busy_poll`: see Reader.start."""
        if not self._topology.has_tcp():
            self.reader.start(handler, busy_poll)
            return

        def on_frame(channel: str, header: FrameHeader, message: Message) -> None:
            if self._accepts(channel, header, message):
                handler(channel, header, message)

        self.reader.start(on_frame, busy_poll)
        self._on_link_timer(asyncio.get_running_loop())

    def send(self, send: Send) -> tuple[int, float, bytes]:
        """Sends or publishes one message; never blocks. Returns the message's number, time and
        body.

        Raises Unencodable or NoSuchStage; then nothing was sent, and the next message has this
        number.
        """
        key = (send.channel, send.to)
        number = self._sequence.get(key, 0)
        sent = self._clock()
        link = self._links.outgoing(send.to)
        counted = 0 if link is None else link.next
        header = FrameHeader(PROTOCOL, self.identity.id, self.incarnation, number, sent, counted)
        parts = frames.encode(send.channel, header, send.message)
        if send.to == EVERYONE:
            send_multipart(self._publishers[send.channel], parts)
        else:
            self._push(send.to, parts)
        if link is not None:
            link.append(parts)
        self._sequence[key] = number + 1
        return number, sent, parts[2]

    def close(self) -> None:
        """Closes every socket; messages that were sent have LINGER_MS to leave."""
        if self._link_timer_handle is not None:
            self._link_timer_handle.cancel()
        self.reader.close()
        for socket in (*self._outboxes.values(), *self._publishers.values()):
            socket.close(linger=LINGER_MS)
        self._sockets.close()

    @property
    def refused_handshakes(self) -> int:
        """Number of handshakes with unknown peers that failed, since the start."""
        return self._sockets.refused_handshakes

    @property
    def repeated_frames(self) -> int:
        """Number of frames that were sent once more, since the start, because a connection had lost
        them."""
        return self._links.repeated

    def _accepts(self, channel: str, header: FrameHeader, message: Message) -> bool:
        """Whether a frame is for the stage, and has not come before."""
        who, process = header.sender, header.incarnation
        if channel == LINK_CHANNEL:
            self._links.on_message(who, process, message, self._clock())
            return False
        if not header.link:
            return True
        size = len(self.reader.body)
        return self._links.accepts(who, process, header.link, size, self._clock())

    def _send_link_message(self, stage: str, message: Message) -> None:
        header = FrameHeader(PROTOCOL, self.identity.id, self.incarnation, 0, self._clock())
        self._push(stage, frames.encode(LINK_CHANNEL, header, message))

    def _close_outbox(self, stage: str) -> None:
        """Closes the socket to `stage`, whose frames have expired; libzmq's queue goes, and a new
        socket is made for the next message. The receiver asks for frames that are still kept when
        it is there."""
        outbox = self._outboxes.pop(stage, None)
        if outbox is not None:
            outbox.close(linger=0)

    def _on_link_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        self._links.on_timer()
        self._link_timer_handle = loop.call_later(LINK_TIMER, self._on_link_timer, loop)

    def _push(self, stage: str, parts: list[bytes]) -> None:
        try:
            send_multipart(self._outbox(stage), parts)
        except zmq.Again:  # there is no high-water mark: libzmq has given the peer up
            address = self._topology.address(stage)
            message = f"{stage} at {address} and this stage must both use CURVE keys, or neither"
            raise RuntimeError(message) from None

    def _outbox(self, stage: str) -> zmq.Socket[bytes]:
        outbox = self._outboxes.get(stage)
        if outbox is None:
            try:
                self._topology.address(stage)
            except ConfigurationError as error:
                raise NoSuchStage(str(error)) from None
            outbox = self._outboxes[stage] = self._socket(zmq.PUSH)
            self._sockets.connect(outbox, stage, "inbox")
        return outbox

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._sockets.socket(kind)
        socket.sndhwm = socket.rcvhwm = 0
        return socket


class Listener:
    """Subscriptions to the channels `telemetry` and `group` of stages."""

    def __init__(self, topology: Topology, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._sockets = SocketFactory(topology, context)
        self._reader = Reader()

    def listen(self, stage: str, *channels: str) -> None:
        """Subscribes to `channels` of stage id `stage`, which need not be there yet; without
        channels to its telemetry. Raises ConfigurationError if the topology has keys and this host
        has none of them."""
        self._sockets.load_keys()
        socket = self._sockets.socket(zmq.SUB)
        for channel in channels or ("telemetry",):
            socket.subscribe(channel.encode())
        socket.maxmsgsize = TELEMETRY_BYTES
        self._sockets.connect(socket, stage, "telemetry")
        self._reader.add(socket)

    def start(self, handler: Handler) -> None:
        """Calls `handler(channel, header, message)` for each message from now on."""
        self._reader.start(handler)

    def close(self) -> None:
        self._reader.close()


class ControlClient:
    """Sends requests to stages of `topology`, and receives their answers. A context manager.

    An answer is lost if it is sent before the subscription has arrived: send a request to a stage
    only after a message (a heartbeat) of that stage was received.
    """

    def __init__(self, topology: Topology, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._sockets = SocketFactory(topology, context)
        self._sockets.load_keys()
        self._name = f"caller-{os.getpid()}"
        self._incarnation = time.time_ns()
        self._subscribers: list[zmq.Socket[bytes]] = []
        self._outboxes: dict[str, zmq.Socket[bytes]] = {}
        self._poller = zmq.Poller()
        self._sent = 0

    def listen(self, stage: str) -> None:
        """Subscribes to stage id `stage`: its heartbeats and its answers."""
        subscriber = self._sockets.socket(zmq.SUB)
        subscriber.maxmsgsize = frames.TELEMETRY_BYTES
        subscriber.subscribe(b"telemetry")
        subscriber.subscribe(CONTROL.encode())
        self._sockets.connect(subscriber, stage, "telemetry")
        self._poller.register(subscriber, zmq.POLLIN)
        self._subscribers.append(subscriber)

    def send(self, stage: str, message: Message) -> None:
        """Sends `message` to the inbox of stage id `stage`. Raises Unencodable."""
        outbox = self._outboxes.get(stage)
        if outbox is None:
            outbox = self._outboxes[stage] = self._sockets.socket(zmq.PUSH)
            self._sockets.connect(outbox, stage, "inbox")
        header = FrameHeader(PROTOCOL, self._name, self._incarnation, self._sent, time.monotonic())
        self._sent += 1
        outbox.send_multipart(frames.encode(CONTROL, header, message))

    def receive(self, seconds: float) -> list[tuple[FrameHeader, Message]]:
        """The messages that came, after waiting at most `seconds` for the first."""
        received: list[tuple[FrameHeader, Message]] = []
        for subscriber, _ in self._poller.poll(int(seconds * 1_000)):
            try:
                _, header, message = frames.decode(subscriber.recv_multipart(zmq.NOBLOCK))
            except frames.BadFrame:
                continue  # perhaps of another version; the caller reports a missing answer
            received.append((header, message))
        return received

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *_: object) -> None:
        for socket in (*self._subscribers, *self._outboxes.values()):
            socket.close(linger=1_000)
