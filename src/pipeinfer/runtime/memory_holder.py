"""The memory holder: a small process that keeps descriptors of memory which outlives its engine.

- MemoryHolder: the process
- HolderState: which process owns the memory, and which wait for it
- HolderLink: an engine's end of the socket
- HolderProcess: a server's end: a holder as its child, which is started again when it ends
- KeptHolders: holders that outlive their server, for the next server of the same address

Memory lives as long as a descriptor of it or a mapping does: memfds on a CPU, memory of cuMemCreate
on a GPU. The holder keeps descriptors and nothing else; it imports neither CUDA nor torch, and maps
nothing. One holder serves one rank. It hands the memory to one process at a time, and to the next
one only when the process before has ended: a dying process's kernels may still write. Memory that
is never written once it is kept (SHAREABLE) is shared with standbys meanwhile.

The death of a holder does no harm: an engine goes on with its mappings, and gives its descriptors
to the next holder.

A server that keeps memory when it stops has a folder, whose name follows from its address. Its
holders listen there, and go on when it has ended. The next server finds them, and its own holders
take over their memory; engines give back memory that belongs to another model (kept_memory.py).
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import fcntl
import logging
import os
import secrets
import selectors
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import msgspec

from pipeinfer.processes import peer_of
from pipeinfer.runtime.child import MISCONFIGURED, ParentWatch
from pipeinfer.settings import PREFIX, ConfigurationError, Settings
from pipeinfer.topology import Topology, deployed_topology

log = logging.getLogger(__name__)

# In the environment of an engine: its holder's address; for an engine that claims its place, the
# folder of the places, where holders may listen, too.
HOLDER_VARIABLE = "PIPEINFER_MEMORY_HOLDER"
SO_PEERPIDFD = 77  # of asm-generic/socket.h, Linux 6.5
LOSS_WINDOW = 60.0  # seconds after a death within which the next death counts as a further loss
STARTING_SECONDS = 10.0  # seconds that an engine waits for a holder that was started just before it
STARTING_CHECK = 0.05  # seconds between two looks
HAND_OVER_SECONDS = 30.0  # seconds that an earlier server's engine may take to end
MAX_MESSAGE = 64 << 10  # bytes
MAX_DESCRIPTORS = 64  # of one message

Kind = Literal["pages", "weights", "measured", "sleep"]
# (losses, kinds dropped after so many): memory that may have made an engine die is dropped first.
DROPPED: tuple[tuple[int, frozenset[Kind]], ...] = (
    (2, frozenset({"pages"})),
    (3, frozenset({"pages", "weights", "measured"})),
)
# Kinds of memory that are never written once they are kept, so that standbys may read them while
# the engine runs.
SHAREABLE: frozenset[Kind] = frozenset({"weights", "measured"})


def dropped_after(losses: int) -> Set[Kind]:
    """The kinds of memory that are dropped after `losses` losses."""
    return {kind for least, kinds in DROPPED if losses >= least for kind in kinds}


class HolderRequest(msgspec.Struct, tag=True):
    """A message to a holder."""

    def apply(self, _state: HolderState, _number: int, _descriptors: list[int]) -> Sequence[int]:
        """Changes the state, as process `number` asks; returns the descriptors to be closed.

        - descriptors: came with the message; descriptors that the state keeps are taken out
        """
        return ()

    def answer(self, _state: HolderState) -> tuple[msgspec.Struct, list[int]] | None:
        """The message that is sent back at once, and its descriptors; None: there is no answer."""
        return None


class Attach(HolderRequest, tag=True):
    """Engine to holder: hand over the memory when no other process writes it."""

    def apply(self, state: HolderState, number: int, _descriptors: list[int]) -> Sequence[int]:
        """Adds the process to the waiting ones."""
        state.attach(number)
        return ()


class Borrow(HolderRequest, tag=True):
    """Standby to holder: answer Borrowed. The owner of the memory stays the same."""

    def answer(self, state: HolderState) -> tuple[msgspec.Struct, list[int]]:
        """The Borrowed message, and the descriptors of the shared memory."""
        return state.borrow()


class Keep(HolderRequest, tag=True):
    """Engine to holder, with one descriptor: keep it, in place of the memory of that name.

    Attributes:
    - name: of the memory
    - kind: purpose of the memory
    - note, key: bytes that are handed over with it: a description of its contents, and what it
      belongs to, such as a model
    """

    name: str
    kind: Kind
    note: bytes = b""
    key: bytes = b""

    def apply(self, state: HolderState, number: int, descriptors: list[int]) -> Sequence[int]:
        """Keeps the descriptor, if there is exactly one."""
        return state.keep(number, self, descriptors.pop()) if len(descriptors) == 1 else ()


class Drop(HolderRequest, tag=True):
    """Engine to holder: close the memory of that name, and answer Dropped."""

    name: str

    def apply(self, state: HolderState, number: int, _descriptors: list[int]) -> Sequence[int]:
        """Drops the memory; returns its descriptor."""
        return state.drop(number, self.name)

    def answer(self, _state: HolderState) -> tuple[msgspec.Struct, list[int]]:
        """The Dropped message."""
        return Dropped(), []


class Leaving(HolderRequest, tag=True):
    """Engine to holder: the engine ends in good order, so that its end is no loss."""

    def apply(self, state: HolderState, number: int, _descriptors: list[int]) -> Sequence[int]:
        """Notes that the end of the process will be no loss."""
        state.leaving(number)
        return ()


class Finish(HolderRequest, tag="End"):
    """To a holder whose server has ended, from the next server: close all, and end."""

    def apply(self, state: HolderState, _number: int, _descriptors: list[int]) -> Sequence[int]:
        """Drops all memory; returns its descriptors."""
        return state.end()


class Attached(msgspec.Struct, tag=True):
    """Holder to engine, with a descriptor for each of `entries`.

    Attributes:
    - entries: the memory that is kept
    - losses: deaths of engines, each within LOSS_WINDOW of the one before
    """

    entries: tuple[Keep, ...]
    losses: int


class Borrowed(msgspec.Struct, tag=True):
    """Holder to standby, with a descriptor for each of `shared`.

    Attributes:
    - shared: memory that is kept and SHAREABLE
    - others: the other memory that is kept
    """

    shared: tuple[Keep, ...]
    others: tuple[Keep, ...]


class Dropped(msgspec.Struct, tag=True):
    """Holder to engine: the memory of a Drop is closed."""


_requests = msgspec.msgpack.Decoder(Attach | Borrow | Keep | Drop | Leaving | Finish)
_attached = msgspec.msgpack.Decoder(Attached)
_borrowed = msgspec.msgpack.Decoder(Borrowed)
_dropped = msgspec.msgpack.Decoder(Dropped)


@dataclass
class HolderState:
    """The attached processes, and the memory that is kept; knows no socket and no clock.

    Attributes:
    - entries: by name, the memory that is kept and its descriptor
    - owner: the process that was handed the memory; None: no process writes it
    - waiting: processes that want the memory, the longest waiting one first
    - over: no memory is kept any more
    """

    entries: dict[str, tuple[Keep, int]] = field(default_factory=dict[str, tuple[Keep, int]])
    owner: int | None = None
    waiting: list[int] = field(default_factory=list[int])
    over: bool = False
    _orderly: set[int] = field(default_factory=set[int])
    _losses: int = 0
    _last_loss: float = float("-inf")

    def attach(self, process: int) -> None:
        """Notes that `process`, a number that is never given twice, wants the memory."""
        if process != self.owner and process not in self.waiting:
            self.waiting.append(process)

    def keep(self, process: int, entry: Keep, descriptor: int) -> list[int]:
        """Takes a descriptor of the owner. Returns descriptors to be closed: the one that had its
        name, or the new one if `process` is not the owner."""
        if process != self.owner:
            return [descriptor]
        before = self.entries.pop(entry.name, None)
        self.entries[entry.name] = entry, descriptor
        return [] if before is None else [before[1]]

    def drop(self, process: int, name: str) -> list[int]:
        """Drops the memory of that name; returns the descriptors to be closed."""
        if process != self.owner or name not in self.entries:
            return []
        return [self.entries.pop(name)[1]]

    def borrow(self) -> tuple[Borrowed, list[int]]:
        """The answer to Borrow, and the descriptors of the shared memory."""
        kept = list(self.entries.values())
        shared = [(entry, descriptor) for entry, descriptor in kept if entry.kind in SHAREABLE]
        others = tuple(entry for entry, _ in kept if entry.kind not in SHAREABLE)
        message = Borrowed(tuple(entry for entry, _ in shared), others)
        return message, [descriptor for _, descriptor in shared]

    def silent(self, process: int) -> None:
        """Notes that the link to `process` is closed; memory that it owns stays its own until it
        has ended."""
        if process in self.waiting:
            self.waiting.remove(process)

    def leaving(self, process: int) -> None:
        """Notes that the end of `process` will be no loss."""
        self._orderly.add(process)

    def ended(self, process: int, now: float) -> None:
        """Notes that `process` has ended, with all its work in flight."""
        self.silent(process)
        if process == self.owner:
            self.owner = None
            if process not in self._orderly:
                again = now - self._last_loss < LOSS_WINDOW
                self._losses, self._last_loss = self._losses + 1 if again else 1, now
        self._orderly.discard(process)

    def end(self) -> list[int]:
        """Drops all memory; returns the descriptors to be closed."""
        self.over = True
        closed = [descriptor for _, descriptor in self.entries.values()]
        self.entries.clear()
        return closed

    def take_over(self, kept: Attached, descriptors: Sequence[int], now: float) -> list[int]:
        """Begins with the memory that an earlier holder kept, and with its losses; returns the
        descriptors to be closed. A server that was asleep is awake when it is started again."""
        found = list(zip(kept.entries, descriptors, strict=True))
        self.entries.update({one[0].name: one for one in found if one[0].kind != "sleep"})
        if kept.losses:
            self._losses, self._last_loss = kept.losses, now
        return [descriptor for entry, descriptor in found if entry.kind == "sleep"]

    def hand_over(self, now: float) -> tuple[int, Attached, list[int], list[int]] | None:
        """The process that gets the memory, the message, its descriptors, and those that are to be
        closed because of losses; None while an owner runs, or no process waits."""
        if self.owner is not None or not self.waiting:
            return None
        self.owner = self.waiting.pop(0)
        losses = self._losses if now - self._last_loss < LOSS_WINDOW else 0
        dropped = dropped_after(losses)
        lost = [name for name, (entry, _) in self.entries.items() if entry.kind in dropped]
        closed = [self.entries.pop(name)[1] for name in lost]
        entries = tuple(entry for entry, _ in self.entries.values())
        descriptors = [descriptor for _, descriptor in self.entries.values()]
        return self.owner, Attached(entries, losses), descriptors, closed


class MemoryHolder:
    """Serves one rank's engines on a listening socket, until `stop`, or until `patience` seconds
    after its server and the last engine have ended."""

    def __init__(
        self,
        listener: socket.socket,
        clock: Callable[[], float] = time.monotonic,
        patience: float = 0.0,
        server: int | None = None,
    ) -> None:
        """Begins without memory.

        - listener: AF_UNIX, SOCK_SEQPACKET
        - server: a pipe that the server closes at its end; None: `run` lasts until `stop`
        """
        self._listener = listener
        self._clock = clock
        self._patience = patience
        self._has_server = True
        self._alone_since: float | None = None
        self._selector = selectors.DefaultSelector()
        self._state = HolderState()
        self._links: dict[int, socket.socket] = {}  # by the process's number
        self._pidfds: dict[int, int] = {}
        self._next = 0
        self._stopping = False
        self._wakeup = os.eventfd(0)  # open as long as the process lives: `stop` comes at any time
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wakeup, selectors.EVENT_READ, lambda: None)
        if server is not None:
            self._selector.register(
                server, selectors.EVENT_READ, lambda: self._server_ended(server)
            )

    def run(self) -> None:
        """Serves; returns with all descriptors closed."""
        try:
            while not self._stopping and not self._state.over:
                left = self._seconds_left()
                if left is not None and left <= 0:
                    break
                for key, _ in self._selector.select(left):
                    key.data()
                self._hand_over()
        finally:
            _close(self._state.end())
            for link in self._links.values():
                link.close()  # a server that waits for that finds the memory free
            _close([*self._pidfds.values()])
            self._selector.close()

    def take_over(self, address: str) -> None:
        """Takes the memory of the holder at `address`, when its owner has ended; that holder ends.
        To be called before `run`. Raises OSError if the holder is not there, or its owner does not
        end."""
        link = HolderLink(address, HAND_OVER_SECONDS)
        try:
            _close(self._state.take_over(*link.attach(), self._clock()))
        finally:
            link.end()

    def stop(self) -> None:
        """Ends `run`; may be called in a signal handler and on any thread."""
        self._stopping = True
        os.eventfd_write(self._wakeup, 1)

    def _server_ended(self, server: int) -> None:
        self._forget(server)
        self._has_server = False

    def _seconds_left(self) -> float | None:
        """Seconds until the holder ends; None while a server or an engine is there."""
        if self._has_server or self._state.owner is not None:
            self._alone_since = None
            return None
        if self._alone_since is None:
            self._alone_since = self._clock()
        return self._alone_since + self._patience - self._clock()

    def _accept(self) -> None:
        with suppress(BlockingIOError):
            link, _ = self._listener.accept()
            pid, user = peer_of(link)
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
        if flags & socket.MSG_CTRUNC:  # some did not fit, and it is unknown which ones
            _close(descriptors)
            descriptors = []
        _close(message.apply(self._state, number, descriptors))
        _close(descriptors)
        answer = message.answer(self._state)
        if answer is not None:
            with suppress(OSError):  # it has ended, which its pidfd will say
                _send(link, *answer)
        return True

    def _ended(self, number: int) -> None:
        while self._read(number):  # messages that it sent before
            continue
        self._state.ended(number, self._clock())
        link, pidfd = self._links.pop(number), self._pidfds.pop(number)
        self._forget(link)
        self._forget(pidfd)
        link.close()
        os.close(pidfd)

    def _forget(self, source: socket.socket | int) -> None:
        """Stops waiting for `source`."""
        with suppress(KeyError):
            self._selector.unregister(source)

    def _hand_over(self) -> None:
        found = self._state.hand_over(self._clock())
        if found is None:
            return
        number, message, descriptors, closed = found
        _close(closed)
        with suppress(OSError):  # it has ended, which its pidfd will say
            _send(self._links[number], message, descriptors)


def _send(link: socket.socket, message: msgspec.Struct, descriptors: Sequence[int]) -> None:
    socket.send_fds(link, [msgspec.msgpack.encode(message)], descriptors)


def _pidfd_of(link: socket.socket, pid: int) -> int | None:
    """A descriptor of the process at the other end, which becomes readable when the process has
    ended; None if there is none, such as before Linux 6.5 for a process of another PID
    namespace."""
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
    """An engine's end of the socket. Every method raises OSError when the holder is gone."""

    def __init__(self, address: str, timeout: float | None = None) -> None:
        """Connects to a holder.

        - address: a path, or "@" and a name of the abstract namespace
        - timeout: seconds that an answer may take; None: no limit
        """
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(timeout)
        try:
            self._socket.connect(socket_address(address))
            user = peer_of(self._socket)[1]
            if user != os.geteuid():
                raise PermissionError(f"the memory holder at {address} is of user {user}")
        except OSError:
            self._socket.close()
            raise

    def attach(self) -> tuple[Attached, list[int]]:
        """The memory that is kept, and its descriptors, which are the caller's; waits until the
        previous owner has ended."""
        self.ask()
        return self.answer()

    def ask(self) -> None:
        """Sends Attach; `fileno` is readable when the answer has come."""
        self._send(Attach())

    def answer(self) -> tuple[Attached, list[int]]:
        """The result of `attach`, after `ask`."""
        raw, descriptors = self._receive()
        return _attached.decode(raw), descriptors

    def borrow(self) -> tuple[Borrowed, list[int]]:
        """Returns at once the list of the memory that the serving process keeps, and descriptors of
        the part that is shared, which are the caller's."""
        self._send(Borrow())
        raw, descriptors = self._receive()
        return _borrowed.decode(raw), descriptors

    def keep(self, entry: Keep, descriptor: int) -> None:
        """Gives the holder a descriptor of its own of the same memory."""
        socket.send_fds(self._socket, [msgspec.msgpack.encode(entry)], [descriptor])

    def drop(self, name: str) -> None:
        """Has the holder drop the memory `name`; returns when it has closed its descriptor."""
        self._send(Drop(name))
        _dropped.decode(self._receive()[0])

    def leaving(self) -> None:
        """Announces an end in good order, before it."""
        self._send(Leaving())

    def end(self) -> None:
        """Ends the holder and closes this link; all memory that the holder kept is closed when this
        returns."""
        with self._socket, suppress(OSError):  # it has ended already, or does not answer
            self._send(Finish())
            while self._socket.recv(MAX_MESSAGE):
                continue

    def fileno(self) -> int:
        """The socket's descriptor; readable when the holder has ended."""
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def _receive(self) -> tuple[bytes, list[int]]:
        raw, descriptors, _, _ = socket.recv_fds(self._socket, MAX_MESSAGE, MAX_DESCRIPTORS)
        if not raw:
            raise ConnectionResetError("the memory holder has ended")
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        return raw, descriptors

    def _send(self, message: msgspec.Struct) -> None:
        self._socket.send(msgspec.msgpack.encode(message))


