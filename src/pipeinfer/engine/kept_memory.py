"""Memory that an engine leaves to its successor, kept by a memory holder
(runtime/memory_holder.py): the KV pool with the page directory, the weights, and measurements.

    model_key      digest of all that keys and values depend on beside their token ids
    KeptMemory     an engine's end of the link: takes what was left, gives what is to be left
    KeptPool       a pool's memory, its directory, and the pages that are verified

No plan and no step is known here.
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
HOLDERS_TRIED = 3  # holders asked one after the other, if they end before they answer
RECONNECT = 1.0  # seconds between two attempts to reach a holder that has ended
SAMPLES, SAMPLE_BYTES = 64, 4096  # samples of a file of weights, evenly spaced


Answer = TypeVar("Answer")


class PoolNote(msgspec.Struct, frozen=True):
    """The sizes that a pool was made for.

    Attributes:
    - pages: with the dummy page
    - page_size: tokens of a page
    - size: bytes
    - sized_by: settings that the number of pages follows from
    """

    pages: int
    page_size: int
    size: int
    sized_by: str


def model_key(checkpoints: Sequence[Iterable[Path]], choices: Sequence[object]) -> bytes:
    """Returns [32], a digest of all that keys, values and weights depend on beside token ids.

    - checkpoints: files of configuration and weights, of the model and then of its draft model
    - choices: number formats, layout and ranks

    Files over a megabyte are not read completely: samples are, since another fine-tune has other
    numbers everywhere, and the time of the last write, since a part of a file may have been
    replaced.
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

    Attributes:
    - memory: of the pool, zero where no step wrote
    - directory: what the pool's pages hold
    - found: pages that an earlier process left and that all ranks have verified
    - single_rank: whether no other rank must agree on what the pages hold
    """

    memory: DeviceMemory
    directory: PageDirectory
    found: PageChains
    single_rank: bool = True


class KeptMemory:
    """An engine's link to its memory holder. All memory that is kept belongs to a key (see
    model_key): memory that was left for another key is given back.

    A standby is lent the memory of the serving engine: it gets weights and measurements, and of the
    pool only its PoolNote. After `promote` it has everything.

    Attributes:
    - losses: engines that died shortly before this one began
    - key: key of all that this process takes and leaves; b"" before `begin`
    - taken: names of memory that an earlier engine has left and this one uses
    - opened: the pool of this process, once there is one
    - weight_bytes: bytes of this process's weights, which a standby is lent, or on a GPU loads when
      it is promoted
    """

    def __init__(self, address: str, wait: Callable[[], object] | None = None) -> None:
        """Connects to the holder.

        - address: of the holder
        - wait: for a standby: returns when it is to serve. None: no standby; this call waits until
          the process that had the memory has ended

        Raises OSError if there is no holder, or if that process does not end.
        """
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
        """Connects to the holder that `environ` names, and removes the name from `environ`. Returns
        None without a holder; `wait` has returned then. wait: as of KeptMemory.
        """
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
        """Returns a link, and the holder's answer; asks the next holder if one ends meanwhile."""
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
        """Sets the key of all that this process takes and leaves (see model_key), and gives back
        what was left under another key. The note that an engine is to sleep holds for any model.
        """
        self.key = key
        found = [entry for entry, _ in self._found.values() if entry.kind != "sleep"]
        self.discard(*(entry.name for entry in found if entry.key != key))

    def belong_to(self, key: bytes) -> None:
        """Changes the key, also of what this process keeps already."""
        if key != self.key:
            self.key = key
            for name, (entry, descriptor) in self._kept.items():
                self._kept[name] = Keep(name, entry.kind, entry.note, key), descriptor
                self._send(name)

    @property
    def is_standby(self) -> bool:
        """Whether another process serves, whose pages this one must not use."""
        return self._wait is not None

    def promote(self) -> None:
        """For a standby, after `begin`: returns when it is to serve, and the process that served
        has ended. For any other process: returns at once.

        Raises OSError as __init__ does, RuntimeError if memory that was lent is no longer kept
        because engines died, or was replaced.
        """
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
            if there is None or not lent:  # in another holder, or the standby's own
                self._send(name)

    def _refuse(self, why: str) -> NoReturn:
        self.close()  # the end of this process is no loss: it never computed anything
        raise RuntimeError(why)

    @property
    def left(self) -> Set[str]:
        """Names of memory that was left and is not taken."""
        return self._found.keys()

    def note(self, name: str) -> bytes | None:
        """The note of the memory that was left under that name; None: there is none."""
        return self._found[name][0].note if name in self._found else None

    def take(self, name: str) -> int:
        """Takes the memory that was left under that name: returns its descriptor, which the caller
        owns. The holder goes on keeping the memory.
        """
        entry, descriptor = self._found.pop(name)
        assert descriptor is not None, f"{name} is not lent"
        self._kept[name] = entry, descriptor
        self.taken.append(name)
        return descriptor

    def keep(self, name: str, kind: Kind, note: bytes, descriptor: int) -> None:
        """Leaves the memory of `descriptor`, which must stay open as long as this process lives."""
        self._kept[name] = Keep(name, kind, note, self.key), descriptor
        self._send(name)

    def discard(self, *names: str) -> None:
        """Gives back what was left under these names; the memory is free when this returns, unless
        the holder has ended.
        """
        for name in names:
            self._let_go(name)
            self._drop(name)

    def _let_go(self, name: str) -> Keep | None:
        """Closes this process's descriptor of what was left under that name; returns its entry,
        None if there is none.
        """
        entry, descriptor = self._found.pop(name, (None, None))
        if descriptor is not None:
            os.close(descriptor)
        return entry

    def withdraw(self, *names: str) -> list[Keep]:
        """Withdraws what this process keeps under these names from the holder, and returns the
        entries; the descriptors stay the caller's. The holder has closed its own descriptors when
        this returns, unless it has ended.
        """
        found = [self._kept.pop(name)[0] for name in names if name in self._kept]
        for entry in found:
            self._drop(entry.name)
        self.taken = [name for name in self.taken if name not in names]
        return found

    def _drop(self, name: str) -> None:
        """Withdraws the memory under that name from the holder. Does nothing if the holder has
        ended: the next holder does not get the memory, and may not exist for long.
        """
        if self._link is not None and self.connected:
            try:
                self._link.drop(name)
            except OSError as error:
                log.debug("%s stays with the memory holder: %s", name, error)

    def read(self, name: str, note: bytes) -> bytes | None:
        """Returns the data that `write` left under that name with that note; None if there is none.
        Data with another note is given back.
        """
        if self.note(name) != note:
            self.discard(*({name} & self.left))
            return None
        descriptor = self.take(name)
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0)

    def write(self, name: str, kind: Kind, note: bytes, data: bytes) -> None:
        """Leaves `data` in new memory."""
        descriptor = os.memfd_create("pipeinfer")
        os.pwrite(descriptor, data, 0)
        self.keep(name, kind, note, descriptor)

    def note_sleep(self, level: int, refuses: bool) -> None:
        """Leaves a note that a successor is to sleep; see messages.Sleep."""
        self.forget_sleep()
        self.write(SLEEP, "sleep", msgspec.msgpack.encode((level, refuses)), b"")

    def sleep_note(self) -> tuple[int, bool] | None:
        """Takes (level, refuses) from the note of the engine before; None: it did not sleep."""
        raw = self.note(SLEEP)
        if raw is None:
            return None
        self._let_go(SLEEP)  # the holder goes on keeping the note
        return msgspec.msgpack.decode(raw, type=tuple[int, bool])

    def forget_sleep(self) -> None:
        """Withdraws the note: a successor is to be awake."""
        kept = self._kept.pop(SLEEP, None)
        if kept is not None:
            os.close(kept[1])
            self._drop(SLEEP)

    def found_pages(self, page_size: int, sized_by: str = "") -> int:
        """Returns the number of pages, with the dummy, of a pool that was left with pages of
        `page_size` tokens and the same `sized_by`; 0: there is none. A pool of another size is
        given back.
        """
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
        except msgspec.DecodeError:  # a note of another version
            return None

    def open(
        self, pages: int, page_size: int, size: int, allocate: Allocate, sized_by: str = ""
    ) -> KeptPool:
        """Returns the pool that was left, if it was made for the same sizes, else a new one.

        - pages: with the dummy
        - page_size: tokens of a page
        - size: bytes of the pool
        - allocate: makes the pool's memory
        - sized_by: see PoolNote
        """
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
        """Whether a holder has all that this process keeps."""
        return self._link is not None and self._has_all

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts to watch the holder on `loop`: if it ends, the next holder gets this process's
        memory.
        """
        if self._link is not None:
            loop.add_reader(self._link.fileno(), self._lost, loop)

    def close(self) -> None:
        """Closes the link, after the message that this process ends as requested, which is no
        loss.
        """
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
        """Asks the next holder, which may take its time to start. A second question would be wrong:
        the holder would give everything to the first link, and wait for the end of this process.
        """
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
            for descriptor in descriptors:  # from a holder that kept them over
                os.close(descriptor)
        except OSError:
            loop.call_later(RECONNECT, self._reconnect, loop)
        else:
            self._has_all = True
            for name in self._kept:
                self._send(name)
            self.watch(loop)

    def _send(self, name: str) -> None:
        """Sends the memory under that name to the holder; if the holder has ended, the next one
        gets it. A standby has no link yet: `promote` sends.
        """
        if self._link is None or self.is_standby:
            return
        try:
            self._link.keep(*self._kept[name])
        except OSError as error:
            self._has_all = False
            log.debug("%s is not kept yet: %s", name, error)


def unverified(pages: int, verified: np.ndarray) -> np.ndarray:
    """Returns int32 [n], the pages 1 .. pages - 1 that are not in `verified` int32."""
    others = np.ones(pages, dtype=bool)
    others[verified] = others[0] = False
    return np.flatnonzero(others).astype(np.int32)
