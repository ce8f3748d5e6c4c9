"""A disk that is full while stages record: a small tmpfs where we may mount one, else a limit.

With root, recordings go into a tmpfs that is filled but for a few KiB, so that writing fails with
ENOSPC. Without, the stages' own limit of a file's size (RLIMIT_FSIZE) is set while they run, so
that the kernel refuses the same write half way, with EFBIG. Knows `pipeinfer record`.
"""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from chaos.stream_client import Broken

SIZE = 1 << 20  # bytes of the tmpfs
LEFT = 48 << 10  # bytes that are free when recordings begin
MOST = 4 << 10  # bytes that a file may have, where a limit stands for the disk's end
LATE = 60.0  # seconds for a recording to end after its time


class SmallDisk:
    """A folder for recordings, as a context manager. way: "tmpfs" or "rlimit". reason: what the
    kernel says to who writes on."""

    def __enter__(self) -> SmallDisk:
        self._stack = ExitStack()
        made = tempfile.TemporaryDirectory(prefix="pipeinfer-chaos-")
        self.folder = Path(self._stack.enter_context(made))
        words = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(self.folder)]
        try:
            mounted = subprocess.run(words, capture_output=True).returncode == 0
        except FileNotFoundError:
            mounted = False
        self.way = "tmpfs" if mounted else "rlimit"
        self.reason = os.strerror(errno.ENOSPC if mounted else errno.EFBIG)
        if mounted:
            self._stack.callback(subprocess.run, ["umount", "-l", str(self.folder)], check=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def record(self, topology: str, seconds: float, pids: Iterable[int], log: int) -> None:
        """Has all stages of the server with the topology file `topology` record, and the disk ends.

        log: bytes that the stages' other file, their log, has. Raises Broken unless at least one
        recording says that there was no room, and none fails for another reason.
        """
        full = self._filled() if self.way == "tmpfs" else _limited(pids, log + MOST)
        words = ["record", "--topology", topology, "--seconds", str(seconds)]
        with full, tempfile.TemporaryDirectory(dir=self.folder) as out:
            told = subprocess.run(
                [sys.executable, "-m", "pipeinfer", *words, "--out", out],
                capture_output=True, text=True, timeout=seconds + LATE,
            )  # fmt: skip
        failed = told.stderr.strip().splitlines()
        if told.returncode != 1 or not failed or not all(self.reason in line for line in failed):
            raise Broken(f"recording on a full disk ended with {told.returncode}: {told.stderr}")

    @contextmanager
    def _filled(self) -> Iterator[None]:
        filler = self.folder / "filler"
        free = os.statvfs(self.folder)
        filler.write_bytes(b"\0" * max(free.f_bavail * free.f_frsize - LEFT, 0))
        try:
            yield
        finally:
            filler.unlink()


@contextmanager
def _limited(pids: Iterable[int], most: int) -> Iterator[None]:
    """No file of these processes grows beyond `most` bytes. Python ignores the signal for it."""
    processes = [psutil.Process(pid) for pid in pids]
    limits = [process.rlimit(resource.RLIMIT_FSIZE) for process in processes]
    for process, (_, hard) in zip(processes, limits, strict=True):
        process.rlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        for process, before in zip(processes, limits, strict=True):
            process.rlimit(resource.RLIMIT_FSIZE, before)
