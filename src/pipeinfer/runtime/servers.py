"""The servers of this host: which ones run, the sockets on which one listens for HTTP, and the
process that holds a port which is taken.

- running_servers: servers of this user. A server keeps its topology in a temporary folder, beside a
  file that it holds locked as long as it lives, and a file with its URL and its model
- InheritedSockets: opened here, inherited by gateways: the port stays open while the process that
  accepts on them is replaced, and connections made meanwhile wait in the backlog
- port_owner: the process that listens at a port

Knows no HTTP, no gateway and no engine.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import select
import socket
import stat
import struct
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from pipeinfer import topology as topologies
from pipeinfer.settings import ConfigurationError
from pipeinfer.topology import Topology

FOLDER_PREFIX = "pipeinfer-"  # of a server's folder, in the folder for temporary files; its files:
TOPOLOGY = "pipeinfer.toml"
PID_FILE = "pid"  # locked as long as the server lives
SERVED = "served.json"  # its URL, and its model


class ServerInfo(msgspec.Struct, frozen=True):
    """The data that a server with a gateway on this host publishes about itself.

    Attributes:
    - url: of its HTTP, for clients on this host ("http://127.0.0.1:8000")
    - model: name in /v1/models
    - path: of the model's folder or file
    """

    url: str
    model: str
    path: str

    @property
    def port(self) -> int:
        """Port of its HTTP."""
        return int(self.url.rpartition(":")[2])


@dataclass(frozen=True)
class RunningServer:
    """A server of this user on this host.

    Attributes:
    - pid: of its supervisor's process
    - file, topology: its topology
    - served: None before it has its port, and if its gateway is on another host
    """

    pid: int
    file: Path
    topology: Topology
    served: ServerInfo | None = None


@contextmanager
def record_running(file: Path) -> Iterator[None]:
    """Marks the topology `file` as that of a running server, until the end or the process's end."""
    with file.with_name(PID_FILE).open("w") as mark:
        fcntl.flock(mark, fcntl.LOCK_EX)
        mark.write(f"{os.getpid()}\n")
        mark.flush()
        yield


def publish_served_model(file: Path, served: ServerInfo) -> None:
    """Publishes URL and model of the running server of the topology `file`, in one step: readers
    find all of it or nothing."""
    unfinished = file.with_name(f"{SERVED}.new")
    unfinished.write_bytes(msgspec.json.encode(served))
    unfinished.replace(file.with_name(SERVED))


def url_from_here(host: str, port: int, secure: bool) -> str:
    """The URL by which a client on this host reaches a server that listens on `host`, which may be
    all of its addresses ("", 0.0.0.0, ::)."""
    if not host or _is_any(host):
        host = "::1" if ":" in host else "127.0.0.1"
    host = f"[{host}]" if ":" in host else host
    return f"{'https' if secure else 'http'}://{host}:{port}"


def running_servers() -> list[RunningServer]:
    """All servers of this user whose temporary folder is found, oldest first."""
    found: list[tuple[float, RunningServer]] = []
    for mark in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*/{PID_FILE}"):
        try:
            status = mark.lstat()
            owners = {status.st_uid, mark.parent.lstat().st_uid}
            if owners != {os.getuid()} or not stat.S_ISREG(status.st_mode) or not _locked(mark):
                continue  # another user's, or made to look like ours
            file = mark.with_name(TOPOLOGY)
            running = RunningServer(
                int(mark.read_text()), file, topologies.load(file), _served(file)
            )
        except (OSError, ValueError, RecursionError, ConfigurationError):
            continue  # it begins or ends just now, or is no topology at all
        found.append((status.st_mtime, running))
    return [running for _, running in sorted(found, key=lambda pair: pair[0])]


def running_topology(path: str | None = None, port: int | None = None) -> Topology:
    """The topology of the server to talk to: that of file `path`, of the server that listens at
    `port`, or of the only one that runs.

    A file written by hand names no supervisor; if a running server uses its addresses, the
    supervisor of that server is used. Raises ConfigurationError if there is no server to be found,
    or several.
    """
    if path:
        named = topologies.load(path)
        if named.supervisor:
            return named
        same = (s.topology for s in running_servers() if s.topology.entries == named.entries)
        return next(same, named)
    return running_server(port).topology


