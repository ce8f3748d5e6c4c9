"""Binds and connects the sockets of one process as its topology says: addresses, keys, patience.

Knows no messages. What TCP itself repairs (a cut of seconds) nobody notices here; what it cannot
repair ends a connection, which ZeroMQ opens again.
"""

from __future__ import annotations

import errno

import zmq

from pipeinfer.bus.curve import Keyring, keyring
from pipeinfer.bus.gate import Gate
from pipeinfer.settings import ConfigurationError
from pipeinfer.topology import addresses
from pipeinfer.topology.topology import Topology

CONNECT_MS = 3_000  # for a TCP connection; the kernel alone would wait ever longer, up to minutes
RECONNECT_MS, RECONNECT_MAX_MS = 100, 2_000
HANDSHAKE_MS = 10_000
# (idle, interval, probes) of TCP's keepalive: seconds, seconds, count. A subscriber never says
# anything, so nothing else tells it that its publisher's host has gone; what it missed is repeated.
# All others are probed so that nobody between forgets them, and hold on for as long as the kernel
# repeats what it sent (a quarter of an hour): a connection that ends may take messages with it.
SUBSCRIBER_PROBES, PROBES = (5, 5, 3), (60, 60, 120)


class AddressTaken(zmq.ZMQError):
    """Somebody else listens at `place`, "tcp://HOST:PORT"; HOST is a number, or "*" for all."""

    def __init__(self, place: str) -> None:
        super().__init__(errno.EADDRINUSE, f"{place} is taken")
        self.place = place


class Wires:
    """Sockets of stage id `stage`, or of a process that is none ("")."""

    def __init__(
        self, topology: Topology, context: zmq.Context[zmq.Socket[bytes]], stage: str = ""
    ) -> None:
        self._topology = topology
        self._context = context
        self._stage = stage
        self._keyring: Keyring | None = None
        self._gate: Gate | None = None
        self._open = False

    def open(self, gate: bool = True) -> None:
        """Reads the keys, before the first bind or connect; may be called again.

        gate: False where this process has one already. Raises ConfigurationError for keys that are
        missing or wrong.
        """
        if self._open or not self._topology.has_tcp():
            return
        self._keyring = keyring(self._topology, self._stage)
        if gate and self._keyring is not None and self._stage in self._topology.ids():
            self._gate = Gate(self._context, self._keyring.allowed)
        self._open = True

    @property
    def refused(self) -> int:
        """Handshakes with strangers that failed, since the start."""
        return self._gate.refused if self._gate is not None else 0

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

        AddressTaken if somebody has it, ConfigurationError if it is not one of this host.
        """
        address = self._topology.address(self._stage)
        if self._keyring is not None and addresses.is_tcp(address):
            self._keyring.serve(socket)
            if self._gate is not None:
                self._gate.watch(socket, "")
        bound = 0
        for place in addresses.places(address, name, self._topology.bind(self._stage)):
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
        if self._keyring is not None and addresses.is_tcp(address):
            self._keyring.call(socket, stage)
            if self._gate is not None:
                self._gate.watch(socket, stage)
        socket.connect(addresses.derive(address, name))

    def secure(self, socket: zmq.Socket[bytes], address: str) -> None:
        """Gives `socket` its keys, before its owner connects it to the stage `address`."""
        if self._keyring is None or not addresses.is_tcp(address):
            return
        stage = next(e.identity.id for e in self._topology.entries if e.address == address)
        self._keyring.call(socket, stage)

    def close(self) -> None:
        """Lets nobody in any more; the sockets themselves their owner closes first."""
        if self._gate is not None:
            self._gate.close()
            self._gate = None
