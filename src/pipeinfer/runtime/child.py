"""A stage as a child process, and the ties between both ends; and standbys, second processes of
engines that have their weights and are silent until they are needed.

    supervisor's end              the stage's end
    Child: command, process       ParentWatch: ends the stage when its parent is gone
    StatusReader     <- pipe -    StatusWriter: the stage's state, whenever it changes
    exit code        <---------   ORDERLY, FAILED or MISCONFIGURED
    Standbys: starts them, and    StandbyBuild: builds the stage as far as it needs nothing
    promotes one if an            of the process that serves
    engine has ended

The state of a stage that ended must neither be lost nor come after its end, as a heartbeat may;
data in a pipe outlives its writer. The supervisor decides why a process is started, signalled or
killed.

A standby has no incarnation, opens no socket and no recording, and only borrows from its memory
holder. It reports to its supervisor through the status pipe, and waits on stdin: a line with a
number promotes it, the end of the file ends it. A standby that claimed its place, such as a
container, waits for the lock of the engine instead (entry.py).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TextIO, TypeGuard

import msgspec

from pipeinfer.messages import Ended, Heartbeat, State
from pipeinfer.processes import resident_bytes
from pipeinfer.runtime.stage import (
    INCARNATION_VARIABLE,
    IncarnationNumbers,
    Stage,
    StageContext,
    heartbeat,
)
from pipeinfer.settings import ConfigurationError
from pipeinfer.topology import Identity

# Exit codes of a stage's process.
ORDERLY = 0
FAILED = 1
MISCONFIGURED = 2  # another start would not help, unless a process before was ready

MAX_DEATHS = 5  # of a stage that was not ready in between; after one more the stage is given up

PARENT_CHECK = 0.5  # seconds between two looks whether the parent is there
ORDERLY_END = 10.0  # seconds that an orderly end may take after that


class ParentWatch:
    """Ends this process when the process that started it has gone, also while this one still
    imports modules: on a thread of its own, since imports and builds hold the others.

    - sink: the writing end of the status pipe, which the parent reads; -1 without a pipe. A command
      around this process may have closed the pipe, or forked with it: then only the end of the
      process right above, which may be that command, counts
    """

    def __init__(self, sink: int = -1) -> None:
        self._sink = sink
        self._parent = os.getppid()
        self._end: Callable[[], object] = lambda: os._exit(ORDERLY)
        threading.Thread(target=self._run, name="parent", daemon=True).start()

    def set_stop(self, end: Callable[[], object]) -> None:
        """Makes the process end in good order from now on, by `end()`, called on the watch's
        thread."""
        self._end = end

    def _run(self) -> None:
        poller = select.poll()
        if self._sink >= 0:
            poller.register(self._sink, 0)  # POLLERR is always reported: the reader has gone
        while os.getppid() == self._parent and not poller.poll(1_000 * PARENT_CHECK):
            pass
        with suppress(RuntimeError):  # the loop is closed: it ends already
            self._end()
        time.sleep(ORDERLY_END)
        os._exit(FAILED)


# In the environment and not among the arguments: a stage of an older version ignores it.
REPORT_FD_VARIABLE = "PIPEINFER_REPORT_FD"
READ_BYTES = 1 << 16
MAX_REASON_CHARS = 2_000  # a pipe takes a page at once or not at all


log = logging.getLogger(__name__)


class StatusReport(msgspec.Struct, frozen=True, array_like=True):
    """A line in the status pipe.

    Attributes:
    - state, reason, incarnation: as in a heartbeat
    - pid: of the stage itself, if a command is wrapped around it
    - newest: the incarnation by which this process was fenced out, else 0
    """

    state: State
    reason: str
    pid: int
    incarnation: int
    newest: int = 0


def inherited_status_writer(
    environ: MutableMapping[str, str], incarnation: int
) -> StatusWriter | None:
    """The writer of the status pipe that `environ` names; takes the variable out of `environ`. None
    without a pipe."""
    sink, _, inode = environ.pop(REPORT_FD_VARIABLE, "").partition(":")
    try:
        if sink and os.fstat(int(sink)).st_ino == int(inode):
            return StatusWriter(int(sink), incarnation)
    except (OSError, ValueError, OverflowError) as error:
        log.debug("%s=%s: %s", REPORT_FD_VARIABLE, sink, error)
    # a command around this process has closed the pipe, and may have reused its number; heartbeats
    # suffice
    return None


class StatusWriter:
    """The stage's end of the status pipe, the descriptor `sink`; it never waits.

    Attributes:
    - incarnation: of the process; 0: a standby, which has none yet
    """

    def __init__(self, sink: int, incarnation: int) -> None:
        self.sink, self.incarnation = sink, incarnation
        os.set_blocking(sink, False)
        os.set_inheritable(sink, False)

    def write(self, state: State, reason: str, newest: int = 0) -> None:
        """Writes a StatusReport; nothing if the reader has gone, or the pipe is full."""
        reason = reason[:MAX_REASON_CHARS].encode("utf-8", "replace").decode()
        report = StatusReport(state, reason, os.getpid(), self.incarnation, newest)
        with suppress(OSError):
            os.write(self.sink, msgspec.json.encode(report) + b"\n")


class StatusReader:
    """The supervisor's end of the status pipe.

    Attributes:
    - sink: for the stage to inherit; to be closed here afterwards
    - ended: the sink is closed everywhere
    """

    def __init__(self) -> None:
        self.source, self.sink = os.pipe()
        os.set_blocking(self.source, False)
        self.ended = False
        self._partial_line = b""

    @property
    def name(self) -> str:
        """Name of the sink for REPORT_FD_VARIABLE: its number, and its inode."""
        return f"{self.sink}:{os.fstat(self.sink).st_ino}"

    def close_sink(self) -> None:
        os.close(self.sink)

    def read(self) -> list[StatusReport]:
        """The reports since the last call, also of a process that has ended."""
        while not self.ended:
            try:
                chunk = os.read(self.source, READ_BYTES)
            except BlockingIOError:
                break
            self.ended = not chunk
            self._partial_line += chunk
        *lines, self._partial_line = self._partial_line.split(b"\n")
        return [report for line in lines if (report := _decode_status(line)) is not None]

    def close(self) -> None:
        os.close(self.source)


def _decode_status(line: bytes) -> StatusReport | None:
    """The report in a line; None for other bytes, which a command around the stage may write."""
    try:
        return msgspec.json.decode(line, type=StatusReport)
    except (ValueError, RecursionError):
        return None


# Stages without a model multiply no matrices: NumPy's threads, one a core, would be idle, and would
# be lost when the process is forked.
LIGHT_STAGE_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}
VALID_CONFIG_STATES = (
    "loading",
    "waiting",
    "ready",
    "asleep",
)  # states of a stage whose configuration is valid
SERVING_STATES = ("ready", "asleep")  # states of a stage that works as asked


@dataclass(frozen=True)
class Command:
    """The command that starts a stage, without the stage's own arguments.

    Attributes:
    - words: program and arguments
    - folder: working folder; "": the current one
    """

    words: tuple[str, ...] = (sys.executable, "-m", "pipeinfer.runtime")
    folder: str = ""

    def __str__(self) -> str:
        return " ".join(self.words)


@dataclass
class Child:
    """A stage's process, and those before it.

    Attributes:
    - identity, command: of the stage
    - numbers: gives incarnations; one object for all processes that may meet
    - process: None before the first start
    - status: the process's state, and its activity or the reason why it waits
    - config_valid: whether a process of this stage got past its configuration
    - failure_reason: why the process failed, "" if it did not
    - has_served: whether a process of this stage was ready
    - deaths: ends of processes since one was ready
    - swapping: a swap handles the process's end, and not its watcher
    - killed_for_group: the process that was killed because its group starts anew
    - ready: set when this process, or one before it, is ready
    - has_reported: set by the process's first status
    - starting: held while a process is started
    - death: the message that the last process ended, until its successor has reported
    - on_report: called after reports came through the pipe
    """

    identity: Identity
    command: Command = Command()
    numbers: IncarnationNumbers = field(
        default_factory=IncarnationNumbers
    )  # one object for all that may meet
    process: asyncio.subprocess.Process | None = None
    status: tuple[State, str] = ("starting", "")
    config_valid: bool = False
    failure_reason: str = ""
    has_served: bool = False
    deaths: int = 0
    swapping: bool = False
    # See `kill_for_group`.
    killed_for_group: asyncio.subprocess.Process | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    has_reported: asyncio.Event = field(default_factory=asyncio.Event)
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    _started_as: int = 0  # the incarnation that this process was started with
    _pid: int = 0  # of the stage itself, where the command is a wrapper around it
    _incarnation: int = 0  # of the latest status
    death: Ended | None = None
    on_report: Callable[[], object] = lambda: None
    _reload_when_reported: bool = False
    _status_reader: StatusReader | None = None

    async def start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        descriptors: Sequence[int],
        standby: bool = False,
    ) -> asyncio.subprocess.Process:
        """Starts the command. Raises OSError if it cannot be executed.

        - arguments: words after the command's own
        - environment: added to the defaults
        - descriptors: inherited by the process
        - standby: the process waits on stdin until it is promoted, and has no incarnation before
        """
        self._forget(0 if standby else self.numbers.next(self.newest))
        reports = self._status_reader = StatusReader()
        defaults = {} if self.identity.name == "engine" else LIGHT_STAGE_ENVIRONMENT
        ours = {REPORT_FD_VARIABLE: reports.name, INCARNATION_VARIABLE: str(self._started_as)}
        try:
            self.process = await asyncio.create_subprocess_exec(
                *self.command.words,
                *arguments,
                env={**defaults, **environment, **ours},
                cwd=self.command.folder or None,
                stdin=asyncio.subprocess.PIPE if standby else asyncio.subprocess.DEVNULL,
                pass_fds=(*descriptors, reports.sink),
                start_new_session=True,  # Ctrl-C is for this process, which drains them in order
            )
        finally:
            reports.close_sink()
        asyncio.get_running_loop().add_reader(reports.source, self.read_reports)
        return self.process

    def promote(self, standby: Child) -> None:
        """Makes the process of `standby` this stage's, and sends it its incarnation."""
        standby.read_reports()
        process, reports = standby.process, standby._status_reader
        standby._status_reader = None
        assert process is not None and process.stdin is not None
        self._forget(self.numbers.next(self.newest))
        self.process, self._status_reader = process, reports
        if reports is not None:
            asyncio.get_running_loop().add_reader(reports.source, self.read_reports)
        process.stdin.write(f"{self._started_as}\n".encode())
        process.stdin.close()

    def _forget(self, started_as: int) -> None:
        """Resets the state of the process, because another one comes, with the incarnation
        `started_as`."""
        self.ready.clear()
        self.has_reported.clear()
        # So that a late heartbeat of the old process is not taken for the new one's.
        self.process = None
        self._started_as = started_as
        self._pid = 0
        self.status, self.failure_reason = ("starting", ""), ""
        self.close_reports()

    def read_reports(self) -> None:
        """Takes the process's reports, also if it has ended since."""
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
        """Closes the status pipe of the process that ran."""
        if self._status_reader is not None:
            asyncio.get_running_loop().remove_reader(self._status_reader.source)
            self._status_reader.close()
            self._status_reader = None

    def on_heartbeat(self, beat: Heartbeat) -> None:
        """Takes a heartbeat; a late one of an earlier process does not count."""
        if self._on_status(beat) and beat.state in SERVING_STATES:
            self.ready.set()  # other stages have its heartbeat now, too: a swap is over

    def _on_status(self, status: Heartbeat | StatusReport) -> bool:
        """Takes a heartbeat or a report; False if it is an earlier process's."""
        if self.process is None or status.incarnation < 1 <= self._started_as:  # before promotion
            return False
        if status.pid != self.process.pid and status.incarnation < self._started_as:
            return False
        self._pid = status.pid
        self._incarnation = status.incarnation
        self.death = None
        self.has_reported.set()
        if self._reload_when_reported:
            self.reload()
        self.status = status.state, status.reason
        self.failure_reason = status.reason if status.state == "failed" else self.failure_reason
        self.config_valid = self.config_valid or status.state in VALID_CONFIG_STATES
        if status.state in SERVING_STATES:
            self.has_served, self.deaths = True, 0
        return True

    def death_notice(self, reason: str) -> Heartbeat | None:
        """The heartbeat that reports the end of the process, which it cannot send itself; None if
        it never reported. Sets `death`, the same report for stages that decide by it.

        Its incarnation is greater than that of all messages of the process that are still under
        way, and less than its successor's.
        """
        if not self._incarnation:
            return None
        number, at = self._incarnation, self.numbers.now()
        self.death = Ended(stage=self.identity.id, incarnation=number, at=at, reason=reason)
        return heartbeat(self.identity, number + 1, "starting", reason, pid=self.pid)

    @property
    def newest(self) -> int:
        """The greatest incarnation of a process of this stage that is known here, 0 for none."""
        return max(self._started_as, self._incarnation)

    @property
    def pid(self) -> int:
        """Process id of the stage itself as far as it is known, 0 before the first start."""
        return self._pid or (self.process.pid if self.process is not None else 0)

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.returncode is None

    def signal(self, number: signal.Signals) -> None:
        """Signals the stage itself if it has reported, else its command."""
        if self.process is None or not self.running:
            return
        with suppress(ProcessLookupError):
            own = self._pid and os.getsid(self._pid) == self.process.pid
            os.kill(self._pid if own else self.process.pid, number)

    def reload(self) -> None:
        """Passes SIGHUP on; to a process that has not reported yet, when it does.

        Before that the signal would end the process, since Python has not set its handler yet.
        """
        self._reload_when_reported = not self.has_reported.is_set()
        if not self._reload_when_reported:
            self.signal(signal.SIGHUP)

    def started_before(self, incarnations: Iterable[int]) -> bool:
        """Whether the process may be one of these, and does not come after them."""
        return any(self._started_as <= incarnation for incarnation in incarnations)

    def kill_for_group(self) -> None:
        """Kills this process because its group starts anew: its end is no reason to kill others.

        A rank may take seconds to die, and other ranks of the group have been started again by
        then.
        """
        self.killed_for_group = self.process
        self.kill()

    def kill(self) -> None:
        """Kills the process, with everything that its command started."""
        if self.process is not None and self.running:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


