"""What an engine leaves to its successor, in memory that a memory holder (runtime/memory_holder.py)
keeps: its KV pool with the page directory, its weights, and what it has measured.

    model_key      what keys and values depend on beside their token ids
    KeptMemory     an engine's end: finds what was left, gives what is to be left
    KeptPool       a pool's memory, its directory, and the pages that are believed

Knows no plan and no step.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
from collections.abc import Callable, Iterable, MutableMapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

import msgspec
import numpy as np

from pipeinfer.memory.page_directory import PageChains, PageDirectory, directory_bytes
from pipeinfer.runtime.memory_holder import (
    HOLDER_VARIABLE,
    HolderLink,
    Keep,
    Kind,
    dropped_after,
)
from pipeinfer.version import __version__

if TYPE_CHECKING:
    from pipeinfer.engine.device_memory import Allocate, DeviceMemory

log = logging.getLogger(__name__)

POOL, DIRECTORY, SLEEP = "pool", "directory", "sleep"
WEIGHTS, DRAFT_WEIGHTS = "weights", "draft weights"
KEY_CENTERS, GRAPH_SIZES, STEP_COST = "key centers", "graph sizes", "step cost"  # found once
HOLDER_TIMEOUT = 60.0  # seconds that the process before may take to end
HOLDERS_TRIED = 3  # one after the other, where they end before they answer
RECONNECT = 1.0  # seconds between two attempts to reach a holder that has ended
SAMPLES, SAMPLE_BYTES = 64, 4096  # of a file of weights, evenly spaced


Answer = TypeVar("Answer")


class PoolNote(msgspec.Struct, frozen=True):
    """What a pool was made for: pages with the dummy, tokens of a page, bytes; and what its number
    of pages follows from."""

    pages: int
    page_size: int
    size: int
    sized_by: str


def model_key(checkpoints: Sequence[Iterable[Path]], choices: Sequence[object]) -> bytes:
    """[32], a digest of all that keys, values and weights depend on beside token ids: the files of
    configuration and weights of each of `checkpoints`, the model's and then its draft model's, and
    `choices` of number formats, layout and ranks.

    Of files over a megabyte it reads samples, since another fine-tune has other numbers everywhere,
    and the time when they were written, since a part of one may have been replaced.
    """
    whole = blake2b(repr((__version__, *choices)).encode(), digest_size=32)
    for number, files in enumerate(checkpoints):
        for file in sorted(files):
            about = file.stat()
            whole.update(f"{number}:{file.name}:{about.st_size}:".encode())
            with file.open("rb") as source:
                if about.st_size <= 1 << 20:
                    whole.update(source.read())
                    continue
                whole.update(f"{about.st_mtime_ns}:".encode())
                last = about.st_size - SAMPLE_BYTES
                for at in np.linspace(0, last, SAMPLES, dtype=np.int64).tolist():
                    source.seek(at)
                    whole.update(source.read(SAMPLE_BYTES))
    return whole.digest()


@dataclass
class KeptPool:
    """A pool that outlives this process.

    memory: of the pool, zero where nobody wrote.
    directory: what its pages hold.
    found: pages that an earlier process left, and that are believed, by all ranks.
    single_rank: nobody else need agree on what its pages hold.
    """

    memory: DeviceMemory
    directory: PageDirectory
    found: PageChains
    single_rank: bool = True


class KeptMemory:
    """An engine's end of its memory holder. Everything that is kept belongs to a key: what was left
    for another one is given back.

    To a standby, what the engine that serves keeps is lent: it finds weights and what was measured,
    and of pages what their pool was made for. With `promote` it has everything.

    losses: deaths of engines shortly before this one began.
    key: what this process finds and leaves belongs to it (see model_key); b"" before `begin`.
    taken: names of what an engine before has left, and this one uses.
    opened: the pool of this process, once it is there.
    weight_bytes: of this process's weights, which a standby is lent, or on a GPU loads when it is
        promoted.
    """

    def __init__(self, address: str, wait: Callable[[], object] | None = None) -> None:
        """wait: of a standby, returns when it is to serve. Without it, this waits until the process
        that had the memory has ended. Raises OSError when the holder is not there, or that process
        does not end."""
        self._address = address
        self._wait = wait
        self._link: HolderLink | None = None
        self._found: dict[str, tuple[Keep, int | None]] = {}  # None: of pages that are not lent
        self._kept: dict[str, tuple[Keep, int]] = {}
        self.key = b""
        self.losses = 0
        self.taken: list[str] = []
        self.opened: KeptPool | None = None
        self.weight_bytes = 0
        self._has_all = True
        if wait is None:
            self._attach()
        else:
            self._borrow()

    @classmethod
    def from_environment(
        cls, environ: MutableMapping[str, str], wait: Callable[[], object] | None = None
    ) -> KeptMemory | None:
        """The holder that `environ` names, which is taken out of it; None without one, and then
        `wait` has returned. wait: as of KeptMemory."""
        address = environ.pop(HOLDER_VARIABLE, "")
        try:
            if address:
                return cls(address, wait)
        except OSError as error:
            log.warning("memory will not outlive this engine: its memory holder, %s", error)
        if wait is not None:
            wait()
        return None

    def _attach(self) -> None:
        self._link, (kept, descriptors) = self._ask(HolderLink.attach)
        self.losses = kept.losses
        for entry, descriptor in zip(kept.entries, descriptors, strict=True):
            self._found[entry.name] = entry, descriptor

    def _borrow(self) -> None:
        link, (found, descriptors) = self._ask(HolderLink.borrow)
        link.close()
        self._found.update((entry.name, (entry, None)) for entry in found.others)
        for entry, descriptor in zip(found.shared, descriptors, strict=True):
            self._found[entry.name] = entry, descriptor

    def _ask(self, ask: Callable[[HolderLink], Answer]) -> tuple[HolderLink, Answer]:
        """A link, and what the holder answers; the next holder, where one ends meanwhile."""
        for left in reversed(range(HOLDERS_TRIED)):
            link = HolderLink(self._address, HOLDER_TIMEOUT)
            try:
                return link, ask(link)
            except OSError as error:
                link.close()
                if not (left and isinstance(error, ConnectionResetError | BrokenPipeError)):
                    raise
        raise AssertionError("the last one was asked")

    def begin(self, key: bytes) -> None:
        """What this process finds and leaves belongs to `key` (see model_key). That an engine is to
        sleep holds for any model."""
        self.key = key
        found = [entry for entry, _ in self._found.values() if entry.kind != "sleep"]
        self.discard(*(entry.name for entry in found if entry.key != key))

    def belong_to(self, key: bytes) -> None:
        """What it keeps and will keep belongs to `key` from now on."""
        if key != self.key:
            self.key = key
            for name, (entry, descriptor) in self._kept.items():
                self._kept[name] = Keep(name, entry.kind, entry.note, key), descriptor
                self._send(name)

    @property
    def is_standby(self) -> bool:
        """Whether another process serves, to whose pages this one must not come."""
        return self._wait is not None

    def promote(self) -> None:
        """Of a standby, after `begin`: returns when it is to serve, and the process that served has
        ended. Of any other, at once.

        Raises OSError as __init__ does, RuntimeError if something that it was lent is kept no more
        because engines died, or was replaced."""
        if self._wait is None:
            return
        self._wait()
        self._wait = None
        self.discard(*self._found)
        mine, self._kept = self._kept, {}
        self._attach()
        self.begin(self.key)
        for name, (entry, descriptor) in mine.items():
            there, lent = self._let_go(name), name in self.taken
            if lent and there is None and entry.kind in dropped_after(self.losses):
                self._refuse(f"{name}: dropped after {self.losses} losses")
            if lent and there is not None and there != entry:
                self._refuse(f"{name}: replaced since this standby was lent it")
            self._kept[name] = entry, descriptor
            if there is None or not lent:  # of another holder, or the standby's own
                self._send(name)

    def _refuse(self, why: str) -> NoReturn:
        self.close()  # the end of this process is no loss: it never computed anything
        raise RuntimeError(why)

    @property
    def left(self) -> Set[str]:
        """Names of what was left and is not taken."""
        return self._found.keys()

    def note(self, name: str) -> bytes | None:
        """Of what was left under that name; None: nothing was."""
        return self._found[name][0].note if name in self._found else None

    def take(self, name: str) -> int:
        """The descriptor of what was left under that name, the caller's from now on; it goes on
        being kept."""
        entry, descriptor = self._found.pop(name)
        assert descriptor is not None, f"{name} is not lent"
        self._kept[name] = entry, descriptor
        self.taken.append(name)
        return descriptor

    def keep(self, name: str, kind: Kind, note: bytes, descriptor: int) -> None:
        """Leaves the memory of `descriptor`, which stays open as long as this process lives."""
        self._kept[name] = Keep(name, kind, note, self.key), descriptor
        self._send(name)

    def discard(self, *names: str) -> None:
        """Gives back what was left under these names; its memory is free when this returns, unless
        the holder has ended."""
        for name in names:
            self._let_go(name)
            self._drop(name)

    def _let_go(self, name: str) -> Keep | None:
        """What was found under that name, if anything; this process has no descriptor of it."""
        entry, descriptor = self._found.pop(name, (None, None))
        if descriptor is not None:
            os.close(descriptor)
        return entry

    def withdraw(self, *names: str) -> list[Keep]:
        """Keeps no more what it keeps under these names, which is returned; descriptors stay the
        caller's. The holder has closed its own when this returns, unless it has ended."""
        found = [self._kept.pop(name)[0] for name in names if name in self._kept]
        for entry in found:
            self._drop(entry.name)
        self.taken = [name for name in self.taken if name not in names]
        return found

    def _drop(self, name: str) -> None:
        """Not where the holder has ended: the next one is not given it, and may not be there for
        long."""
        if self._link is not None and self.connected:
            try:
                self._link.drop(name)
            except OSError as error:
                log.debug("%s stays with the memory holder: %s", name, error)

    def read(self, name: str, note: bytes) -> bytes | None:
        """What `write` left under that name, with that note."""
        if self.note(name) != note:
            self.discard(*({name} & self.left))
            return None
        descriptor = self.take(name)
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0)

    def write(self, name: str, kind: Kind, note: bytes, data: bytes) -> None:
        """Leaves `data`."""
        descriptor = os.memfd_create("pipeinfer")
        os.pwrite(descriptor, data, 0)
        self.keep(name, kind, note, descriptor)

    def note_sleep(self, level: int, refuses: bool) -> None:
        """A successor is to sleep; see messages.Sleep."""
        self.forget_sleep()
        self.write(SLEEP, "sleep", msgspec.msgpack.encode((level, refuses)), b"")

    def sleep_note(self) -> tuple[int, bool] | None:
        """What the engine before has noted; None: it did not sleep."""
        raw = self.note(SLEEP)
        if raw is None:
            return None
        self._let_go(SLEEP)  # it goes on being kept
        return msgspec.msgpack.decode(raw, type=tuple[int, bool])

    def forget_sleep(self) -> None:
        """A successor is to be awake."""
        kept = self._kept.pop(SLEEP, None)
        if kept is not None:
            os.close(kept[1])
            self._drop(SLEEP)

    def found_pages(self, page_size: int, sized_by: str = "") -> int:
        """Pages, with the dummy, of a pool that was left; 0: there is none of pages of `page_size`
        tokens whose number follows from `sized_by`. What is not of use is given back."""
        note = self._found_note()
        if note is not None and (note.page_size, note.sized_by) == (page_size, sized_by):
            return note.pages
        self.discard(*({POOL, DIRECTORY} & self.left))
        return 0

    def _found_note(self) -> PoolNote | None:
        raw = self.note(POOL)
        if raw is None or raw != self.note(DIRECTORY):
            return None
        try:
            return msgspec.msgpack.decode(raw, type=PoolNote)
        except msgspec.DecodeError:  # of another version
            return None

    def open(
        self, pages: int, page_size: int, size: int, allocate: Allocate, sized_by: str = ""
    ) -> KeptPool:
        """The pool that was left, if it was made for the same, else a new one. `pages`: with the
        dummy; `size`: bytes of the pool; `allocate` makes its memory; `sized_by`: see PoolNote."""
        note = PoolNote(pages, page_size, size, sized_by)
        left = self._found_note() == note
        if not left:
            self.discard(*({POOL, DIRECTORY} & self.left))
        memory = allocate(size, self.take(POOL) if left else None)
        length = directory_bytes(pages, page_size)
        if left:
            descriptor = self.take(DIRECTORY)
        else:
            descriptor = os.memfd_create("pipeinfer-directory")
            os.ftruncate(descriptor, length)
        directory = PageDirectory(memoryview(mmap.mmap(descriptor, length)), pages, page_size)
        found = PageChains.none(page_size)
        if left and directory.belongs_to(self.key):
            found = directory.read().verified()
        else:
            directory.begin(self.key)
        if not left:
            raw = msgspec.msgpack.encode(note)
            self.keep(POOL, "pages", raw, memory.descriptor)
            self.keep(DIRECTORY, "pages", raw, descriptor)
        self.opened = KeptPool(memory, directory, found)
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
        if link is not None and link.fileno() >= 0:  # else the holder has ended
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
        except OSError:
            loop.call_later(RECONNECT, self._reconnect, loop)
        else:
            self._has_all = True
            for name in self._kept:
                self._send(name)
            self.watch(loop)

    def _send(self, name: str) -> None:
        """To the holder; when that has ended, the next one gets it. Of a standby, which has no link
        yet, `promote` does."""
        if self._link is None or self.is_standby:
            return
        try:
            self._link.keep(*self._kept[name])
        except OSError as error:
            self._has_all = False
            log.debug("%s is not kept yet: %s", name, error)


def unverified(pages: int, verified: np.ndarray) -> np.ndarray:
    """int32 [n], those of the pages 1 .. pages - 1 that are not in `verified` int32."""
    others = np.ones(pages, dtype=bool)
    others[verified] = others[0] = False
    return np.flatnonzero(others).astype(np.int32)
