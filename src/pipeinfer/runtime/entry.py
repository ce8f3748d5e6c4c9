"""Runs one stage as a process: `python -m pipeinfer.runtime STAGE --topology FILE [--group D] ...`;
and all stages as tasks of one loop, for debuggers.

- main: of a process: settings, identity, logging, the shell, the exit code
- InProcess: the same shells, cores and drivers over inproc://
- signals: SIGHUP reads files again, or ends a process whose terminal was closed
- group faults: end an engine without a supervisor
- election: which of several stages of one name this process is: the first that is free, by locks in
  a folder that the processes of a host share (containers); or the standby of a stage whose lock
  another process has, until that process ends
- busy poll: how long the loop polls after a message before it sleeps (bus/bus.py polls)

The supervisor and the scripts in stages/ both come here. Knows every stage by name only.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import fcntl
import gc
import logging
import os
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, NoReturn

import msgspec
import uvloop
import zmq

from pipeinfer import settings as config
from pipeinfer import topology as topologies
from pipeinfer.bus.bus import AddressTaken, Listener, raise_socket_limits
from pipeinfer.bus.curve import keyring
from pipeinfer.bus.frames import FrameHeader
from pipeinfer.command_line import CommandLine
from pipeinfer.gguf.header import only_gguf
from pipeinfer.messages import GroupFault, Message, RankStatus, State
from pipeinfer.processes import cpu_quota, map_large_allocations
from pipeinfer.runtime.child import (
    FAILED,
    MISCONFIGURED,
    ORDERLY,
    STANDBY_FLAG,
    ParentWatch,
    StandbyBuild,
    StatusWriter,
    inherited_status_writer,
    log_report,
    no_report,
    read_promotion,
)
from pipeinfer.runtime.logs import (
    StatusLine,
    open_streams,
    report_error,
    set_up_logging,
    show_until_ready,
)
from pipeinfer.runtime.memory_holder import (
    HOLDER_VARIABLE,
    claimed_address,
    keeps_memory,
    wait_for_holder,
)
from pipeinfer.runtime.servers import WAIT_FLAG, port_owner, wait_until_listening
from pipeinfer.runtime.shell import ProcessOptions, Shell, StoppedWhileBuilding
from pipeinfer.runtime.stage import (
    INCARNATION_VARIABLE,
    FencedOut,
    Stage,
    StageContext,
    builder,
    incarnation_after,
    own_incarnation,
)
from pipeinfer.settings import ConfigurationError, Settings
from pipeinfer.topology import Identity, Topology, deployed_topology

log = logging.getLogger(__name__)


def add_reload_handler(
    loop: asyncio.AbstractEventLoop, reload: Callable[[], None], end: Callable[[], None]
) -> None:
    """Makes SIGHUP call `reload` on `loop`, or `end` if this process's terminal was closed."""
    outlives = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN or not _has_terminal()
    loop.add_signal_handler(
        signal.SIGHUP, lambda: reload() if outlives or _has_terminal() else end()
    )