def exit_cause(code: int) -> str:
    """An exit code in words."""
    return signal.Signals(-code).name if code < 0 else f"code {code}"


STANDBY_FLAG = "--await-promotion"
SETTLED_SECONDS = 1.0  # for which an engine has served before a standby starts beside its requests


class StandbyBuild:
    """Builds a stage on a thread of its own from now on. A process that has not been promoted ends
    when the build fails."""

    def __init__(self, build: Callable[[StageContext], Stage], context: StageContext) -> None:
        """Starts the build; `context` has no incarnation, and reports to the supervisor alone."""
        self._report = context.report_status
        self._promoted: Future[StageContext] = Future()
        self._built: Future[Stage] = Future()
        context = replace(context, report_status=self._say, promotion=self._wait)
        threading.Thread(
            target=self._run, args=(build, context), name="standby", daemon=True
        ).start()

    def __call__(self, context: StageContext) -> Stage:
        """The builder of the promoted process, which serves with `context`."""
        self._promoted.set_result(context)
        return self._built.result()

    def _run(self, build: Callable[[StageContext], Stage], context: StageContext) -> None:
        try:
            self._built.set_result(build(context))
        except BaseException as error:
            self._built.set_exception(error)
            if not self._promoted.done():
                misconfigured = isinstance(error, ConfigurationError)
                log.error("a standby cannot start: %s", error, exc_info=not misconfigured)
                self._report("failed", str(error))
                os._exit(MISCONFIGURED if misconfigured else FAILED)

    def _say(self, state: State, reason: str) -> None:
        if self._promoted.done():
            self._promoted.result().report_status(state, reason)
        else:
            self._report(state, reason)

    def _wait(self) -> StageContext:
        gc.collect()
        gc.freeze()  # so that the collection after the promotion has little to look at
        if not self._promoted.done():
            self._report("ready", f"a standby of {resident_bytes() / 2**30:.2f} GiB")
        return self._promoted.result()


