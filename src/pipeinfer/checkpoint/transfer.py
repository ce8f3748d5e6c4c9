"""Progress of a transfer of files: bytes, rate and time left.

On a terminal one line is rewritten; elsewhere a line is logged now and then. Knows names of files
and numbers of bytes, no network.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TextIO

from tqdm import tqdm

Say = Callable[[str], object]

GIB, MIB = 2**30, 2**20
# A line is due after LINE_SECONDS, or after LINE_FRACTION more of all bytes.
LINE_SECONDS, LINE_FRACTION = 10.0, 0.05
LINE_PAUSE = 1.0  # the least seconds between two lines
WINDOW = 30.0  # seconds over which a line's rate is averaged
LOOK = 0.2  # seconds between two updates


class Transfer:
    """The progress of several files.

    name: shown in front of each line.
    sizes: bytes of the files, by name.
    say: gets the lines if `stream` is not a terminal, and a last line unless the context ends by an
        exception.
    stream: where the bar is shown if that is a terminal; None: stderr.

    A context manager: shows the progress while it is entered. Bytes are counted by `set` and `add`,
    from any thread.
    """

    def __init__(
        self,
        name: str,
        sizes: Mapping[str, int],
        say: Say,
        stream: TextIO | None = None,
    ) -> None:
        self._sizes = dict(sizes)
        self._name, self._say = name, say
        self._stream = sys.stderr if stream is None else stream
        self._done: dict[str, int] = {}
        self._resumed = 0
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._show, name="transfer", daemon=True)

    @property
    def total(self) -> int:
        """Bytes of all files together."""
        with self._lock:
            return sum(self._sizes.values())

    @property
    def done(self) -> int:
        """Bytes that are on disk, of all files together."""
        with self._lock:
            return sum(self._done.values())

    @property
    def received(self) -> int:
        """Bytes of `done` that came in this transfer, and not in an earlier one."""
        with self._lock:
            return sum(self._done.values()) - self._resumed

    def of(self, file: str) -> int:
        """Bytes of `file` that are on disk."""
        return self._done.get(file, 0)

    def expect(self, file: str, count: int) -> None:
        """Corrects the size of `file` to `count` bytes."""
        with self._lock:
            self._sizes[file] = count

    def set(self, file: str, count: int) -> None:
        """`count` bytes of `file` are on disk, and the change does not count as received."""
        with self._lock:
            self._resumed += count - self.of(file)
            self._done[file] = count

    def add(self, file: str, count: int) -> None:
        """`count` more bytes of `file` were received."""
        with self._lock:
            self._done[file] = self.of(file) + count

    def log(self, text: str) -> None:
        """Shows `text`, above the bar or as a line."""
        if self._stream.isatty():
            tqdm.write(text, file=self._stream)
        else:
            self._say(text)

    def __enter__(self) -> Transfer:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()
        if kind is None:
            seconds = max(time.monotonic() - self._began, 1e-3)
            came = self.received
            said = f"{size(came)} came in {duration(seconds)}, {size(came / seconds)}/s"
            self._say(f"{self._name}: {said}")

    def _show(self) -> None:
        if self._stream.isatty():
            self._bar()
            return
        lines = ProgressLines(self._began)
        while not self._over.wait(LOOK):
            line = lines.due(self.done, self.total, self.received, time.monotonic())
            if line:
                self._say(f"{self._name}: {line}")

    def _bar(self) -> None:
        """Runs the bar. tqdm takes the rate from the bytes given to `update`, so what was on disk
        before is `initial` instead.
        """
        columns, rows = os.get_terminal_size(self._stream.fileno())  # 0 on some terminals
        with tqdm(
            desc=self._name,
            total=self.total,
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            ncols=columns or 80,
            nrows=rows or 24,
            mininterval=0,
            leave=False,
            file=self._stream,
        ) as bar:
            while not self._over.wait(LOOK):
                bar.initial, bar.total = self.done - self.received, self.total
                bar.update(suffix) if (suffix := self.done - bar.n) else bar.refresh()


class ProgressLines:
    """Decides when a line is due, and writes it. Reads no clock.

    began: seconds of the clock that `due` gets its `now` from.
    """

    def __init__(self, began: float) -> None:
        self._logged_at, self._logged = began, 0
        self._seen: deque[tuple[float, int]] = deque([(began, 0)])

    def due(self, done: int, total: int, received: int, now: float) -> str:
        """The line to be logged now; "": none is due.

        done: bytes that are on disk.
        total: bytes of all files.
        received: bytes of `done` that came in this transfer.
        now: seconds.
        """
        self._seen.append((now, received))
        while len(self._seen) > 2 and now - self._seen[1][0] >= WINDOW:
            self._seen.popleft()
        passed, grown = now - self._logged_at, done - self._logged
        if passed < LINE_PAUSE or (passed < LINE_SECONDS and grown < LINE_FRACTION * total):
            return ""
        self._logged_at, self._logged = now, done
        then, before = self._seen[0]
        return progress(done, total, (received - before) / max(now - then, 1e-3))


def progress(done: int, total: int, rate: float) -> str:
    """The text of a line.

    done, total: bytes.
    rate: bytes a second.
    """
    share = 100 * done / total if total else 100
    said = f"{size(done)} of {size(total)} ({share:.0f} %)"
    if rate <= 0:
        return f"{said}, nothing comes at the moment"
    return f"{said}, {size(rate)}/s, {duration((total - done) / rate)} left"


def size(count: float) -> str:
    """`count` bytes as a text for people, such as "1.50 GiB"."""
    if count >= GIB:
        return f"{count / GIB:,.2f} GiB"
    return f"{count / MIB:.1f} MiB" if count >= MIB / 10 else f"{count / 1024:.1f} KiB"


def duration(seconds: float) -> str:
    """`seconds` as a text for people, such as "5 min"."""
    if seconds < 60:
        return f"{max(seconds, 0):.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds // 3600:.0f} h {seconds % 3600 / 60:.0f} min"
