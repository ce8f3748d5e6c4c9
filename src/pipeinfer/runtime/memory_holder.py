"""The memory holder: a small process that keeps descriptors of memory which outlives its engine.

    MemoryHolder: the process        HolderLink: an engine's end of the socket
    HolderState: who may have what           HolderProcess: a holder as a supervisor's child

Memory lives as long as a descriptor of it or a mapping does: memfds on a CPU, memory of cuMemCreate
on a GPU. The holder keeps descriptors and nothing else; it imports neither CUDA nor torch, and maps
nothing. One holder serves one rank. What it keeps is handed to one process at a time, and to the
next one only when the process before has ended: a dying process' kernels may still write.

Its own death does no harm: an engine goes on with its mappings, and gives its descriptors to the
next holder.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import msgspec

from pipeinfer.runtime.child import ParentWatch

if TYPE_CHECKING:  # a holder needs none of it
    from pipeinfer.settings import Settings

log = logging.getLogger(__name__)

HOLDER_VARIABLE = "PIPEINFER_MEMORY_HOLDER"  # in the environment of an engine: its holder's address
SO_PEERPIDFD = 77  # of asm-generic/socket.h, Linux 6.5
LOSS_WINDOW = 60.0  # seconds: so soon after a death another one is its second loss
RESTART_SECONDS = 0.5  # between the end of a holder and the start of the next one
MAX_MESSAGE = 64 << 10  # bytes
MAX_DESCRIPTORS = 64  # of one message

Kind = Literal["pages", "weights", "measured"]
# What may have made an engine die is dropped first: (losses, what is kept no more).
DROPPED: tuple[tuple[int, frozenset[Kind]], ...] = (
    (2, frozenset({"pages"})),
    (3, frozenset({"pages", "weights", "measured"})),
)


class Attach(msgspec.Struct, tag=True):
    """Engine to holder: hand over what is kept when nobody else writes it."""

    is_answered: ClassVar[bool] = False

    def apply(self, state: HolderState, number: int, _descriptors: list[int]) -> Sequence[int]:
        """Changes the state, as process `number` asks; returns the descriptors to be closed.

        descriptors: that came with the message; those that are kept are taken out.
        """
        state.attach(number)
        return ()


class Keep(msgspec.Struct, tag=True):
    """Engine to holder, with one descriptor: keep it, instead of what has that name.

    name: of the memory. kind: what it is for. note, key: bytes that are handed over with it: what
    it holds, and what it belongs to.
    """

    is_answered: ClassVar[bool] = False

    name: str
    kind: Kind
    note: bytes = b""
    key: bytes = b""

    def apply(self, state: HolderState, number: int, descriptors: list[int]) -> Sequence[int]:
        """See Attach."""
        return state.keep(number, self, descriptors.pop()) if len(descriptors) == 1 else ()


class Drop(msgspec.Struct, tag=True):
    """Engine to holder: close what has that name, and answer Dropped."""

    is_answered: ClassVar[bool] = True

    name: str

    def apply(self, state: HolderState, number: int, _descriptors: list[int]) -> Sequence[int]:
        """See Attach."""
        return state.drop(number, self.name)


class Leaving(msgspec.Struct, tag=True):
    """Engine to holder: it ends in good order, so that its end is no loss."""

    is_answered: ClassVar[bool] = False

    def apply(self, state: HolderState, number: int, _descriptors: list[int]) -> Sequence[int]:
        """See Attach."""
        state.leaving(number)
        return ()


class Attached(msgspec.Struct, tag=True):
    """Holder to engine, with a descriptor for each of `entries`.

    entries: what is kept. losses: deaths of engines, each within LOSS_WINDOW of the one before.
    """

    entries: tuple[Keep, ...]
    losses: int


class Dropped(msgspec.Struct, tag=True):
    """Holder to engine: what a Drop named is closed."""


_requests = msgspec.msgpack.Decoder(Attach | Keep | Drop | Leaving)
_attached = msgspec.msgpack.Decoder(Attached)
_dropped = msgspec.msgpack.Decoder(Dropped)


@dataclass
class HolderState:
    """Who is attached, and what is kept; knows no socket and no clock.

    entries: by name, what is kept and its descriptor.
    owner: the process that was handed what is kept; None: nobody writes it.
    waiting: processes that want it, the longest waiting one first.
    """

    entries: dict[str, tuple[Keep, int]] = field(default_factory=dict[str, tuple[Keep, int]])
    owner: int | None = None
    waiting: list[int] = field(default_factory=list[int])
    _orderly: set[int] = field(default_factory=set[int])
    _losses: int = 0
    _last_loss: float = float("-inf")

    def attach(self, process: int) -> None:
        """`process`, a number that is never given twice, wants what is kept."""
        if process != self.owner and process not in self.waiting:
            self.waiting.append(process)

    def keep(self, process: int, entry: Keep, descriptor: int) -> list[int]:
        """Takes a descriptor of the owner; returns those to be closed: the one that had its name,
        or the new one where `process` is not the owner."""
        if process != self.owner:
            return [descriptor]
        before = self.entries.pop(entry.name, None)
        self.entries[entry.name] = entry, descriptor
        return [] if before is None else [before[1]]

    def drop(self, process: int, name: str) -> list[int]:
        """Returns the descriptor to be closed."""
        if process != self.owner or name not in self.entries:
            return []
        return [self.entries.pop(name)[1]]

    def silent(self, process: int) -> None:
        """`process` says and hears no more; what it owns stays its own until it has ended."""
        if process in self.waiting:
            self.waiting.remove(process)

    def leaving(self, process: int) -> None:
        """The end of `process` will be no loss."""
        self._orderly.add(process)

    def ended(self, process: int, now: float) -> None:
        """`process` has ended, with all that it had under way."""
        self.silent(process)
        if process == self.owner:
            self.owner = None
            if process not in self._orderly:
                again = now - self._last_loss < LOSS_WINDOW
                self._losses, self._last_loss = self._losses + 1 if again else 1, now
        self._orderly.discard(process)

    def hand_over(self, now: float) -> tuple[int, Attached, list[int], list[int]] | None:
        """The process that gets what is kept, the message, its descriptors, and those that are to
        be closed because of losses; None while nobody may have it, or wants it."""
        if self.owner is not None or not self.waiting:
            return None
        self.owner = self.waiting.pop(0)
        losses = self._losses if now - self._last_loss < LOSS_WINDOW else 0
        dropped = {kind for least, kinds in DROPPED if losses >= least for kind in kinds}
        lost = [name for name, (entry, _) in self.entries.items() if entry.kind in dropped]
        closed = [self.entries.pop(name)[1] for name in lost]
        entries = tuple(entry for entry, _ in self.entries.values())
        descriptors = [descriptor for _, descriptor in self.entries.values()]
        return self.owner, Attached(entries, losses), descriptors, closed


class MemoryHolder:
    """Serves one rank's engines on a listening socket, until `stop` or until its parent ends."""

    def __init__(
        self, listener: socket.socket, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """listener: AF_UNIX, SOCK_SEQPACKET."""
        self._listener = listener
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._state = HolderState()
        self._links: dict[int, socket.socket] = {}  # by the process's number
        self._pidfds: dict[int, int] = {}
        self._next = 0
        self._stopping = False
        self._wakeup = os.eventfd(0)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wakeup, selectors.EVENT_READ, lambda: None)

    def run(self) -> None:
        """Returns after `stop`, with all descriptors closed."""
        try:
            while not self._stopping:
                for key, _ in self._selector.select():
                    key.data()
                self._hand_over()
        finally:
            for link in self._links.values():
                link.close()
            _close([*self._pidfds.values(), *(fd for _, fd in self._state.entries.values())])
            self._selector.close()
            os.close(self._wakeup)

    def stop(self) -> None:
        """Ends `run`; may be called in a signal handler and on any thread."""
        self._stopping = True
        os.eventfd_write(self._wakeup, 1)

    def _accept(self) -> None:
        with suppress(BlockingIOError):
            link, _ = self._listener.accept()
            pid, user, _group = struct.unpack(
                "3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            )
            pidfd = _pidfd_of(link, pid) if user == os.geteuid() else None
            if pidfd is None:
                log.warning("process %d of user %d is refused", pid, user)
                link.close()
                return
            number, self._next = self._next, self._next + 1
            link.setblocking(False)
            self._links[number], self._pidfds[number] = link, pidfd
            self._selector.register(link, selectors.EVENT_READ, lambda: self._read(number))
            self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._ended(number))

    def _read(self, number: int) -> bool:
        """Takes one message; whether there was one."""
        link = self._links[number]
        try:
            raw, descriptors, flags, _ = socket.recv_fds(link, MAX_MESSAGE, MAX_DESCRIPTORS)
        except BlockingIOError:
            return False
        except OSError as error:
            log.debug("process %d: %s", number, error)
            raw, descriptors, flags = b"", [], 0
        if not raw:
            self._state.silent(number)
            self._forget(link)
            return False
        try:
            message = _requests.decode(raw)
        except msgspec.DecodeError as error:
            log.warning("a message of %d bytes is dropped: %s", len(raw), error)
            _close(descriptors)
            return True
        if flags & socket.MSG_CTRUNC:  # some did not fit: which ones nobody knows
            _close(descriptors)
            descriptors = []
        _close(message.apply(self._state, number, descriptors))
        _close(descriptors)
        if message.is_answered:
            with suppress(OSError):  # it has ended, which its pidfd will say
                link.send(msgspec.msgpack.encode(Dropped()))
        return True

    def _ended(self, number: int) -> None:
        while self._read(number):  # what it sent before
            continue
        self._state.ended(number, self._clock())
        link, pidfd = self._links.pop(number), self._pidfds.pop(number)
        self._forget(link)
        self._forget(pidfd)
        link.close()
        os.close(pidfd)

    def _forget(self, source: socket.socket | int) -> None:
        """Waits for nothing of `source` any more."""
        with suppress(KeyError):
            self._selector.unregister(source)

    def _hand_over(self) -> None:
        found = self._state.hand_over(self._clock())
        if found is None:
            return
        number, message, descriptors, closed = found
        _close(closed)
        with suppress(OSError):  # it has ended, which its pidfd will say
            socket.send_fds(self._links[number], [msgspec.msgpack.encode(message)], descriptors)


