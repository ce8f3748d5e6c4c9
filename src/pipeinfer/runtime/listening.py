"""The sockets on which a server listens for HTTP: opened, handed to a child process, adopted there.

Whoever opened them keeps the port while the process that accepts on them is replaced: what connects
meanwhile waits in the backlog. Knows no HTTP and no stage.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterable
from typing import Any

from pipeinfer.runtime.port_owner import port_owner
from pipeinfer.settings import ConfigurationError

PORTS_TRIED = 100  # ports beyond one that is taken, of which a free one is named
BACKLOG = 1024  # connections that may wait to be accepted
FAMILY_ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # a family that this host does not have


def open_sockets(host: str, port: int) -> list[socket.socket]:
    """One listening socket for each address of `host` ("localhost" may have two, "" is all).

    With port 0 the first takes a free port, the others the same. Raises ConfigurationError.
    """
    return _opened(host, port, BACKLOG)


def bound_sockets(host: str, port: int) -> list[socket.socket]:
    """The same, but nobody can connect before `listen`."""
    return _opened(host, port, 0)


def listen(sockets: Iterable[socket.socket]) -> None:
    """Raises ConfigurationError if somebody else listens by now."""
    for one in sockets:
        try:
            one.listen(BACKLOG)
        except OSError as error:
            host, port, *_ = one.getsockname()
            raise ConfigurationError(_why(host, port, error)) from error


def check_free(host: str, port: int) -> None:
    """That nobody listens on these addresses; nobody does while this is found out, either.

    Raises ConfigurationError.
    """
    close_all(_opened(host, port, 0))


def _opened(host: str, port: int, backlog: int) -> list[socket.socket]:
    """A backlog of 0: only bound, which fails beside a socket that listens."""
    opened: list[socket.socket] = []
    absent: OSError | None = None
    try:
        for family, address in _addresses(host, port):
            here = (address[0], opened[0].getsockname()[1] if opened else port, *address[2:])
            try:
                opened.append(_bound(family, here, backlog))
            except OSError as error:
                if error.errno not in FAMILY_ABSENT:
                    raise
                absent = error
        if not opened:
            raise absent or OSError(errno.EADDRNOTAVAIL, "it has no address")
    except OSError as error:
        close_all(opened)
        raise ConfigurationError(_why(host, port, error)) from error
    return opened


def adopt(descriptors: Iterable[int]) -> list[socket.socket]:
    """The sockets that a parent process opened, by the numbers under which it handed them on.

    Raises ConfigurationError for a number that is no listening socket of this process.
    """
    return [_adopted(descriptor) for descriptor in descriptors]


def close_all(sockets: Iterable[socket.socket]) -> None:
    """Closes this process's copies; a child's own stay open."""
    for one in sockets:
        one.close()


def _adopted(descriptor: int) -> socket.socket:
    try:
        adopted = socket.socket(fileno=descriptor)
        if not adopted.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise OSError(errno.EINVAL, "it does not listen")
    except OSError as error:
        raise ConfigurationError(f"--listen-fd {descriptor}: {error.strerror}") from error
    adopted.setblocking(False)
    return adopted


def _why(host: str, port: int, error: OSError) -> str:
    """Which flag is to be changed, and why; of a port that is taken also whose it is, and another
    one that is free."""
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}" if host else f"port {port}"
    if error.errno != errno.EADDRINUSE:
        flag = f"--port {port}" if error.errno == errno.EACCES else f"--host {host}"
        return f"{flag}: cannot listen on {place}: {error.strerror or error}"
    numbers = (address[0] for _, address in _addresses(host, port))
    whose = next(filter(None, (port_owner(number, port) for number in numbers)), "")
    text = f"--port {port}: {place} is taken{whose and ' '}{whose}"
    free = next(
        (other for other in range(port + 1, port + PORTS_TRIED) if _is_free(host, other)), None
    )
    return text if free is None else f"{text}; --port {free} is free (with make: PORT={free})"


def _is_free(host: str, port: int) -> bool:
    try:
        close_all(_bound(family, at, 0) for family, at in _addresses(host, port))
    except (OSError, OverflowError):
        return False
    return True


def _addresses(host: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    """(family, socket address) of each address of `host`, in the resolver's order, once."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _bound(family: int, address: tuple[Any, ...], backlog: int) -> socket.socket:
    with contextlib.ExitStack() as undo:
        opened = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:  # 0.0.0.0 and :: at once are two sockets
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        opened.setblocking(False)
        opened.bind(address)
        if backlog:
            opened.listen(backlog)
        undo.pop_all()
    return opened
