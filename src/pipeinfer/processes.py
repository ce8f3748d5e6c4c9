"""Child processes that do work for this one, the memory of this process, the process at the other
end of a Unix socket, and limits of control groups.

- start_child, incoming_frames: a child process, from the parent's side and from its own
- read_frame, write_frame: frames between both, on the child's stdin and stdout
- map_large_allocations, return_freed_memory: settings of the C library's memory, if the library is
  glibc; otherwise they do nothing
- resident_bytes: memory of this process
- peer_of: the process at the other end of a Unix socket
- cpu_quota, memory_left: the share of the host that the control group of this process, or of its
  container, allows; version 2 has one tree, version 1 a tree for each resource, under the same
  folder

A child does work that would block its parent or could crash it. A frame is a length in 4 bytes,
little endian, and that many bytes of body. The child exits when its stdin ends, so it never
outlives its parent.
"""

from __future__ import annotations

import ctypes
import linecache
import os
import queue
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, cast

MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h
# allocations of this size or more are mapped for themselves; glibc's own first value
LARGE_BYTES = 128 << 10
READ_BYTES = 1024 * 1024  # bytes; a pipe holds 64 KiB


def start_child(
    module: str, environment: Mapping[str, str], silent: bool = False
) -> subprocess.Popen[bytes]:
    """Starts `python -m module` as a child process. The module calls `incoming_frames`.

    - environment: variables to add to this process's environment
    - silent: whether the child's stderr is dropped
    """
    home = str(Path(__file__).parents[1])
    paths = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if silent else None,
        bufsize=0,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
    )


def incoming_frames() -> tuple[queue.SimpleQueue[bytes], BinaryIO]:
    """The incoming frames, and the stream to `write_frame` answers to; to be called in the child.

    Redirects stdout to stderr, so that prints do not break a frame; ignores SIGINT. When stdin
    ends, the process exits at once, whatever its threads are doing.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # prints must not break a frame
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent process
    frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(frames,), daemon=True).start()
    return frames, cast(BinaryIO, answers)


def write_frame(stream: BinaryIO, body: bytes) -> None:
    """Writes `body` as one frame. Raises BrokenPipeError if the other end is closed."""
    for part in (len(body).to_bytes(4, "little"), body):
        unwritten = memoryview(part)
        while unwritten:
            unwritten = unwritten[stream.write(unwritten) :]


def read_frame(fd: int, seconds: float | None = None) -> bytes | None:
    """The body of the next frame from file descriptor `fd`; None if the pipe ends within the frame,
    or the time is over.

    - seconds: time to wait for the whole frame; None: without limit
    """
    until = None if seconds is None else time.monotonic() + seconds
    head = _read(fd, 4, until)
    return None if head is None else _read(fd, int.from_bytes(head, "little"), until)


def _read(fd: int, count: int, until: float | None) -> bytes | None:
    got = bytearray()
    while len(got) < count:
        if until is not None:
            seconds_left = max(0.0, until - time.monotonic())
            if not select.select([fd], [], [], seconds_left)[0]:
                return None
        chunk = os.read(fd, min(count - len(got), READ_BYTES))
        if not chunk:
            return None
        got += chunk
    return bytes(got)


def _listen(frames: queue.SimpleQueue[bytes]) -> None:
    while (frame := read_frame(sys.stdin.fileno())) is not None:
        frames.put(frame)
    os._exit(0)


def map_large_allocations() -> None:
    """Makes malloc map each allocation of LARGE_BYTES or more for itself, and unmap it when it is
    freed.

    By default glibc does so only until the first such allocation is freed, and then puts all that
    are no larger, up to 32 MiB, among the small ones. The holes that they leave are rarely given
    back: a process that runs for days grows by them. A mapped allocation costs its page faults each
    time it is made; so this is for processes that seldom make one.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, LARGE_BYTES)


def return_freed_memory() -> None:
    """Gives the kernel the memory that was freed, which the library otherwise keeps for later.
    Frees source lines that Python read for imports."""
    linecache.clearcache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def resident_bytes() -> int:
    """Resident memory of this process in bytes, shared pages included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peer_of(link: socket.socket) -> tuple[int, int]:
    """Process id and user id at the other end of `link`; for a listening socket, of the process
    that called listen.

    A name of Linux's abstract namespace belongs to the first process that binds it, and any process
    may connect: so both ends must check.
    """
    raw = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, user, _group = struct.unpack("3i", raw)
    return pid, user


GROUPS = Path("sys/fs/cgroup")


def cpu_quota(root: Path = Path("/")) -> int | None:
    """Whole cores whose time the control group may use; None: there is no quota."""
    groups = root / GROUPS
    if (groups / "cpu.max").exists():
        quota_us, _, period_us = (groups / "cpu.max").read_text().partition(" ")
        quota, period = _decimal(quota_us), _decimal(period_us)
    else:
        quota = _number(groups / "cpu/cpu.cfs_quota_us")
        period = _number(groups / "cpu/cpu.cfs_period_us")
    return None if quota is None or not period else quota // period


def memory_left(root: Path = Path("/")) -> int | None:
    """Bytes that the control group may still take; None: there is no limit."""
    groups = root / GROUPS
    limit, used = _number(groups / "memory.max"), _number(groups / "memory.current")
    if used is None:
        # Without a limit version 1 has the greatest number of pages, which is far above any host.
        limit = _number(groups / "memory/memory.limit_in_bytes")
        used = _number(groups / "memory/memory.usage_in_bytes")
    return None if limit is None or used is None else max(limit - used, 0)


def _number(path: Path) -> int | None:
    """The number in the file; None if there is no such file, or if it states that there is no
    limit."""
    return _decimal(path.read_text()) if path.exists() else None


def _decimal(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None