def _pidfd_of(link: socket.socket, pid: int) -> int | None:
    """A descriptor of the process at the other end, which becomes readable when it has ended; None
    where there is none, such as for a process of another PID namespace."""
    try:
        return link.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError:
        try:
            return os.pidfd_open(pid) if pid > 0 else None
        except OSError:
            return None


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class HolderLink:
    """An engine's end. Every method raises OSError when the holder is gone."""

    def __init__(self, address: str, timeout: float | None = None) -> None:
        """address: a path, or "@" and a name of the abstract namespace. timeout: seconds that an
        answer may take; None: as long as it takes."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(timeout)
        try:
            self._socket.connect(socket_address(address))
        except OSError:
            self._socket.close()
            raise

    def attach(self) -> tuple[Attached, list[int]]:
        """What is kept, and its descriptors, which are the caller's; waits until the process that
        had it before has ended."""
        self.ask()
        return self.answer()

    def ask(self) -> None:
        """Asks for what is kept; `fileno` is readable when `answer` has come."""
        self._send(Attach())

    def answer(self) -> tuple[Attached, list[int]]:
        """What `attach` returns, after `ask`."""
        raw, descriptors = self._receive()
        answer = _attached.decode(raw)
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        return answer, descriptors

    def keep(self, entry: Keep, descriptor: int) -> None:
        """The holder gets a descriptor of its own of the same memory."""
        socket.send_fds(self._socket, [msgspec.msgpack.encode(entry)], [descriptor])

    def drop(self, name: str) -> None:
        """Returns when the holder has closed its descriptor."""
        self._send(Drop(name))
        _dropped.decode(self._receive()[0])

    def leaving(self) -> None:
        """To be called before an end in good order."""
        self._send(Leaving())

    def fileno(self) -> int:
        """Readable when the holder has ended."""
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def _receive(self) -> tuple[bytes, list[int]]:
        raw, descriptors, _, _ = socket.recv_fds(self._socket, MAX_MESSAGE, MAX_DESCRIPTORS)
        if not raw:
            raise ConnectionResetError("the memory holder has ended")
        return raw, descriptors

    def _send(self, message: msgspec.Struct) -> None:
        self._socket.send(msgspec.msgpack.encode(message))


def socket_address(address: str) -> str:
    """As the socket module takes it."""
    return "\0" + address[1:] if address.startswith("@") else address


def listen(address: str) -> socket.socket:
    """A listening socket for a MemoryHolder; a file that an earlier one left is replaced."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not address.startswith("@"):
        with suppress(FileNotFoundError):
            Path(address).unlink()
    made.bind(socket_address(address))
    if not address.startswith("@"):
        Path(address).chmod(0o600)
    made.listen()
    return made


