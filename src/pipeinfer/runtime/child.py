"""One stage as a child process: its command, its process, and what its heartbeats said.

Knows how to start, signal and kill it, and nothing of why; that is the supervisor's business.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from pipeinfer.messages import Ended, Heartbeat, State
from pipeinfer.runtime.incarnations import INCARNATION_VARIABLE, IncarnationNumbers
from pipeinfer.runtime.report import REPORT_FD_VARIABLE, StatusReader, StatusReport
from pipeinfer.topology.topology import Identity

# Stages without a model multiply no matrices: NumPy's threads, one a core, would do nothing in them
# but end, some time or other, when the process is forked.
LIGHT_STAGE_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}
VALID_CONFIG_STATES = (
    "loading",
    "waiting",
    "ready",
)  # states of a stage whose configuration is valid


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

    `said`: the process's state, and what it does or why. `checked`: one of them got past its
    configuration; `reason`: why it failed; `deaths`: since one was ready; `swapping`: somebody else
    than its watcher cares for its end. `told`: called when the process has said something through
    its pipe.
    """

    identity: Identity
    command: Command = Command()
    numbers: IncarnationNumbers = field(
        default_factory=IncarnationNumbers
    )  # one for all that may meet
    process: asyncio.subprocess.Process | None = None
    status: tuple[State, str] = ("starting", "")
    config_valid: bool = False
    failure_reason: str = ""
    deaths: int = 0
    swapping: bool = False
    killed_for_group: asyncio.subprocess.Process | None = (
        None  # it dies for its group, see `condemn`
    )
    ready: asyncio.Event = field(default_factory=asyncio.Event)  # this process, now or before
    has_reported: asyncio.Event = field(default_factory=asyncio.Event)
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    _started_as: int = 0  # the number that this process was started with
    _pid: int = 0  # of the stage itself, where the command is a wrapper around it
    _incarnation: int = 0  # of the latest that was heard
    death: Ended | None = None  # the process before, while nothing was heard of its successor
    on_report: Callable[[], object] = lambda: None
    _reload_when_reported: bool = False
    _status_reader: StatusReader | None = None

    async def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int]
    ) -> asyncio.subprocess.Process:
        """Starts the command. OSError if it cannot be executed."""
        self.ready.clear()
        self.has_reported.clear()
        self.process = None  # so that a late word of the old one is not taken for the new one's
        self._started_as = self.numbers.next(self.newest)
        self._pid = 0
        self.status, self.failure_reason = ("starting", ""), ""
        self.close_reports()
        reports = self._status_reader = StatusReader()
        defaults = {} if self.identity.name == "engine" else LIGHT_STAGE_ENVIRONMENT
        ours = {REPORT_FD_VARIABLE: reports.name, INCARNATION_VARIABLE: str(self._started_as)}
        try:
            self.process = await asyncio.create_subprocess_exec(
                *self.command.words,
                *arguments,
                env={**defaults, **environment, **ours},
                cwd=self.command.folder or None,
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(*descriptors, reports.sink),
                start_new_session=True,  # Ctrl-C is for this process, which drains them in order
            )
        finally:
            reports.close_sink()
        asyncio.get_running_loop().add_reader(reports.source, self.read_reports)
        return self.process

    def read_reports(self) -> None:
        """Takes what the process said through its pipe, also if it has ended since."""
        if self._status_reader is None:
            return
        reports = self._status_reader.read()
        if self._status_reader.ended:
            self.close_reports()
        for report in reports:
            if self._on_status(report):
                self._incarnation = max(self._incarnation, report.newest)
        if reports:
            self.on_report()

    def close_reports(self) -> None:
        """Nothing is to be heard of the process that ran."""
        if self._status_reader is not None:
            asyncio.get_running_loop().remove_reader(self._status_reader.source)
            self._status_reader.close()
            self._status_reader = None

    def on_heartbeat(self, beat: Heartbeat) -> None:
        """Takes a heartbeat; a last word of an earlier process does not count."""
        if self._on_status(beat) and beat.state == "ready":
            self.ready.set()  # other stages hear it now, too: a swap is over

    def _on_status(self, said: Heartbeat | StatusReport) -> bool:
        """What a heartbeat and a report have in common; False if it is an earlier process's."""
        if self.process is None:
            return False
        if said.pid != self.process.pid and said.incarnation < self._started_as:
            return False
        self._pid = said.pid
        self._incarnation = said.incarnation
        self.death = None
        self.has_reported.set()
        if self._reload_when_reported:
            self.reload()
        self.status = said.state, said.reason
        self.failure_reason = said.reason if said.state == "failed" else self.failure_reason
        self.config_valid = self.config_valid or said.state in VALID_CONFIG_STATES
        self.deaths = 0 if said.state == "ready" else self.deaths
        return True

    def death_notice(self, reason: str) -> Heartbeat | None:
        """What it cannot say itself: that its process ended; None if it was never heard. From now
        on `ended` says so, too, for those who decide by it.

        Newer than all that is still under way of it, and older than its successor.
        """
        if not self._incarnation:
            return None
        who = self.identity
        number, at = self._incarnation, self.numbers.now()
        self.death = Ended(stage=who.id, incarnation=number, at=at, reason=reason)
        return Heartbeat(
            stage=who.id,
            name=who.name,
            group=who.group,
            rank=who.rank,
            index=who.index,
            pid=self.pid,
            incarnation=self._incarnation + 1,
            state="starting",
            reason=reason,
        )

    @property
    def newest(self) -> int:
        """The greatest number of a process of this stage that is known here, 0 for none."""
        return max(self._started_as, self._incarnation)

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
        self._reload_when_reported = not self.has_reported.is_set()
        if not self._reload_when_reported:
            self.signal(signal.SIGHUP)

    def started_before(self, incarnations: Iterable[int]) -> bool:
        """Whether its process may be one of these, and does not come after them."""
        return any(self._started_as <= incarnation for incarnation in incarnations)

    def kill_for_group(self) -> None:
        """Kills this process because its group starts anew: its end is no reason to kill others.

        A rank may take seconds to die, and those that it took with it have begun again by then.
        """
        self.killed_for_group = self.process
        self.kill()

    def kill(self) -> None:
        """With everything that its command started."""
        if self.process is not None and self.running:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


def exit_cause(code: int) -> str:
    """An exit code in words."""
    return signal.Signals(-code).name if code < 0 else f"code {code}"
