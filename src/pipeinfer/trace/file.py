"""Trace files on disk: their names, and writing whole blocks to them.

Knows no records. Files are for their owner alone (0600), because prompts stand in them.
"""

from __future__ import annotations

import os
from pathlib import Path

SUFFIX = ".pitrace"
FLIGHT = "flight-"
KEPT = 32  # flight recordings in a folder; a stage that dies again and again must not fill the disk


class TraceFile:
    """A new file `DIR/STEM.pitrace`, or `STEM-2`, `STEM-3` ... where there is one already."""

    def __init__(self, folder: str | Path, stem: str) -> None:
        """Creates the folder and the file. Raises OSError."""
        folder = Path(folder)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.bytes = 0
        number = 1
        while True:
            self.path = folder / (stem + (f"-{number}" if number > 1 else "") + SUFFIX)
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                self._descriptor = os.open(self.path, flags, 0o600)
                return
            except FileExistsError:
                number += 1

    def write(self, block: bytes) -> None:
        """Hands the block to the kernel, where it survives this process. Raises OSError."""
        left = memoryview(block)
        while left:
            left = left[os.write(self._descriptor, left) :]
        self.bytes += len(block)

    def close(self) -> None:
        os.close(self._descriptor)


def default_folder() -> Path:
    """Where flight recordings go if nobody says otherwise: XDG's folder for state."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "pipeinfer"


def prune(folder: Path) -> None:
    """Removes the oldest flight recordings of `folder` beyond KEPT. Raises OSError."""
    found = sorted(folder.glob(f"{FLIGHT}*{SUFFIX}"), key=lambda path: path.stat().st_mtime)
    for path in found[:-KEPT]:
        path.unlink(missing_ok=True)
