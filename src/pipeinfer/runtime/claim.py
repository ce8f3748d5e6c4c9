"""Which of several stages of one name a process is, when nobody tells it: the first that is free.

For containers that are started alike, as many as there are to be. Locks in a folder that they share
say who is taken, and end with their process. Knows no stage's business.
"""

from __future__ import annotations

import fcntl
import tempfile
from pathlib import Path
from typing import IO

from pipeinfer.runtime.topology import Identity, Topology
from pipeinfer.settings import ConfigurationError

NOTE = "pipeinfer-stage"  # in the folder for temporary files: who the process here is


class Claim:
    """`identity` is ours as long as this object lives. `note` names it for health checks."""

    def __init__(self, identity: Identity, lock: IO[str]) -> None:
        self.identity, self._lock = identity, lock
        note().write_text(identity.id)


def claim(topology: Topology, name: str, on: str, folder: Path) -> Claim:
    """A stage called `name` on host `on` ("" for any) that no other process has claimed.

    folder: of the locks, the same for all processes of the host. ConfigurationError if there is
    none left.
    """
    mine = [e for e in topology.entries if e.name == name and (not on or e.host == on)]
    for entry in mine:
        lock = (folder / f"{entry.identity.id}.lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        return Claim(entry.identity, lock)
    where = f" on host {on}" if on else ""
    raise ConfigurationError(
        f"the topology has {len(mine)} stages {name!r}{where}, and all of them run"
        if mine
        else f"the topology has no stage {name!r}{where}"
    )


def note() -> Path:
    """The file with the id of the stage that was claimed here; each container has its own."""
    return Path(tempfile.gettempdir(), NOTE)
