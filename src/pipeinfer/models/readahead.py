"""Brings files into the page cache a little before they are needed: one file ahead, on a thread.

Knows files and bytes; nothing of what is in them. What is read here is not kept: the kernel has it,
gives it to whoever maps the file, and takes it back when memory is short.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

log = logging.getLogger(__name__)

BUFFER_BYTES = 8 * 2**20  # all that this ever holds
AHEAD = 1  # files beyond the one in use


class ReadAhead:
    """`files` in the order in which they will be used; a context manager.

    The first file is read at once, file i + 1 from the moment that file i is `reached`, never more.
    A file that cannot be read is left to its user, who gets the error. `done` lists what was read
    to its end, in order.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = list(files)
        self._in_use = -1
        self._over = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="read ahead", daemon=True)
        self.done: list[Path] = []

    def __enter__(self) -> ReadAhead:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._thread.join()

    def reached(self, file: Path) -> None:
        """`file` is in use from now on; ValueError if it is none of the files."""
        with self._changed:
            self._in_use = self._files.index(file)
            self._changed.notify_all()

    def wait_until_read(self, count: int, seconds: float) -> bool:
        """Whether `count` files are read within that time."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self.done) >= count, seconds)

    def _work(self) -> None:
        buffer = bytearray(BUFFER_BYTES)
        for index, file in enumerate(self._files):
            with self._changed:
                while not self._over and index > self._in_use + AHEAD:
                    self._changed.wait()
            try:
                whole = self._read(file, memoryview(buffer))
            except OSError as error:
                log.warning("cannot read %s ahead of its use: %s", file, error)
                return
            with self._changed:
                if not whole:
                    return
                self.done.append(file)
                self._changed.notify_all()

    def _read(self, file: Path, buffer: memoryview) -> bool:
        """Whether the file was read to its end."""
        descriptor = os.open(file, os.O_RDONLY)
        try:
            while not self._over:
                if not os.readv(descriptor, [buffer]):
                    return True
        finally:
            os.close(descriptor)
        return False