def running_server(port: int | None = None) -> RunningServer:
    """The server of this user that listens at `port`, or the only one. Raises ConfigurationError,
    which lists the servers that run."""
    servers = running_servers()
    if not servers:
        raise ConfigurationError(
            "no server of this user runs on this host; name its topology with --topology FILE"
        )
    at_port = [one for one in servers if port is None or (one.served and one.served.port == port)]
    if len(at_port) == 1:
        return at_port[0]
    why = f"no server of this user listens at port {port}." if not at_port else "which server?"
    raise ConfigurationError("\n".join([f"{why} There are", *map(_line, servers)]))


def _line(server: RunningServer) -> str:
    """The server in one line, after the flag that chooses it."""
    if server.served is None:
        return f"  --topology {server.file}  without HTTP here, process {server.pid}"
    return f"  --port {server.served.port}  {server.served.model}, process {server.pid}"


def _served(file: Path) -> ServerInfo | None:
    try:
        return msgspec.json.decode(file.with_name(SERVED).read_bytes(), type=ServerInfo)
    except FileNotFoundError:
        return None


def _is_any(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a name
        return False


def _locked(mark: Path) -> bool:
    """Whether some process holds the lock of `mark`; a process that was killed does not."""
    with mark.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


PROC = Path("/proc")
LISTEN_STATE = "0A"  # the state of a socket in /proc/net/tcp
MAX_NAME_CHARS = 60  # characters of a process's name
UNKNOWN_OWNER = "by a process that this user cannot see"


def port_owner(host: str, port: int) -> str:
    """The owner of an address, for a message: "by process 4711 (nginx)", for a server of pipeinfer
    also its model. "" if none is found.

    - host: a number, "" for all of this host's
    """
    inodes = set(_inodes(host, port))
    pids = sorted(_processes_with(inodes))
    # A server that starts has bound its port and does not listen yet: only its own file shows that.
    for server in running_servers():
        served = server.served
        if server.pid in pids or (not inodes and served is not None and served.port == port):
            model = f", model {served.model}" if served is not None else ""
            return f"by process {server.pid} (pipeinfer serve{model})"
    if not inodes:
        return ""
    return f"by process {pids[0]} ({_name(pids[0])})" if pids else UNKNOWN_OWNER


def _inodes(host: str, port: int) -> Iterator[str]:
    """Inodes of the sockets that listen on `port` at an address that covers `host`."""
    host_address = ipaddress.ip_address(host.partition("%")[0] or "::")
    for table in ("tcp", "tcp6"):
        with suppress(OSError):  # no such family here, or no /proc that may be read
            for line in (PROC / "net" / table).read_text().splitlines()[1:]:
                _, local, _, state, *more = line.split()
                address, _, number = local.partition(":")
                if (
                    state == LISTEN_STATE
                    and int(number, 16) == port
                    and _matches(host_address, address)
                ):
                    yield more[5]


def _matches(listened: ipaddress.IPv4Address | ipaddress.IPv6Address, address: str) -> bool:
    """Whether a listening address covers `listened`, or the other way round.

    - address: words of 32 bits in hexadecimal, each in the order of this machine's bytes
    """
    words = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]
    other = ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))
    if isinstance(other, ipaddress.IPv6Address) and other.ipv4_mapped is not None:
        other = other.ipv4_mapped
    return listened == other or listened.is_unspecified or other.is_unspecified


def _processes_with(inodes: set[str]) -> Iterator[int]:
    """The processes of this user that have one of these sockets open."""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for folder in PROC.glob("[0-9]*/fd") if wanted else ():
        with suppress(OSError):  # it ended meanwhile, or is another user's
            if any(_link(file) in wanted for file in folder.iterdir()):
                yield int(folder.parent.name)


def _link(file: Path) -> str:
    try:
        return os.readlink(file)  # noqa: PTH115 (a Path would lose "socket:[...]"'s form)
    except OSError:  # closed meanwhile
        return ""


def _name(pid: int) -> str:
    """The program's name; for Python also the module or script that it runs. No further argument is
    shown, because some are secret."""
    try:
        name = (PROC / str(pid) / "comm").read_text().strip()
        words = (PROC / str(pid) / "cmdline").read_text(errors="replace").split("\0")
    except OSError:  # it has ended
        return "?"
    if Path(words[0]).name.startswith("python"):
        what, *rest = _program(words[1:]) or [""]
        if what == "-m" and rest:
            more = 2 if rest[0].startswith("pipeinfer") else 1  # its command, or its stage
            name = " ".join(["python -m", *rest[:more]])
        elif what and not what.startswith("-"):
            name = f"python {Path(what).name}"
    return name[:MAX_NAME_CHARS]