def _has_terminal() -> bool:
    """Whether this process has a controlling terminal; False after that was closed."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


JOINED = ("waiting", "ready", "asleep")  # states of a rank that has met the others


def end_on_group_fault(
    topology: Topology,
    engine: Identity,
    incarnation: int,
    context: zmq.Context[zmq.Socket[bytes]],
    formed: Callable[[], bool],
    end: Callable[[int], object] = os._exit,
) -> Listener:
    """Ends this process at once, with code 1, when the group of `engine` is given up while it is
    process `incarnation`, or when a rank that it has met is another process now. To be called on
    the running loop; the caller closes the listener at the end.

    - formed: whether the ranks have met
    """
    scheduler = Identity("scheduler", group=engine.group).id
    met: dict[int, int] = {}  # incarnations of the other ranks since the group was formed

    def give_up(reason: str) -> None:
        log.error("%s; this process ends to be started again", reason)
        end(FAILED)  # at once: an orderly end would wait for the thread of a step that hangs

    def on_message(_channel: str, _header: FrameHeader, message: Message) -> None:
        if isinstance(message, GroupFault):
            if message.group == engine.group and incarnation in message.incarnations:
                give_up(f"{scheduler}: {message.reason}")
        elif isinstance(message, RankStatus) and message.group == engine.group:
            if message.incarnation > met.get(message.rank, message.incarnation):
                give_up(f"rank {message.rank} was started again")
            elif formed() and message.state in JOINED:
                met[message.rank] = message.incarnation

    listener = Listener(topology, context)
    listener.listen(scheduler, "group")
    for rank in range(topology.ranks(engine.group)):
        if rank != engine.rank:
            listener.listen(Identity("engine", engine.group, rank).id, "group")
    listener.start(on_message)
    return listener


class InProcess:
    """Runs `identities` in this process until `stop()`, or until one of them ends by itself."""

    def __init__(
        self,
        settings: Settings,
        topology: Topology,
        identities: list[Identity],
        context: zmq.Context[zmq.Socket[bytes]],
    ) -> None:
        self._shells = [Shell(settings, topology, identity, context) for identity in identities]
        self._stopping = False

    async def run(self) -> int:
        """Runs the stages; returns the first exit code that is not 0. Nothing is started again."""
        tasks = [asyncio.create_task(run_shell(shell)) for shell in self._shells]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for shell in self._shells:
            shell.stop()
        codes = await asyncio.gather(*tasks)
        for shell in self._shells:
            await asyncio.to_thread(shell.join_builder)
        return next((code for code in codes if code != ORDERLY), ORDERLY)

    def states(self) -> dict[str, tuple[State, str]]:
        """By stage id: the stage's state, and its activity or the reason why it waits."""
        return {shell.identity.id: shell.state() for shell in self._shells}

    def reload(self) -> None:
        """Makes each stage read its files again (SIGHUP)."""
        for shell in self._shells:
            shell.reload()

    def stop(self) -> None:
        """Drains the gateway, whose end ends the rest; without one, or called again, stops
        everything."""
        gateways = [shell for shell in self._shells if shell.identity.name == "gateway"]
        if self._stopping or not gateways:
            for shell in self._shells:
                shell.stop()
            return
        self._stopping = True
        for shell in gateways:
            shell.drain()


# Messages and requests form no cycles. With the default threshold the collector walks all of them
# many times a second, which at 1,024 requests more than doubles a step of the scheduler.
GC_THRESHOLDS = (100_000, 20, 100)
# Connections that end normally form no cycles either. Others may, of some twenty objects and a few
# KiB: with the thresholds above tens of MiB would be left uncollected.
GATEWAY_GC_THRESHOLDS = (5_000, 20, 100)


def main(arguments: Sequence[str] | None = None, stage: str | None = None) -> int:
    """Runs a stage until it stops; returns the exit code. `stage`: given by a script in stages/."""
    open_streams()
    command_line, holder = parser(stage), os.environ.get(HOLDER_VARIABLE)
    options, flags = command_line.parse_known_args(arguments)
    try:
        file = options.topology or os.environ.get(f"{config.PREFIX}TOPOLOGY")
        topology = deployed_topology(file, os.environ)
        settings = stage_settings(topology, config.parse_flags(flags), os.environ)
        elected = _elect(topology, stage or options.stage, options, settings)
        identity = elected.identity if elected is not None else _named_identity(stage, options)
        topology.address(identity.id)
        if topology.has_tcp():
            keyring(topology, identity.id)  # a missing key ends it here, with one line
        flags = (
            flags[1:] if flags[:1] == [stage] else flags
        )  # `swap` names the stage for a script too
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return MISCONFIGURED
    set_up_logging(settings, identity.id)
    incarnation = own_incarnation(os.environ)
    status = inherited_status_writer(os.environ, incarnation)
    watch = ParentWatch(-1 if status is None else status.sink) if options.child else None
    if identity.name != "engine":  # it makes large arrays all the time
        map_large_allocations()
    if options.wait_fd is not None:
        builder(identity.name)  # loads its modules meanwhile
        if not wait_until_listening(options.wait_fd):
            return ORDERLY
    gc.set_threshold(*(GATEWAY_GC_THRESHOLDS if identity.name == "gateway" else GC_THRESHOLDS))
    build = partial(_build, identity.name, tuple(options.listen_fd))
    if elected is not None and elected.is_standby:
        build = StandbyBuild(build, StageContext(settings, topology, identity, 0, log_report))
        elected.wait()
        log.info("the process of %s has ended, and its standby is promoted", identity.id)
        incarnation = time.time_ns()
    elif options.await_promotion:
        report = no_report if status is None else status.write
        build = StandbyBuild(build, StageContext(settings, topology, identity, 0, report))
        incarnation = read_promotion(sys.stdin)
        if not incarnation:
            return ORDERLY
        if status is not None:
            status.incarnation = incarnation
    ties = ParentTies(incarnation, status, watch)
    try:
        return uvloop.run(_run(settings, topology, identity, options, ties, build))
    except FencedOut as error:
        if status is not None:
            status.write(
                "failed", str(error), error.newest
            )  # the next process gets a greater number
            return FAILED
        return FAILED if error.superseded else _start_again(error.newest, holder)