def socket_address(address: str) -> str:
    """The address in the form that the socket module takes."""
    return "\0" + address[1:] if address.startswith("@") else address


def listen(address: str) -> socket.socket:
    """A listening socket for a MemoryHolder; replaces a file that an earlier one left."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not address.startswith("@"):
        with suppress(FileNotFoundError):
            Path(address).unlink()
    made.bind(socket_address(address))
    if not address.startswith("@"):
        Path(address).chmod(0o600)
    made.listen()
    return made


def claimed_address(folder: Path, engine: str) -> str:
    """Address of the holder of stage id `engine`, which claims its place in `folder`."""
    return str(folder / f"{engine}.memory")


def wait_for_holder(address: str) -> None:
    """Waits until a holder listens at `address`, at most STARTING_SECONDS, because it may have been
    started just now."""
    until = time.monotonic() + STARTING_SECONDS
    while time.monotonic() < until:
        with suppress(OSError):
            HolderLink(address).close()
            return
        time.sleep(STARTING_CHECK)


def claimed_addresses(topology: Topology, on: str, folder: Path) -> list[str]:
    """Addresses of the holders of all engines of host `on`. Raises ConfigurationError if it has
    none."""
    return [claimed_address(folder, one.identity.id) for one in topology.stages_on(on, "engine")]


def hold_for_claims(topology: Topology, on: str, folder: Path) -> None:
    """Runs the holders of all engines of host `on` ("" for any), which claim their places in
    `folder`; until SIGTERM, or until one of them has failed, whose error is raised."""
    holders = [MemoryHolder(listen(address)) for address in claimed_addresses(topology, on, folder)]
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: [holder.stop() for holder in holders])
    with ThreadPoolExecutor(len(holders)) as threads:
        running = [threads.submit(holder.run) for holder in holders]
        wait(running, return_when=FIRST_COMPLETED)
        for holder in holders:
            holder.stop()
    for one in running:
        one.result()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `python -m pipeinfer.runtime.memory_holder`; ends on SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m pipeinfer.runtime.memory_holder")
    add = parser.add_argument
    add("address", nargs="?", help="where to listen: a path, or @ and an abstract name")
    add("--claim", metavar="DIR", help="instead: a holder in DIR for each engine of a topology")
    add("--topology", metavar="FILE", help="of --claim; default: PIPEINFER_STAGES says it all")
    add("--on", metavar="HOST", default="", help="of --claim: engines of this host only")
    add("--check", action="store_true", help="of --claim: end at once, with 0 if all holders run")
    add("--fd", type=int, metavar="N", help="instead: a listening socket of the parent")
    add("--server", type=int, metavar="N", help="outlive the parent: a pipe that it closes")
    add("--patience", type=float, default=0.0, metavar="SECONDS", help="after that")
    add("--after", action="append", default=[], metavar="ADDRESS", help="of a holder to replace")
    given = parser.parse_args(arguments)
    if given.claim is not None:
        return _claims(given)
    inherited = given.fd is not None
    listener = socket.socket(fileno=given.fd) if inherited else listen(given.address)
    holder = MemoryHolder(listener, patience=given.patience, server=given.server)
    signal.signal(signal.SIGTERM, lambda *_: holder.stop())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if inherited and given.server is None:
        ParentWatch().set_stop(holder.stop)
    for address in given.after:
        try:
            holder.take_over(address)
        except OSError as error:
            log.warning("what the server before kept is lost: %s", error)
        remove_socket(address)
    address = listener.getsockname()
    holder.run()
    if given.server is not None:
        remove_socket(address)
    return 0


def _claims(given: argparse.Namespace) -> int:
    file, folder = given.topology or os.environ.get(f"{PREFIX}TOPOLOGY"), Path(given.claim)
    try:
        topology = deployed_topology(file, os.environ)
        if given.check:
            for address in claimed_addresses(topology, given.on, folder):
                HolderLink(address).close()
        else:
            hold_for_claims(topology, given.on, folder)
    except (ConfigurationError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return MISCONFIGURED
    return 0


def remove_socket(address: str) -> None:
    """Removes the file of a socket without a listener."""
    with suppress(OSError):
        Path(address).unlink()


RESTART_SECONDS = 0.5  # between the end of a holder and the start of the next one
END_SECONDS = 5.0  # seconds that a holder may take to end
FOLDER = "pipeinfer-memory"  # in the folder for temporary files, with the user's number
MAX_FOLDER = 84  # bytes of a path that leave enough of a socket's 107 for its name


def keeps_memory(settings: Settings) -> bool:
    """Whether an engine with these settings may leave its memory to a successor; never within one
    process."""
    return not (settings.no_keep_memory or settings.in_process)


@dataclass(frozen=True)
class KeptHolders:
    """Memory holders that outlive their server, from the view of one server.

    Attributes:
    - found: by stage, addresses of holders that an earlier server has left
    - folder: folder in which the server's own holders listen; None: they end with the server
    - patience: seconds that they wait for the next server
    """

    found: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    folder: Path | None = None
    patience: int = 0

    def end_others(self, stages: Sequence[str]) -> None:
        """Ends the holders of an earlier server for other stages than these, which no process would
        use."""
        for stage in self.found.keys() - stages:
            for address in self.found[stage]:
                with suppress(OSError):  # it has ended
                    HolderLink(address, END_SECONDS).end()
                remove_socket(address)


@contextmanager
def kept_holders(settings: Settings, server: str) -> Iterator[KeptHolders]:
    """The memory holders that outlive servers of the address `server`.

    - server: an address that no other server of this host has at the same time; "": there is none

    Raises ConfigurationError if memory is to be kept, and cannot be.
    """
    keeps = settings.keep_memory_on_stop
    if keeps and not server:
        raise ConfigurationError(
            "--keep-memory-on-stop: the next server finds memory by its --port, which must not be "
            "0, or by its --topology file"
        )
    root = Path(tempfile.gettempdir(), f"{FOLDER}-{os.geteuid()}")
    folder = root / blake2b(server.encode(), digest_size=8).hexdigest()
    descriptor = None
    try:
        descriptor = _lock(root, folder, make=keeps) if server else None
    except OSError as error:
        why = f"{folder}: {error.strerror or error}"
        if keeps:
            raise ConfigurationError(f"--keep-memory-on-stop: {why}") from None
        if error.errno not in (errno.ENOENT, errno.ENAMETOOLONG):  # then none has left anything
            log.warning("what an earlier server has left is not looked for: %s", why)
    if descriptor is None:
        yield KeptHolders()
        return
    try:
        found: dict[str, list[str]] = {}
        for address in folder.iterdir():
            found.setdefault(address.stem, []).append(str(address))
        yield KeptHolders(found, folder if keeps else None, settings.kept_memory_timeout)
    finally:
        if not keeps:
            with suppress(OSError):  # it is not empty
                folder.rmdir()
        os.close(descriptor)


def _lock(root: Path, folder: Path, *, make: bool) -> int:
    """A descriptor of the folder, with its lock; only this user may look into either folder. Raises
    OSError if another server has the lock, or if one of the folders is not this user's alone, or is
    not there."""
    if len(os.fsencode(folder)) > MAX_FOLDER:
        raise OSError(errno.ENAMETOOLONG, "sockets in it have too long names: set TMPDIR")
    for one in (root, folder):
        if make:
            one.mkdir(mode=0o700, exist_ok=True)
        found = one.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(f"{one} is not a folder of this user alone")
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class HolderProcess:
    """A memory holder of one stage.

    Attributes:
    - address: of its socket, which stays the same
    """

    def __init__(self, stage: str, kept: KeptHolders) -> None:
        """Opens the socket. Raises OSError if it cannot listen."""
        name = secrets.token_hex(16)
        self.address = f"@pipeinfer-{name}"
        self._words: list[str] = []
        self._pipe: tuple[int, int] | None = None  # closed at this process's end
        if kept.folder is not None:
            self.address = str(kept.folder / f"{stage}.{name[:8]}")
            self._pipe = os.pipe()
            self._words = [f"--server={self._pipe[0]}", f"--patience={kept.patience}"]
        self._patience = kept.patience
        self._after = [f"--after={address}" for address in kept.found.get(stage, ())]
        self._listener = listen(self.address)
        self._stage = stage
        self._process: subprocess.Popen[bytes] | None = None
        self._watch: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts the holder; to be called once, on the running loop. Engines may connect at once,
        and wait until the holder runs."""
        self._watch = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Ends the holder, and with it the memory, unless that outlives this server."""
        if self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch
        process = self._process
        if process is not None and self._pipe is None:
            process.kill()
            process.wait()
        elif process is not None and process.poll() is None:
            log.info(
                "memory of %s is kept for %d s; to free it now, end process %d",
                self._stage, self._patience, process.pid,
            )  # fmt: skip
        self._listener.close()
        for end in self._pipe or ():
            os.close(end)

    async def _run(self) -> None:
        kept_fds = [self._listener.fileno(), *(self._pipe or ())[:1]]
        output = subprocess.DEVNULL if self._pipe else None  # whose reader waits for its end
        while True:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "pipeinfer.runtime.memory_holder",
                     f"--fd={kept_fds[0]}", *self._words, *self._after],
                    stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=kept_fds,
                    start_new_session=True,
                )  # fmt: skip
                self._after = []
                log.warning(
                    "a memory holder ended (code %d) and is started again",
                    await _end_of(self._process),
                )
            except OSError as error:
                log.warning("no memory holder can be started: %s", error)
            await asyncio.sleep(RESTART_SECONDS)


async def _end_of(process: subprocess.Popen[bytes]) -> int:
    """Waits for the end of the process; returns its exit code. A process of asyncio's own would be
    killed when the loop is closed."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    descriptor = os.pidfd_open(process.pid)
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    return process.wait()


if __name__ == "__main__":
    sys.exit(main())