def _program(words: list[str]) -> list[str]:
    """Python's arguments from the script, or from the flag of a module or of code, on."""
    while words and words[0].startswith("-") and words[0] not in ("-m", "-c", "-"):
        words = words[2 if words[0] in ("-W", "-X") else 1 :]  # these have a value
    return words


PORTS_TRIED = 100  # ports beyond one that is taken, of which a free one is named
BACKLOG = 1024  # connections that may wait to be accepted
FAMILY_ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # a family that this host does not have


def open_sockets(host: str, port: int) -> list[socket.socket]:
    """Opens a listening socket for each address of `host` ("localhost" may have two, "" is all).

    With port 0 the first takes a free port, the others the same. Raises ConfigurationError.
    """
    return _open_all(host, port, BACKLOG)


def bound_sockets(host: str, port: int) -> list[socket.socket]:
    """Sockets as those of `open_sockets`, but clients cannot connect before `listen`."""
    return _open_all(host, port, 0)


def listen(sockets: Iterable[socket.socket]) -> None:
    """Listens on `sockets`. Raises ConfigurationError if another process listens by now."""
    for one in sockets:
        try:
            one.listen(BACKLOG)
        except OSError as error:
            host, port, *_ = one.getsockname()
            raise ConfigurationError(_bind_error(host, port, error)) from error


def check_free(host: str, port: int) -> None:
    """Checks that no process listens on these addresses; none can while this is checked, either.

    Raises ConfigurationError.
    """
    close_all(_open_all(host, port, 0))


def _open_all(host: str, port: int, backlog: int) -> list[socket.socket]:
    """Opens a socket for each address. With `backlog` 0 they are only bound, which fails beside a
    socket that listens."""
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
        raise ConfigurationError(_bind_error(host, port, error)) from error
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


def _bind_error(host: str, port: int, error: OSError) -> str:
    """The error of a bind: which flag is to be changed, and why; for a port that is taken also its
    owner, and another port that is free."""
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


WAIT_FLAG = "--wait-fd"


class InheritedSockets:
    """The HTTP sockets of a supervisor, which its gateways inherit before a process listens on
    them.

    A gateway that has come early reads a pipe until `listen` writes to it: so it loads its modules
    while the engine loads its own, and clients cannot connect before. Without sockets before
    `bind`.
    """

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []
        self._source = self._sink = -1  # of the pipe, until `listen`

    def bind(self, host: str, port: int) -> None:
        """Binds the addresses. Raises ConfigurationError if another process listens there."""
        self._sockets = bound_sockets(host, port)
        self._source, self._sink = os.pipe()

    @property
    def port(self) -> int:
        """The port that was bound."""
        return int(self._sockets[0].getsockname()[1])

    @property
    def descriptors(self) -> list[int]:
        """The descriptors that a gateway process inherits."""
        return [*(one.fileno() for one in self._sockets), *self._pipe_fds]

    @property
    def arguments(self) -> list[str]:
        """The command-line arguments that name these descriptors."""
        words = [word for one in self._sockets for word in ("--listen-fd", str(one.fileno()))]
        return words + [word for one in self._pipe_fds for word in (WAIT_FLAG, str(one))]

    def listen(self) -> None:
        """Listens, and lets waiting gateways begin. Raises ConfigurationError if the port is
        taken."""
        listen(self._sockets)
        os.write(self._sink, b"." * select.PIPE_BUF)  # each of them takes one byte
        self._close_pipe()

    def close(self) -> None:
        """Closes this process's copies; gateways that still wait end."""
        close_all(self._sockets)
        self._close_pipe()

    @property
    def _pipe_fds(self) -> list[int]:
        return [self._source] if self._source >= 0 else []

    def _close_pipe(self) -> None:
        if self._source >= 0:
            os.close(self._source)
            os.close(self._sink)
        self._source = self._sink = -1


def wait_until_listening(descriptor: int) -> bool:
    """Waits until the parent process listens; False if it has ended."""
    with open(descriptor, "rb", buffering=0) as pipe:
        return pipe.read(1) != b""