def _named_identity(stage: str | None, options: argparse.Namespace) -> Identity:
    return Identity(stage or options.stage, options.group, options.rank, options.index)


def _elect(
    topology: Topology, name: str, options: argparse.Namespace, settings: Settings
) -> ElectedInstance | None:
    """Claims a stage; the result must be kept as long as the stage runs. None without --claim. Sets
    the address of an engine's memory holder to that of its place."""
    if not options.claim:
        return None
    folder, engine = Path(options.claim), name == "engine"
    if engine and settings.standby and settings.tp > 1:
        raise ConfigurationError(
            "--standby: engines that claim their places have standbys with --tp 1 only"
        )
    elected = elect_instance(topology, name, options.on, folder, engine and settings.standby)
    # HOLDER_VARIABLE is the folder: each engine that claims its place there has its own holder.
    kept = engine and keeps_memory(settings)
    if kept and Path(os.environ.get(HOLDER_VARIABLE, "")) == folder:
        os.environ[HOLDER_VARIABLE] = claimed_address(folder, elected.identity.id)
        wait_for_holder(os.environ[HOLDER_VARIABLE])
    return elected


def stage_settings(
    topology: Topology, flags: dict[str, object], environ: dict[str, str] | os._Environ[str]
) -> Settings:
    """Settings of one stage: flags over environment over the topology's [settings].

    A folder with a single GGUF file stands for that file, as in `prepare_settings`, so the model is
    served by the file's name.
    """
    named = {**topology.defaults(), **config.from_environment(environ), **flags}
    settings = topologies.check_settings(config.build(named), topology)
    folder = Path(os.path.expanduser(settings.model))  # noqa: PTH111 (a Path raises for an unknown user)
    file = only_gguf(folder) if settings.model and folder.is_dir() else None
    return settings if file is None else msgspec.structs.replace(settings, model=str(file))


def parser(stage: str | None) -> CommandLine:
    """The parser of the command line; without a `stage` its name is an argument."""
    command_line = CommandLine(
        prog=f"stages/{stage}.py" if stage else "python -m pipeinfer.runtime",
        description="Runs one stage. Further flags are those of `pipeinfer serve`.",
    )
    if stage is None:
        command_line.add_argument("stage", choices=topologies.NAMES)
    command_line.add_argument(
        "--topology", metavar="FILE", help="default: PIPEINFER_STAGES says it all"
    )
    command_line.add_argument("--group", type=int, default=0)
    command_line.add_argument("--rank", type=int, default=0)
    command_line.add_argument("--index", type=int, default=0)
    command_line.add_argument(
        "--claim",
        metavar="DIR",
        default="",
        help="be the first stage of this name that no other process of this host is; DIR is theirs "
        "in common",
    )
    command_line.add_argument(
        "--on", metavar="HOST", default="", help="claim a stage of this host only"
    )
    command_line.add_argument(
        "--child", action="store_true", help="stop when the parent process is gone"
    )
    command_line.add_argument(
        STANDBY_FLAG,
        action="store_true",
        help="be a standby until stdin says by which number it is to serve",
    )
    command_line.add_argument(
        "--listen-fd",
        type=int,
        action="append",
        default=[],
        metavar="N",
        help="a listening socket of the parent process, instead of --host and --port",
    )
    command_line.add_argument(
        WAIT_FLAG,
        type=int,
        metavar="N",
        help="begin when the parent process writes into this pipe, and end when it closes it",
    )
    return command_line


@dataclass(frozen=True)
class ParentTies:
    """The ties of this process to the one that started it.

    Attributes:
    - incarnation: given by it, or else from the clock
    - status: writes to its status pipe; None without a pipe
    - watch: ends this process when it has gone; None without --child
    """

    incarnation: int
    status: StatusWriter | None
    watch: ParentWatch | None


