"""Takes a core's state without stopping the stage: a forked copy of the process walks it.

The copy has the state as it was between two events, however long the walk takes, and does nothing
but the walk; small states are walked at once. Where a process must not be forked, a thread walks
the state while nothing happens to it. Knows cores as objects, and no file.
"""

from __future__ import annotations

import gc
import os
import resource
import select
import signal
import struct
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, Protocol

from pipeinfer.trace.format import pack_state
from pipeinfer.trace.snapshot import TooLarge, Unsnapshottable, snapshot

# What is walked on the loop: so many values take a fraction of a millisecond, less than a fork.
MAX_WALKED_VALUES = 1_000
SHORT_WALK_SECONDS = 0.001  # seconds; a walk that took longer is a fork's business the next time
COPY_TIMEOUT = 30.0  # seconds that a copy may take; then it is killed, and its state lost
POLL_SECONDS = 0.1  # seconds between looks whether its state is still wanted
CPU_SECONDS = 60  # after which the kernel kills a copy whose parent is gone
NICENESS = 10
CHUNK = 1 << 20
MAX_DESCRIPTORS = 1 << 20  # more than any process has
WALKED, UNFIT = b"S", b"U"
_LEADING = struct.Struct("<cdQ")  # what follows, the seconds that it took, and its bytes


class StateCopyFailed(RuntimeError):
    """There is no state this time; the text says why. It may be asked for again later."""


class StateCopy(Protocol):
    """A state that was taken, and may still be on its way."""

    def packed(self, given_up: Callable[[], bool]) -> bytes:
        """The snapshot (trace/snapshot.py) as one zstd frame; waits for it, in any thread.

        `given_up()`: asked now and then whether nobody wants it any more. Raises StateCopyFailed,
        or Unsnapshottable.
        """
        ...


class StateCopier:
    """Takes states of one core again and again. `forks`: whether this process may be forked.

    A process must not be forked that uses a GPU (its driver shares memory with the device), nor one
    that is not ours.
    """

    def __init__(self, forks: bool) -> None:
        self._forks = forks
        self.small = True  # as far as is known, the state is walked in no time

    def take(self, core: object, still: Callable[[], bool] | None = None) -> StateCopy:
        """The state of `core` as it is now, between two events.

        still: whether the state is the one of now still, and goes on to be it unless the core takes
        an event; asked in any thread. Without it, what must not be forked is walked at once,
        however large. Raises Unsnapshottable, or StateCopyFailed where there is no way to take it
        now.
        """
        at_once = not self._forks and still is None
        if self.small or at_once:
            begun = time.perf_counter()
            try:
                state = snapshot(core, 0 if at_once else MAX_WALKED_VALUES)
            except TooLarge:
                self.small = False
            else:
                self.small = time.perf_counter() - begun < SHORT_WALK_SECONDS
                return _Here(state)
        if self._forks:
            return self._fork(core)
        assert still is not None
        if not still():
            raise StateCopyFailed("it is too large to be taken while the stage is busy")
        return _Meanwhile(core, still, self._learn)

    def _fork(self, core: object) -> StateCopy:
        """A signal that reached the copy would be told to our own loop: it takes none at all."""
        source, sink = os.pipe()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            with warnings.catch_warnings():
                # That a lock may be held for ever concerns who wants one, and the walk does not.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if not pid:
                _walk(core, sink)
        except OSError as error:
            os.close(source)
            raise StateCopyFailed(f"no process can be forked: {error.strerror}") from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            os.close(sink)
        return _Elsewhere(pid, source, self._learn)

    def _learn(self, seconds: float) -> None:
        """From the thread that waits."""
        self.small = seconds < SHORT_WALK_SECONDS


def _walk(core: object, sink: int) -> NoReturn:
    """The copy's whole life. No lock may be asked for here: whoever held it was not copied."""
    try:
        gc.disable()
        # Sockets and locks are ours as long as we hold them: a successor of a stage that is killed
        # now finds its ports free, and clients see their connections end.
        os.closerange(0, sink)
        os.closerange(sink + 1, MAX_DESCRIPTORS)
        _humble()
        begun = time.perf_counter()
        try:
            kind, body = WALKED, pack_state(snapshot(core))
        except Unsnapshottable as error:
            kind, body = UNFIT, str(error).encode("utf-8", "replace")
        left = memoryview(_LEADING.pack(kind, time.perf_counter() - begun, len(body)) + body)
        while left:
            left = left[os.write(sink, left) :]
    finally:
        os._exit(0)


def _humble() -> None:
    """The stage comes first: for the processor, and when memory runs out."""
    with suppress(OSError, ValueError):
        os.nice(NICENESS)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


class _Here:
    """A state that was walked at once."""

    def __init__(self, state: bytes) -> None:
        self._state = state

    def packed(self, given_up: Callable[[], bool]) -> bytes:
        return pack_state(self._state)


class _Meanwhile:
    """A state that the thread which wants it packed walks, while the loop may go on."""

    def __init__(
        self, core: object, still: Callable[[], bool], learn: Callable[[float], None]
    ) -> None:
        self._core = core
        self._still = still
        self._learn = learn

    def packed(self, given_up: Callable[[], bool]) -> bytes:
        begun = time.perf_counter()
        try:
            state = snapshot(self._core)
        except Exception:
            if self._still():
                raise
            state = b""  # what changes under a walk may look like anything
        if not self._still():
            raise StateCopyFailed("the stage went on while its state was walked")
        self._learn(time.perf_counter() - begun)
        return pack_state(state)


class _Elsewhere:
    """A state that process `pid` walks and writes into the pipe `source`."""

    def __init__(self, pid: int, source: int, learn: Callable[[float], None]) -> None:
        self.pid = pid
        self._source = source
        self._learn = learn

    def packed(self, given_up: Callable[[], bool]) -> bytes:
        try:
            received = self._read(given_up)
        finally:
            os.close(self._source)
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)  # it has ended, or nobody wants it
            with suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
        whole = len(received) >= _LEADING.size
        kind, seconds, size = _LEADING.unpack_from(received) if whole else (b"", 0.0, 1)
        body = received[_LEADING.size :]
        if len(body) != size:
            raise StateCopyFailed("the process that copied it was killed")
        if kind == UNFIT:
            raise Unsnapshottable(body.decode("utf-8", "replace"))
        self._learn(seconds)
        return body

    def _read(self, given_up: Callable[[], bool]) -> bytes:
        poll, chunks = select.poll(), list[bytes]()  # `select` takes no descriptor above 1023
        poll.register(self._source, select.POLLIN)
        deadline = time.monotonic() + COPY_TIMEOUT
        while True:
            if poll.poll(POLL_SECONDS * 1_000):
                chunk = os.read(self._source, CHUNK)
                if not chunk:
                    return b"".join(chunks)
                chunks.append(chunk)
            elif given_up():
                raise StateCopyFailed("nobody wants it any more")
            elif time.monotonic() > deadline:
                raise StateCopyFailed(f"its copy took more than {COPY_TIMEOUT:g} s")
