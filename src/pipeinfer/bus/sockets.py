"""Binds and connects the sockets of one process as its topology says: addresses, keys, timeouts;
sends and receives multipart messages; and raises the limits of sockets to what a deployment needs.

Knows no message. What TCP itself repairs (a cut of seconds) is not noticed here; what TCP cannot
repair ends a connection, which ZeroMQ opens again.
"""

from __future__ import annotations

import errno
import resource
from collections.abc import Sequence

import zmq
from zmq.backend import Socket

from pipeinfer.bus.curve import CurveAuthenticator, Keyring, keyring
from pipeinfer.settings import ConfigurationError
from pipeinfer.topology import Topology, bind_addresses, is_tcp, socket_address

CONNECT_MS = 3_000  # for a TCP connection; the kernel alone would wait ever longer, up to minutes
RECONNECT_MS, RECONNECT_MAX_MS = 100, 2_000
HANDSHAKE_MS = 10_000
# (idle, interval, probes) of TCP's keepalive: seconds, seconds, count. A subscriber never says
# anything, so nothing else tells it that its publisher's host has gone; what it missed is repeated.
# All others are probed so that no router between forgets them, and hold on for as long as the
# kernel repeats what it sent (a quarter of an hour): a connection that ends may take messages with
# it.
SUBSCRIBER_PROBES, PROBES = (5, 5, 3), (60, 60, 120)


class AddressTaken(zmq.ZMQError):
    """Somebody else listens at `place`, "tcp://HOST:PORT"; HOST is a number, or "*" for all."""

    def __init__(self, place: str) -> None:
        super().__init__(errno.EADDRINUSE, f"{place} is taken")
        self.endpoint = place


class SocketFactory:
    """Sockets of stage id `stage`, or of a process that is none ("")."""

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
        """Reads the keys, before the first bind or connect; may be called again.

        authenticate: False where this process has an authenticator already. Raises
        ConfigurationError for keys that are missing or wrong.
        """
        if self._open or not self._topology.has_tcp():
            return
        self._keyring = keyring(self._topology, self._stage)
        if authenticate and self._keyring is not None and self._stage in self._topology.ids():
            self._authenticator = CurveAuthenticator(self._context, self._keyring.allowed)
        self._open = True

    @property
    def refused_handshakes(self) -> int:
        """Handshakes with strangers that failed, since the start."""
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

        AddressTaken if another process has it, ConfigurationError if it is not one of this host.
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
        """Connects `socket` to the `name` of stage id `stage`, which need not be there yet."""
        address = self._topology.address(stage)
        if self._keyring is not None and is_tcp(address):
            self._keyring.secure_client(socket, stage)
            if self._authenticator is not None:
                self._authenticator.watch_socket(socket, stage)
        socket.connect(socket_address(address, name))

    def secure(self, socket: zmq.Socket[bytes], address: str) -> None:
        """Gives `socket` its keys, before its owner connects it to the stage `address`."""
        if self._keyring is None or not is_tcp(address):
            return
        stage = next(e.identity.id for e in self._topology.entries if e.address == address)
        self._keyring.secure_client(socket, stage)

    def close(self) -> None:
        """Accepts no peer any more. Close the sockets themselves before."""
        if self._authenticator is not None:
            self._authenticator.close()
            self._authenticator = None


_LAST = int(zmq.NOBLOCK)
_SNDMORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_send, _recv = Socket.send, Socket.recv


def send_multipart(socket: zmq.Socket[bytes], parts: Sequence[bytes]) -> None:
    """Sends all parts as one message, without waiting; zmq.Again if that cannot be.

    As pyzmq's own call, which takes three times as long: its flags are enums, and for each part
    received it asks the socket whether there is another.
    """
    *first, last = parts
    for part in first:
        _send(socket, part, _SNDMORE)
    _send(socket, last, _LAST)


def receive_multipart(socket: zmq.Socket[bytes]) -> list[bytes]:
    """The parts of the next message; zmq.Again if there is none."""
    frame = _recv(socket, _LAST, False)
    parts = [frame.bytes]
    while frame.more:
        frame = _recv(socket, _LAST, False)
        parts.append(frame.bytes)
    return parts


# Of a stage for each other one: to send, to listen, and with keys to watch both.
SOCKETS_PER_STAGE = 4
# Of a socket: its mailbox, its connection, and the next one while it reconnects.
DESCRIPTORS_PER_SOCKET = 3
BASE_LIMIT = 1_024  # sockets, and descriptors, for everything else


def raise_socket_limits(context: zmq.Context[zmq.Socket[bytes]], topology: Topology) -> None:
    """To be called before the first socket of `context`: allows as many sockets as a deployment of
    so many stages needs. ZeroMQ's own limit is 1,023, and a gateway listens to every stage.

    The process's soft limit of descriptors is raised as far as needed and as the hard limit allows;
    a process that may have too few fails when it needs them."""
    stages = len(topology.entries)
    context.set(zmq.MAX_SOCKETS, BASE_LIMIT + SOCKETS_PER_STAGE * stages)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = BASE_LIMIT + SOCKETS_PER_STAGE * DESCRIPTORS_PER_SOCKET * stages
    hard_limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and hard_limit > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard))