def _start_again(newest: int, holder: str | None) -> NoReturn:
    """Runs the command of this process again, with an incarnation after `newest`, because some of
    the other stages may have received the present one.

    - holder: the value of HOLDER_VARIABLE at the start of the process
    """
    if holder is not None:
        os.environ[HOLDER_VARIABLE] = holder
    os.environ[INCARNATION_VARIABLE] = str(incarnation_after(newest, time.time_ns()))
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _build(name: str, listen_fds: tuple[int, ...], context: StageContext) -> Stage:
    stage = builder(name)(replace(context, listen_fds=listen_fds))
    gc.collect()
    gc.freeze()  # modules and weights stay: no collection looks at them again
    return stage


async def _run(
    settings: Settings,
    topology: Topology,
    identity: Identity,
    options: argparse.Namespace,
    ties: ParentTies,
    build: Callable[[StageContext], Stage],
) -> int:
    context = zmq.Context.instance()
    raise_socket_limits(context, topology)
    process = ProcessOptions(
        ties.incarnation,
        busy_poll_seconds(settings, topology, identity),
        forks=identity.name != "engine",  # which uses a GPU, or holds the weights
    )
    shell = Shell(settings, topology, identity, context, build, process)
    if ties.status is not None:
        shell.on_state_change = ties.status.write
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, shell.drain)
    loop.add_signal_handler(signal.SIGUSR1, shell.leave)
    add_reload_handler(loop, shell.reload, shell.drain)
    if ties.watch is not None:
        ties.watch.set_stop(lambda: loop.call_soon_threadsafe(shell.stop))
    else:
        loop.add_signal_handler(signal.SIGINT, shell.drain)
        if identity.name == "engine":
            if settings.standby and not options.claim:
                log.warning("--standby: no supervisor started this engine, so it has none")
            end_on_group_fault(topology, identity, shell.incarnation, context, lambda: shell.built)
    if options.child:  # its parent shows the start of all stages
        return await run_shell(shell, reports=ties.status is None)
    line = StatusLine(settings.log_format == "text")
    starting = asyncio.create_task(show_until_ready(lambda: {identity.id: shell.state()}, line))
    try:
        return await run_shell(shell)
    finally:
        starting.cancel()
        line.clear()


async def run_shell(shell: Shell, reports: bool = True) -> int:
    """Runs the shell; returns its exit code. Its error is reported on stderr in one line.

    - reports: whether errors of a configuration are reported, too; a supervisor that received one
      reports it once for all stages
    """
    try:
        await shell.run()
        return ORDERLY
    except StoppedWhileBuilding:
        return ORDERLY
    except FencedOut:
        raise
    except ConfigurationError as error:
        if reports:
            report_error(shell.settings, str(error))
        return MISCONFIGURED
    except AddressTaken as error:  # perhaps taken by the previous process, so a restart may help
        host, _, port = error.endpoint.removeprefix("tcp://").rpartition(":")
        whose = port_owner(host.strip("[]*"), int(port))
        report_error(shell.settings, f"{shell.identity.id}: {error}{whose and ' '}{whose}")
        return FAILED
    except zmq.ZMQError as error:
        report_error(shell.settings, f"{shell.identity.id}: {error}")
        return FAILED
    except Exception:
        logging.getLogger(__name__).exception("%s stopped", shell.identity.id)
        return FAILED


# in the folder for temporary files: the id of the stage that was claimed here
INSTANCE_FILE = "pipeinfer-stage"


class ElectedInstance:
    """A claimed stage: `identity` belongs to this process as long as this object lives; a standby's
    once `wait` has returned. A file names it for health checks."""

    def __init__(self, identity: Identity, lock: IO[str], place: IO[str] | None = None) -> None:
        """Takes the locks.

        - lock: of the identity, which this process has; for a standby, of its place as a standby
        - place: for a standby: lock of the identity, which another process has; None: no standby
        """
        self.identity = identity
        self._lock, self._place = lock, place
        with _locked_file(instance_file()) as file:
            file.truncate()
            file.write(identity.id)

    @property
    def is_standby(self) -> bool:
        """Whether another process has the identity."""
        return self._place is not None

    def wait(self) -> None:
        """Waits, in a standby, until the process that had the identity has ended. Meanwhile
        SIGTERM, SIGUSR1 and SIGINT end this process, also in a container, where none does by
        itself."""
        assert self._place is not None
        before = {
            number: signal.signal(number, lambda *_: os._exit(ORDERLY))
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
        }
        fcntl.flock(self._place, fcntl.LOCK_EX)
        for number, handler in before.items():
            signal.signal(number, handler)
        self._lock.close()  # for the next standby
        self._lock, self._place = self._place, None