def no_report(_state: State, _reason: str) -> None:
    """Ignores a report, if a command around the process has closed its status pipe."""


def log_report(state: State, reason: str) -> None:
    """Logs a report of a standby without a supervisor."""
    if state == "ready":
        log.info("%s is ready", reason)


def read_promotion(source: TextIO) -> int:
    """Waits for the incarnation with which this process is to serve; 0: it is not needed."""
    return int(source.readline() or 0)


class Standbys:
    """At most one standby of each engine. The standbys of a group's ranks compute together, so they
    are promoted together, and if one ends, all begin again."""

    def __init__(
        self,
        start: Callable[[Child], Awaitable[asyncio.subprocess.Process]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins without standbys.

        - start: starts a child's command as a standby; OSError if it cannot be executed
        """
        self._start = start
        self._clock = clock
        self._ready_since: dict[str, float] = {}  # by the engine's id
        self._standbys: dict[str, Child] = {}  # by the engine's id; also those given up
        # by the engine's id: another rank of the group is promoted already
        self._promised: dict[str, Child] = {}
        self._given_up: set[int] = set()  # groups
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def ready(self) -> int:
        """Number of groups whose standbys could serve at once."""
        groups = {one.identity.group for one in self._standbys.values()}
        return sum(all(map(_is_ready, self._of_group(group))) for group in groups)

    def on_status(self, engine: Child) -> None:
        """Takes an engine's state, which is passed repeatedly: an engine that has served for a
        while gets a standby, one that sleeps loses it."""
        state, name, now = engine.status[0], engine.identity.id, self._clock()
        if state == "asleep":
            self._drop(name)
        if state != "ready":
            self._ready_since.pop(name, None)
            return
        since = self._ready_since.setdefault(name, now)
        if now - since >= SETTLED_SECONDS and name not in self._standbys and not self._closed:
            self._begin(engine)

    def take(self, engine: Child, ranks: Sequence[Child]) -> Child | None:
        """The standby that is to be promoted to `engine`, ready or not; None: there is none, or
        only one of another command.

        - ranks: all ranks of its group; all get the same as the first of them that asks, a standby
          or none, even if the standby has ended since
        """
        name, group = engine.identity.id, engine.identity.group
        self._ready_since.pop(name, None)
        if name in self._promised:
            return self._promised.pop(name)
        found = {one.identity.id: self._standbys.get(one.identity.id) for one in ranks}
        if not all(_could_be(found[one.identity.id], one) for one in ranks):
            for one in self._of_group(group):
                self._drop(one.identity.id)
            return None
        for other in found:
            self._promised[other] = self._standbys.pop(other)
        return self._promised.pop(name)

    async def renew(self, engine: Child) -> None:
        """Replaces the engine's standby by one that reads everything anew; returns when that is
        ready, or when there will be none."""
        self._drop(engine.identity.id)
        self._given_up.discard(engine.identity.group)
        if self._closed:
            return
        standby, ended = self._begin(engine)
        ready = asyncio.ensure_future(standby.ready.wait())
        await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()

    def stop(self) -> None:
        """Ends all standbys; none begins any more."""
        self._closed = True
        for name in [*self._standbys, *self._promised]:
            self._drop(name)

    async def close(self) -> None:
        """Returns when all have ended, also those that were promoted."""
        self.stop()
        await asyncio.gather(*self._tasks)

    def _of_group(self, group: int) -> list[Child]:
        return [one for one in self._standbys.values() if one.identity.group == group]

    def _drop(self, name: str) -> None:
        for standbys in (self._standbys, self._promised):
            standby = standbys.pop(name, None)
            if standby is not None:
                self._given_up.discard(standby.identity.group)
                standby.kill()

    def _begin(self, engine: Child) -> tuple[Child, asyncio.Task[None]]:
        standby = Child(engine.identity, engine.command)
        standby.on_report = lambda: self._on_report(standby)
        self._standbys[engine.identity.id] = standby
        task = asyncio.create_task(self._run(standby))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return standby, task

    def _on_report(self, standby: Child) -> None:
        state, what = standby.status
        if state == "ready" and not standby.ready.is_set():
            standby.ready.set()
            log.info("%s has %s, process %d", standby.identity.id, what, standby.pid)

    async def _run(self, standby: Child) -> None:
        """Starts the standby again when it ends, until it is promoted, dropped or given up."""
        name, group = standby.identity.id, standby.identity.group
        while True:
            try:
                process = await self._start(standby)
            except OSError as error:
                why = f"cannot start {standby.command}: {error}"
                self._give_up(standby, why)
                return
            if self._standbys.get(name) is not standby and self._promised.get(name) is not standby:
                standby.kill()  # it was dropped before there was a process
            code = await process.wait()
            if self._standbys.get(name) is not standby:
                standby.close_reports()
                return
            standby.read_reports()
            if group in self._given_up:
                return
            if standby.killed_for_group is process:
                continue
            standby.deaths += 1
            if code == MISCONFIGURED or standby.deaths > MAX_DEATHS:
                why = standby.failure_reason or exit_cause(code)
                self._give_up(standby, f"the last one ended ({why})")
                return
            log.warning(
                "the standby of %s ended (%s), starting another one", name, exit_cause(code)
            )
            for other in self._of_group(group):
                if other is not standby:
                    other.kill_for_group()

    def _give_up(self, standby: Child, why: str) -> None:
        """Ends the standbys of the group, whose engines serve without; later engines may have
        standbys again."""
        log.warning("%s has no standby any more: %s", standby.identity.id, why)
        self._given_up.add(standby.identity.group)
        for other in self._of_group(standby.identity.group):
            other.kill()


def _is_ready(standby: Child) -> bool:
    return standby.running and standby.status[0] == "ready"


def _could_be(standby: Child | None, engine: Child) -> TypeGuard[Child]:
    return standby is not None and standby.running and standby.command == engine.command
