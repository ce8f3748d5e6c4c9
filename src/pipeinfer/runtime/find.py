"""Finds the server that runs on this host: for commands that talk to one without being told where.

A server keeps its topology in a temporary folder, beside a file that it holds locked as long as it
lives. Opens no sockets.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipeinfer.settings import ConfigurationError
from pipeinfer.topology import topology as topologies
from pipeinfer.topology.topology import Topology

PREFIX, TOPOLOGY, MARK = "pipeinfer-", "pipeinfer.toml", "pid"


@dataclass(frozen=True)
class Running:
    """A server of this user on this host: its supervisor's process, and its topology file."""

    pid: int
    file: Path
    topology: Topology


@contextmanager
def alive(file: Path) -> Iterator[None]:
    """Marks the topology `file` as that of a running server, until the end or the process's end."""
    with file.with_name(MARK).open("w") as mark:
        fcntl.flock(mark, fcntl.LOCK_EX)
        mark.write(f"{os.getpid()}\n")
        mark.flush()
        yield


def running_servers() -> list[Running]:
    """All servers of this user whose temporary folder is found, oldest first."""
    found: list[tuple[float, Running]] = []
    for mark in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{MARK}"):
        try:
            status = mark.lstat()
            owners = {status.st_uid, mark.parent.lstat().st_uid}
            if owners != {os.getuid()} or not stat.S_ISREG(status.st_mode) or not _locked(mark):
                continue  # somebody else's, or made to look like ours
            file = mark.with_name(TOPOLOGY)
            running = Running(int(mark.read_text()), file, topologies.load(file))
        except (OSError, ValueError, RecursionError, ConfigurationError):
            continue  # it begins or ends just now, or is no topology at all
        found.append((status.st_mtime, running))
    return [running for _, running in sorted(found, key=lambda pair: pair[0])]


def running_topology(path: str | None = None) -> Topology:
    """The topology of the server to talk to: that of file `path`, or of the only one that runs.

    A file written by hand names no supervisor; if a running server uses its addresses, that one's
    is known too. Raises ConfigurationError if there is no server to be found, or several.
    """
    if path:
        named = topologies.load(path)
        if named.supervisor:
            return named
        same = (s.topology for s in running_servers() if s.topology.entries == named.entries)
        return next(same, named)
    servers = running_servers()
    if not servers:
        raise ConfigurationError(
            "no server of this user runs on this host; name its topology with --topology FILE"
        )
    if len(servers) > 1:
        listed = ", ".join(f"{s.file} (process {s.pid})" for s in servers)
        raise ConfigurationError(f"several servers run here, choose with --topology: {listed}")
    return servers[0].topology


def _locked(mark: Path) -> bool:
    """Whether some process holds it; one that was killed does not."""
    with mark.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
