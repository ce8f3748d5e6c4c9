"""Instance election: which of several stages of one name a process is, when nobody says: the first
that is free.

For containers that are started alike, as many as there are to be. Locks in a folder that they share
say which stages are taken, and end with their process.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
from pathlib import Path
from typing import IO

from pipeinfer.settings import ConfigurationError
from pipeinfer.topology import Identity, Topology

INSTANCE_FILE = "pipeinfer-stage"  # in the folder for temporary files: who the process here is


class ElectedInstance:
    """`identity` is ours as long as this object lives. `note` names it for health checks."""

    def __init__(self, identity: Identity, lock: IO[str]) -> None:
        self.identity = identity
        self._lock = lock
        with _locked_file(instance_file()) as file:
            file.truncate()
            file.write(identity.id)


def elect_instance(topology: Topology, name: str, on: str, folder: Path) -> ElectedInstance:
    """A stage called `name` on host `on` ("" for any) that no other process has claimed.

    folder: of the locks, the same for all processes of the host. ConfigurationError if there is
    none left, or if something of somebody else lies where a lock or the note belongs.
    """
    mine = [e for e in topology.entries if e.name == name and (not on or e.host == on)]
    for entry in mine:
        lock = _locked_file(folder / f"{entry.identity.id}.lock")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        return ElectedInstance(entry.identity, lock)
    where = f" on host {on}" if on else ""
    raise ConfigurationError(
        f"the topology has {len(mine)} stages {name!r}{where}, and all of them run"
        if mine
        else f"the topology has no stage {name!r}{where}"
    )


def instance_file() -> Path:
    """The file with the id of the stage that was claimed here; each container has its own."""
    return Path(tempfile.gettempdir(), INSTANCE_FILE)


def elected_instance() -> str:
    """The id of the stage that was claimed here. OSError, or ConfigurationError if the note is not
    ours, so that nobody else can say how this stage is."""
    with _locked_file(instance_file(), os.O_RDONLY) as file:
        return file.read()


def _locked_file(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> IO[str]:
    """Opens a plain file of this user's, and no link to another one: folders for temporary files
    are shared, and whoever comes first chooses what lies there. Raises ConfigurationError."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        reason = "it is a link" if error.errno == errno.ELOOP else error.strerror
        raise ConfigurationError(f"cannot open {path}: {reason}") from None
    status = os.fstat(descriptor)
    mine = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_nlink == 1
    if not mine:
        os.close(descriptor)
        raise ConfigurationError(f"{path} is not a plain file of this user's")
    return os.fdopen(descriptor, "r" if flags == os.O_RDONLY else "r+")
