"""A server's memory holders, which memory_holder.py describes.

    HolderProcess   a holder as a child of this process, which is started again when it ends
    KeptHolders     those that outlive their server, for the next server of the same address

A server that keeps memory when it stops has a folder, whose name follows from its address. Its
holders listen there, and go on when it has ended. The next server finds them, and its own holders
take over what they keep; what belongs to another model its engines give back (kept_memory.py).
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import secrets
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from pipeinfer.runtime.memory_holder import HolderLink, listen, remove_socket
from pipeinfer.settings import ConfigurationError, Settings

log = logging.getLogger(__name__)

RESTART_SECONDS = 0.5  # between the end of a holder and the start of the next one
END_SECONDS = 5.0  # that a holder may take to end
FOLDER = "pipeinfer-memory"  # in the folder for temporary files, with the user's number
MAX_FOLDER = 84  # bytes of a path that leave enough of a socket's 107 for its name


def keeps_memory(settings: Settings) -> bool:
    """Whether an engine with these settings may leave its memory to a successor: not within one
    process."""
    return not (settings.no_keep_memory or settings.in_process)


@dataclass(frozen=True)
class KeptHolders:
    """Memory holders that outlive their server, as far as one server is concerned.

    found: by stage, addresses of those that an earlier server has left.
    folder: where its own ones listen; None: they end with it.
    patience: seconds that they wait for the next server.
    """

    found: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    folder: Path | None = None
    patience: int = 0

    def end_others(self, stages: Sequence[str]) -> None:
        """Ends what was found of other stages than these: nobody would come for it."""
        for stage in self.found.keys() - stages:
            for address in self.found[stage]:
                with suppress(OSError):  # it has ended
                    HolderLink(address, END_SECONDS).end()
                remove_socket(address)


@contextmanager
def kept_holders(settings: Settings, server: str) -> Iterator[KeptHolders]:
    """server: an address that no other server of this host has at the same time; "": there is none.
    Raises ConfigurationError where memory is to be kept, and cannot be."""
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
    """A descriptor of the folder, with its lock; nobody else may look into either folder. Raises
    OSError if another server has it, if one is not this user's alone, or is not there."""
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

    address: of its socket, which stays the same.
    """

    def __init__(self, stage: str, kept: KeptHolders) -> None:
        """Raises OSError where it cannot listen."""
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
        """To be called once, on the running loop. Engines may connect at once, and wait until the
        holder runs."""
        self._watch = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Ends the holder, and with it what it kept, unless that outlives this server."""
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
    """Its code. A process of asyncio's own would be killed when the loop is closed."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    descriptor = os.pidfd_open(process.pid)
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    return process.wait()
