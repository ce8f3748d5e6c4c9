"""Addresses of a stage's sockets, derived from the one address that the topology gives it.

A stage binds up to four sockets: its inbox (PULL), its telemetry, a scheduler its plans (PUB), and
the first rank of several where they meet (REP). With `tcp` they take four ports in a row; with
`ipc` and `inproc` four names. Opens nothing.
"""

from __future__ import annotations

import ipaddress
from socket import SOCK_STREAM, getaddrinfo

from pipeinfer.settings import ConfigurationError

TRANSPORTS = ("inproc", "ipc", "tcp")
PORT_OFFSETS = {"inbox": 0, "telemetry": 1, "plan": 2, "group": 3}
LAST_PORT = 65535 - max(PORT_OFFSETS.values())


def socket_address(address: str, socket: str) -> str:
    """The address of `socket` ("inbox", "telemetry", "plan", "group") of the stage at `address`."""
    transport, rest = split_address(address)
    if transport != "tcp":
        return f"{address}.{socket}"
    host, port = _host_port(address, rest)
    return f"tcp://{host}:{port + PORT_OFFSETS[socket]}"


def check_address(address: str, keyed: bool = False) -> None:
    """Raises ConfigurationError for an address that pipeinfer cannot or must not use.

    keyed: there are CURVE keys, so tcp may leave this host.
    """
    transport, rest = split_address(address)
    if transport == "tcp":
        host, port = _host_port(address, rest)
        if not 0 < port <= LAST_PORT:
            raise ConfigurationError(f"{address}: the port must be between 1 and {LAST_PORT}")
        if not keyed and not is_loopback(host):
            raise ConfigurationError(
                f"{address}: tcp addresses other than loopback need CURVE keys: make them with "
                "`pipeinfer keys` and name their folder in the topology, keys = FOLDER"
            )
        if host == "*" or _unspecified(host):
            raise ConfigurationError(
                f"{address}: others cannot connect to {host}; name this host, and bind = {host!r}"
            )
    elif transport == "ipc" and len(rest.encode()) > 90:
        raise ConfigurationError(
            f"{address}: a path for ipc has at most 90 bytes; if it is one of temporary files, set "
            "TMPDIR to a shorter folder"
        )


def split_address(address: str) -> tuple[str, str]:
    """("tcp", "host:port") of "tcp://host:port"."""
    transport, separator, rest = address.partition("://")
    if not separator or transport not in TRANSPORTS or not rest:
        raise ConfigurationError(
            f"address {address!r} must begin with one of inproc://, ipc://, tcp://"
        )
    return transport, rest


def is_tcp(address: str) -> bool:
    """Whether it can be reached from other hosts, as far as its transport goes."""
    return address.startswith("tcp://")


def listen_host(address: str) -> str:
    """Where a stage at `address` listens for TCP beside the bus: loopback unless it is tcp."""
    transport, rest = split_address(address)
    return _host_port(address, rest)[0].strip("[]") if transport == "tcp" else "127.0.0.1"


def bind_addresses(address: str, socket: str, bind: str = "") -> list[str]:
    """Where to bind `socket` of the stage at `address`: for a host name, all that it means.

    bind: a host to listen on instead, "*" for all; peers reach it under `address` (containers,
    NAT). Raises ConfigurationError for a name that means nothing.
    """
    derived = socket_address(address, socket)
    transport, rest = split_address(derived)
    if transport != "tcp":
        return [derived]
    host, port = _host_port(derived, rest)
    host = bind.strip("[]") or host.strip("[]")
    if host == "*":
        return [f"tcp://*:{port}"]
    try:
        found = getaddrinfo(host, port, type=SOCK_STREAM)
    except OSError as error:
        raise ConfigurationError(f"{derived}: host {host!r}: {error.strerror}") from None
    numbers = dict.fromkeys(str(place[0]) for *_, place in found)
    return [f"tcp://[{n}]:{port}" if ":" in n else f"tcp://{n}:{port}" for n in numbers]


def is_loopback(host: str) -> bool:
    """True for localhost and the loopback ranges of IPv4 and IPv6."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _unspecified(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def _host_port(address: str, rest: str) -> tuple[str, int]:
    host, separator, port = rest.rpartition(":")
    if not separator or not host or not port.isdigit():
        raise ConfigurationError(f"address {address!r} must be tcp://HOST:PORT")
    return host, int(port)
