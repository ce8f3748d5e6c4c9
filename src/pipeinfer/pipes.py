"""Frames on the stdin and stdout of a child process.

The child does work that would block its parent or could crash it. A frame is a length in 4 bytes,
little endian, and that many bytes of body. The child exits when its stdin ends, so it never
outlives its parent.
"""

from __future__ import annotations

import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, cast

READ_BYTES = 1024 * 1024  # bytes; a pipe holds 64 KiB


def start(
    module: str, environment: Mapping[str, str], silent: bool = False
) -> subprocess.Popen[bytes]:
    """Starts `python -m module` as a child process. The module calls `served`.

    environment: variables to add to this process's environment.
    silent: whether the child's stderr is dropped.
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


def served() -> tuple[queue.SimpleQueue[bytes], BinaryIO]:
    """Called in the child: the incoming frames, and the stream to `write` answers to.

    Redirects stdout to stderr, so that prints do not break a frame; ignores SIGINT. When stdin
    ends, the process exits at once, whatever its threads are doing.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # prints must not break a frame
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent process
    frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(frames,), daemon=True).start()
    return frames, cast(BinaryIO, answers)


def write(stream: BinaryIO, body: bytes) -> None:
    """Writes `body` as one frame. Raises BrokenPipeError if the other end is closed."""
    for part in (len(body).to_bytes(4, "little"), body):
        unwritten = memoryview(part)
        while unwritten:
            unwritten = unwritten[stream.write(unwritten) :]


def read(fd: int, seconds: float | None = None) -> bytes | None:
    """The body of the next frame from file descriptor `fd`.

    seconds: how long to wait for the whole frame; None: without limit.

    Returns None if the pipe ends within the frame, or if the time is over.
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
    while (frame := read(sys.stdin.fileno())) is not None:
        frames.put(frame)
    os._exit(0)
