"""One stage as a child process: its command, its process, and what its heartbeats said.

Knows how to start, signal and kill it, and nothing of why; that is the supervisor's business.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from pipeinfer.messages import Heartbeat
from pipeinfer.runtime.topology import Identity

CHECKED = ("loading", "waiting", "ready")  # states of a stage whose configuration is valid


@dataclass(frozen=True)
class Command:
    """What starts a stage, without the stage's own arguments; `folder`: where, "" is here."""

    words: tuple[str, ...] = (sys.executable, "-m", "pipeinfer.runtime")
    folder: str = ""

    def __str__(self) -> str:
        return " ".join(self.words)


@dataclass
class Child:
    """A stage process, and those before it.

    `checked`: one of them got past its configuration; `reason`: why it failed; `deaths`: since one
    was ready; `swapping`: somebody else than its watcher cares for its end.
    """

    identity: Identity
    command: Command = Command()
    process: asyncio.subprocess.Process | None = None
    checked: bool = False
    reason: str = ""
    deaths: int = 0
    swapping: bool = False
    condemned: asyncio.subprocess.Process | None = None  # it dies for its group, see `condemn`
    ready: asyncio.Event = field(default_factory=asyncio.Event)  # this process, now or before
    heard: asyncio.Event = field(default_factory=asyncio.Event)
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    _started: int = 0  # Unix time in ns
    _pid: int = 0  # of the stage itself, where the command is a wrapper around it
    _incarnation: int = 0  # of the latest that was heard
    _reload_when_heard: bool = False

    async def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int]
    ) -> asyncio.subprocess.Process:
        """Starts the command. OSError if it cannot be executed."""
        self.ready.clear()
        self.heard.clear()
        self.process = None  # so that a late word of the old one is not taken for the new one's
        self._started, self._pid, self.reason = time.time_ns(), 0, ""
        self.process = await asyncio.create_subprocess_exec(
            *self.command.words,
            *arguments,
            env=environment,
            cwd=self.command.folder or None,
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=tuple(descriptors),
            start_new_session=True,  # Ctrl-C is for this process, which drains them in order
        )
        return self.process

    def hear(self, beat: Heartbeat) -> None:
        """Takes a heartbeat; a last word of an earlier process does not count."""
        if self.process is None:
            return
        if beat.pid != self.process.pid and beat.incarnation < self._started:
            return
        self._pid, self._incarnation = beat.pid, beat.incarnation
        self.heard.set()
        if self._reload_when_heard:
            self.reload()
        self.reason = beat.reason if beat.state == "failed" else self.reason
        self.checked = self.checked or beat.state in CHECKED
        if beat.state == "ready":
            self.deaths = 0
            self.ready.set()

    def last_word(self, reason: str) -> Heartbeat | None:
        """What it cannot say itself: that its process ended; None if it was never heard.

        Newer than all that is still under way of it, and older than its successor.
        """
        if not self._incarnation:
            return None
        who = self.identity
        return Heartbeat(
            who.id, who.name, who.group, who.rank, who.index, self.pid, self._incarnation + 1,
            "starting", reason,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        """Of the stage itself as far as it is known, 0 before the first start."""
        return self._pid or (self.process.pid if self.process is not None else 0)

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.returncode is None

    def signal(self, number: signal.Signals) -> None:
        """To the stage itself if it has been heard, else to its command."""
        if self.process is None or not self.running:
            return
        with suppress(ProcessLookupError):
            own = self._pid and os.getsid(self._pid) == self.process.pid
            os.kill(self._pid if own else self.process.pid, number)

    def reload(self) -> None:
        """Passes SIGHUP on; to a process that nothing was heard of, when it speaks.

        Before that the signal would end it, since Python has not set its handler yet.
        """
        self._reload_when_heard = not self.heard.is_set()
        if not self._reload_when_heard:
            self.signal(signal.SIGHUP)

    def condemn(self) -> None:
        """Kills this process because its group starts anew: its end is no reason to kill others.

        A rank may take seconds to die, and those that it took with it have begun again by then.
        """
        self.condemned = self.process
        self.kill()

    def kill(self) -> None:
        """With everything that its command started."""
        if self.process is not None and self.running:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


def cause(code: int) -> str:
    """An exit code in words."""
    return signal.Signals(-code).name if code < 0 else f"code {code}"