def elect_instance(
    topology: Topology, name: str, on: str, folder: Path, standby: bool = False
) -> ElectedInstance:
    """Claims a stage called `name` on host `on` ("" for any) that no other process has claimed.

    - folder: of the locks, the same for all processes of the host
    - standby: if all are claimed, become the standby of the first that has none

    Raises ConfigurationError if there is none left, or if a lock or the file for health checks
    belongs to another user.
    """
    entries = topology.stages_on(on, name)
    for entry in entries:
        lock = _lock_at_once(folder / f"{entry.identity.id}.lock")
        if lock is not None:
            return ElectedInstance(entry.identity, lock)
    for entry in entries if standby else ():
        lock = _lock_at_once(folder / f"{entry.identity.id}.standby.lock")
        if lock is not None:
            place = _locked_file(folder / f"{entry.identity.id}.lock")
            return ElectedInstance(entry.identity, lock, place)
    where = f" on host {on}" if on else ""
    raise ConfigurationError(
        f"the topology has {len(entries)} stages {name!r}{where}, and all of them run"
        + (", with their standbys" if standby else "")
    )


def _lock_at_once(path: Path) -> IO[str] | None:
    """The file with its lock; None if another process has that."""
    lock = _locked_file(path)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock


def instance_file() -> Path:
    """The file with the id of the stage that was claimed here; each container has its own."""
    return Path(tempfile.gettempdir(), INSTANCE_FILE)


def elected_instance() -> str:
    """The id of the stage that was claimed here. Raises OSError, or ConfigurationError if the file
    is not this user's: files of other users are not trusted."""
    with _locked_file(instance_file(), os.O_RDONLY) as file:
        return file.read()


def _locked_file(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> IO[str]:
    """Opens a plain file of this user's, and no link to another one, because folders for temporary
    files are shared, and another user may have put a file there. Raises ConfigurationError."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        reason = "it is a link" if error.errno == errno.ELOOP else error.strerror
        raise ConfigurationError(f"cannot open {path}: {reason}") from None
    status = os.fstat(descriptor)
    is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_nlink == 1
    if not is_own:
        os.close(descriptor)
        raise ConfigurationError(f"{path} is not a plain file of this user's")
    return os.fdopen(descriptor, "r" if flags == os.O_RDONLY else "r+")


# Seconds; if steps take longer, the wake-up of a process that slept adds little to them.
BUSY_POLL_SECONDS = 0.005
CORES_PER_PROCESS = 3  # for each process of a host: its loop, its threads, and its clients


def busy_poll_seconds(
    settings: Settings, topology: Topology, identity: Identity, root: Path = Path("/")
) -> float:
    """Seconds of busy polling, 0 for none; see Reader.start.

    An engine decides by itself: on a CPU it needs the cores to compute, on a GPU its loop stays
    awake while steps are in flight.
    """
    if identity.name == "engine" or settings.stay_awake == "never":
        return 0.0
    if settings.stay_awake == "always":
        return BUSY_POLL_SECONDS
    here = topology.entry(identity.id).host
    processes = sum(entry.host == here for entry in topology.entries)
    enough_cores = usable_cores(root) >= CORES_PER_PROCESS * processes
    return BUSY_POLL_SECONDS if enough_cores and on_gpus(settings, root) else 0.0


def usable_cores(root: Path = Path("/")) -> int:
    """Number of cores that this process may use, within its control group's quota if it has one."""
    allowed = len(os.sched_getaffinity(0))
    quota = cpu_quota(root)
    return allowed if quota is None else min(allowed, quota)


def on_gpus(settings: Settings, root: Path = Path("/")) -> bool:
    """Whether engines compute on GPUs, as far as a process can tell that does not import torch."""
    if settings.device == "auto":
        return any((root / "dev").glob("nvidia[0-9]*"))
    return settings.device == "cuda"
