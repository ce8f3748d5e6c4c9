"""What an engine leaves to its successor: its KV pool and page directory, in memory that a memory
holder (runtime/memory_holder.py) keeps.

    model_key      what keys and values depend on beside their token ids
    KeptMemory     an engine's end: finds what was left, makes what is to be left
    KeptPool       a pool's bytes, its directory, and the pages that are believed

On a CPU the memory is memfds. Knows no plan and no step.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
from collections.abc import Iterable, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import msgspec
import numpy as np

from pipeinfer.memory.page_directory import PageChains, PageDirectory, directory_bytes
from pipeinfer.runtime.memory_holder import HOLDER_VARIABLE, HolderLink, Keep
from pipeinfer.version import __version__

log = logging.getLogger(__name__)

POOL, DIRECTORY = "pool", "directory"
HOLDER_TIMEOUT = 60.0  # seconds that the process before may take to end
RECONNECT = 1.0  # seconds between two attempts to reach a holder that has ended
SAMPLES, SAMPLE_BYTES = 64, 4096  # of a file of weights, evenly spaced


class PoolNote(msgspec.Struct, frozen=True):
    """What a pool was made for: model_key, pages with the dummy, tokens of a page, bytes."""

    model_key: bytes
    pages: int
    page_size: int
    size: int


def model_key(files: Iterable[Path], choices: Sequence[object]) -> bytes:
    """[32], a digest of all that keys and values depend on beside their token ids: the `files` of
    configuration and weights, and `choices` of number formats, layout and ranks.

    Of files over a megabyte it reads samples: another fine-tune has other numbers everywhere.
    """
    whole = blake2b(repr((__version__, *choices)).encode(), digest_size=32)
    for file in sorted(files):
        size = file.stat().st_size
        whole.update(f"{file.name}:{size}:".encode())
        with file.open("rb") as source:
            if size <= 1 << 20:
                whole.update(source.read())
                continue
            for at in np.linspace(0, size - SAMPLE_BYTES, SAMPLES, dtype=np.int64).tolist():
                source.seek(at)
                whole.update(source.read(SAMPLE_BYTES))
    return whole.digest()


@dataclass
class KeptPool:
    """A pool that outlives this process.

    note: what it was made for.
    memory: uint8 [size], the pool's bytes, zero where nobody wrote.
    directory: what its pages hold.
    found: pages that an earlier process left, and that are believed; None: the pool is new.
    """

    note: PoolNote
    memory: np.ndarray
    directory: PageDirectory
    found: PageChains | None
    _mapped: mmap.mmap

    def zero(self, begin: int, end: int) -> None:
        """Zeroes bytes begin .. end - 1, and gives back the memory that they took."""
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        last = end // mmap.PAGESIZE * mmap.PAGESIZE
        if first >= last:
            self.memory[begin:end] = 0
            return
        self.memory[begin:first] = 0
        self.memory[last:end] = 0
        self._mapped.madvise(mmap.MADV_REMOVE, first, last - first)


class KeptMemory:
    """An engine's end of its memory holder.

    losses: deaths of engines shortly before this one began.
    key: `model_key` of the pool, to be set before the pool is looked for.
    opened: the pool of this process, once it is there.
    """

    def __init__(self, address: str) -> None:
        """Waits until the process that had the memory has ended. Raises OSError when the holder is
        not there, or that process does not end."""
        self._address = address
        self._link: HolderLink | None = HolderLink(address, HOLDER_TIMEOUT)
        kept, descriptors = self._link.attach()
        self.losses = kept.losses
        self._found = {
            entry.name: (entry, descriptor)
            for entry, descriptor in zip(kept.entries, descriptors, strict=True)
        }
        self._kept: dict[str, tuple[Keep, int]] = {}
        self.key = b""
        self.opened: KeptPool | None = None
        self._has_all = False

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str]) -> KeptMemory | None:
        """The holder that `environ` names, which is taken out of it; None without one."""
        address = environ.pop(HOLDER_VARIABLE, "")
        if not address:
            return None
        try:
            return cls(address)
        except OSError as error:
            log.warning("pages will not outlive this engine: its memory holder, %s", error)
            return None

    def found_pages(self, page_size: int) -> int:
        """Pages, with the dummy, of a pool that was left for this key; 0: there is none."""
        note = self._found_note()
        if note is None or (note.model_key, note.page_size) != (self.key, page_size):
            return 0
        return note.pages

    def _found_note(self) -> PoolNote | None:
        if POOL not in self._found or DIRECTORY not in self._found:
            return None
        try:
            return msgspec.msgpack.decode(self._found[POOL][0].note, type=PoolNote)
        except msgspec.DecodeError:  # of another version
            return None

    def open(self, pages: int, page_size: int, size: int) -> KeptPool:
        """The pool that was left, if it was made for the same, else a new one. `pages`: with the
        dummy; `size`: bytes of the pool."""
        note = PoolNote(self.key, pages, page_size, size)
        left = self._found_note() == note
        descriptors = [
            self._found.pop(name)[1] if left else os.memfd_create(f"pipeinfer-{name}")
            for name in (POOL, DIRECTORY)
        ]
        for _, descriptor in self._found.values():
            os.close(descriptor)
        self._found.clear()
        sizes = note.size, directory_bytes(note.pages, note.page_size)
        if not left:
            for descriptor, size in zip(descriptors, sizes, strict=True):
                os.ftruncate(descriptor, size)
        pool, directory_memory = map(mmap.mmap, descriptors, sizes)
        directory = PageDirectory(memoryview(directory_memory), note.pages, note.page_size)
        found = None
        if left and directory.belongs_to(note.model_key):
            found = directory.read().believed()
        else:
            directory.begin(note.model_key)
        raw = msgspec.msgpack.encode(note)
        for name, descriptor in zip((POOL, DIRECTORY), descriptors, strict=True):
            self._kept[name] = Keep(name, "pages", raw), descriptor
        if left:
            self._has_all = True
        else:
            self._keep_all()
        memory = np.frombuffer(pool, np.uint8)
        self.opened = KeptPool(note, memory, directory, found, pool)
        return self.opened

    @property
    def connected(self) -> bool:
        """Whether a holder has what this process keeps."""
        return self._link is not None and self._has_all

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on gives its memory to the next holder when this one has ended."""
        if self._link is not None:
            loop.add_reader(self._link.fileno(), self._lost, loop)

    def close(self) -> None:
        """This process ends in good order, which is no loss."""
        link, self._link = self._link, None
        if link is not None:
            with suppress(RuntimeError):  # no loop runs
                asyncio.get_running_loop().remove_reader(link.fileno())
            with suppress(OSError):
                link.leaving()
            link.close()

    def _lost(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._link is None:
            return
        loop.remove_reader(self._link.fileno())
        self._link.close()
        self._has_all = False
        log.warning("the memory holder has ended; its memory goes to the next one")
        loop.call_later(RECONNECT, self._reconnect, loop)

    def _reconnect(self, loop: asyncio.AbstractEventLoop) -> None:
        """Asks the next holder, which may take its time to start. Asked twice, it would give
        everything to the first link, and wait for the end of this process."""
        if self._link is None:
            return
        try:
            self._link = HolderLink(self._address)
            self._link.ask()
        except OSError:
            loop.call_later(RECONNECT, self._reconnect, loop)
        else:
            loop.add_reader(self._link.fileno(), self._answered, loop)

    def _answered(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._link is None:
            return
        loop.remove_reader(self._link.fileno())
        try:
            _, descriptors = self._link.answer()
            for descriptor in descriptors:  # of a holder that kept them over
                os.close(descriptor)
            self._keep_all()
        except OSError:
            loop.call_later(RECONNECT, self._reconnect, loop)
        else:
            self.watch(loop)

    def _keep_all(self) -> None:
        assert self._link is not None
        for entry, descriptor in self._kept.values():
            self._link.keep(entry, descriptor)
        self._has_all = True


def unbelieved_runs(pages: int, believed: np.ndarray) -> list[tuple[int, int]]:
    """(begin, end) of each run of the pages 1 .. pages - 1 that are not in `believed` int32 [n]."""
    others = np.ones(pages + 1, dtype=np.int8)
    others[believed] = others[0] = others[pages] = 0
    edges = np.flatnonzero(np.diff(others, prepend=0))
    return [(int(begin), int(end)) for begin, end in zip(edges[::2], edges[1::2], strict=True)]