def keeps_memory(settings: Settings) -> bool:
    """Whether an engine with these settings may leave its memory to a successor: not within one
    process."""
    return not (settings.no_keep_memory or settings.in_process)


class HolderProcess:
    """A memory holder as a child of this process, which is started again when it ends.

    address: of its socket, which stays the same.
    """

    def __init__(self) -> None:
        self.address = f"@pipeinfer-{secrets.token_hex(16)}"
        self._listener = listen(self.address)
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None

    def start(self) -> None:
        """To be called once, on the running loop. Engines may connect at once, and wait until the
        holder runs."""
        self._watch = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Ends the holder, and with it what it kept."""
        if self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        self._listener.close()

    async def _run(self) -> None:
        number = self._listener.fileno()
        while True:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "pipeinfer.runtime.memory_holder", "--fd", str(number),
                    stdin=asyncio.subprocess.DEVNULL, pass_fds=(number,), start_new_session=True,
                )  # fmt: skip
                code = await self._process.wait()
                log.warning("a memory holder ended (code %d) and is started again", code)
            except OSError as error:
                log.warning("no memory holder can be started: %s", error)
            await asyncio.sleep(RESTART_SECONDS)


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m pipeinfer.runtime.memory_holder ADDRESS`, or `--fd N` for a socket that a parent
    opened; ends with its parent, or on SIGTERM."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    inherited = words[0] == "--fd"
    listener = socket.socket(fileno=int(words[1])) if inherited else listen(words[0])
    holder = MemoryHolder(listener)
    signal.signal(signal.SIGTERM, lambda *_: holder.stop())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if inherited:
        ParentWatch().set_stop(holder.stop)
    holder.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
