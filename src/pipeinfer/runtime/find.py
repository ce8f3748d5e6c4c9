"""Finds the server that runs on this host: for commands that talk to one without being told where.

A server keeps its topology in a temporary folder, beside a file that it holds locked as long as it
lives, and a file that says where it listens for HTTP and what it serves. Opens no sockets.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pipeinfer import topology as topologies
from pipeinfer.settings import ConfigurationError
from pipeinfer.topology import Topology

PREFIX, TOPOLOGY, PID_FILE, SERVED = "pipeinfer-", "pipeinfer.toml", "pid", "served.json"


class ServerInfo(msgspec.Struct, frozen=True):
    """What a server that has a gateway on this host says of itself.

    url: of its HTTP, for clients on this host ("http://127.0.0.1:8000"). model: as /v1/models names
    it. path: of the model's folder or file.
    """

    url: str
    model: str
    path: str

    @property
    def port(self) -> int:
        """Of its HTTP."""
        return int(self.url.rpartition(":")[2])


@dataclass(frozen=True)
class RunningServer:
    """A server of this user on this host: its supervisor's process, and its topology file.

    served: None before it has its port, and where its gateway is on another host.
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
    """Says what the running server of the topology `file` serves, and where. Whoever looks finds
    all of it or nothing."""
    unfinished = file.with_name(f"{SERVED}.new")
    unfinished.write_bytes(msgspec.json.encode(served))
    unfinished.replace(file.with_name(SERVED))


def url_from_here(host: str, port: int, secure: bool) -> str:
    """How a client on this host reaches a server that listens on `host`, which may be all of its
    addresses ("", 0.0.0.0, ::)."""
    if not host or _is_any(host):
        host = "::1" if ":" in host else "127.0.0.1"
    host = f"[{host}]" if ":" in host else host
    return f"{'https' if secure else 'http'}://{host}:{port}"


def running_servers() -> list[RunningServer]:
    """All servers of this user whose temporary folder is found, oldest first."""
    found: list[tuple[float, RunningServer]] = []
    for mark in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{PID_FILE}"):
        try:
            status = mark.lstat()
            owners = {status.st_uid, mark.parent.lstat().st_uid}
            if owners != {os.getuid()} or not stat.S_ISREG(status.st_mode) or not _locked(mark):
                continue  # somebody else's, or made to look like ours
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

    A file written by hand names no supervisor; if a running server uses its addresses, that one's
    is known too. Raises ConfigurationError if there is no server to be found, or several.
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
    why = f"no server of this user listens at port {port}" if not at_port else "which server?"
    raise ConfigurationError("\n".join([f"{why} There are", *map(_line, servers)]))


def _line(server: RunningServer) -> str:
    """What it is, after the flag that chooses it."""
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
    """Whether some process holds it; one that was killed does not."""
    with mark.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
