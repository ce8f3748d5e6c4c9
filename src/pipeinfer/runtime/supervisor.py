"""Starts the stages of one host as child processes, starts again those that die, and swaps stages;
and prepares all of that for a server of one host.

- Supervisor: runs the stages of a topology that are this host's
- SwapController: puts another process into a stage's place
- prepare_settings: settings made ready
- local_stages: a topology in a temporary folder, and the service that runs the stages
- LocalServer: `pipeinfer serve` in a process of its own

Knows processes and when they are ready, no request: the stages themselves see that none is lost
(core.Leave, and recovery from their neighbours). All ranks of a group go down together, because a
rank that hangs inside a collective cannot be talked to.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec
import zmq

from pipeinfer import settings as config
from pipeinfer import topology as topologies
from pipeinfer.bus.bus import Bus, Listener
from pipeinfer.bus.frames import FrameHeader
from pipeinfer.checkpoint.config import read_outline
from pipeinfer.checkpoint.lora import read_lora_modules
from pipeinfer.checkpoint.pooling import read_pooling
from pipeinfer.checkpoint.source import find_model
from pipeinfer.command_line import did_you_mean
from pipeinfer.control import CHANNEL, Swap, SwapState
from pipeinfer.core import EVERYONE, HEARTBEAT_SECONDS, Send, stage_id
from pipeinfer.gguf.header import is_gguf
from pipeinfer.messages import GroupFault, Heartbeat, Message, State
from pipeinfer.observe import observer
from pipeinfer.other_servers import flag
from pipeinfer.runtime import servers
from pipeinfer.runtime.child import (
    FAILED,
    MAX_DEATHS,
    MISCONFIGURED,
    ORDERLY,
    STANDBY_FLAG,
    Child,
    Command,
    Standbys,
    exit_cause,
)
from pipeinfer.runtime.logs import report_error
from pipeinfer.runtime.memory_holder import (
    HOLDER_VARIABLE,
    HolderProcess,
    KeptHolders,
    keeps_memory,
    kept_holders,
)
from pipeinfer.runtime.servers import FOLDER_PREFIX, TOPOLOGY, InheritedSockets, record_running
from pipeinfer.runtime.stage import LEAVE_TIMEOUT, IncarnationNumbers, heartbeat
from pipeinfer.settings import DEMO, PREFIX, ConfigurationError, Settings, to_environment
from pipeinfer.topology import (
    SECRET_VARIABLE,
    STAGES_VARIABLE,
    Identity,
    Topology,
    deployed_topology,
)

if TYPE_CHECKING:
    from pipeinfer.runtime.entry import InProcess

log = logging.getLogger(__name__)

SUPERVISOR_IDENTITY = Identity("supervisor")  # no stage, but it sends heartbeats as one

LEAVE_MARGIN = 5.0  # seconds beyond LEAVE_TIMEOUT that a leaving stage gets
STOPPING = "the server is stopping"
FIRST_REPORT_TIMEOUT = 60.0  # seconds within which a swapped-in command must report a status


class SwapController:
    """The control side of a supervisor: on `Swap` it puts another process in the place of a running
    stage, and the old command back if that fails; publishes `SwapState` at every change.

    - children: by stage id
    - start: starts a child's command, unless the server does not need it any more, and handles its
      process once the swap is over; OSError if the command cannot be executed
    - restart: does the same, and ends everything if it cannot
    - standbys: of engines, which take over in a swap
    - gateway_seconds: time that a gateway may take to finish its streams
    """

    def __init__(
        self,
        topology: Topology,
        context: zmq.Context[zmq.Socket[bytes]],
        children: Mapping[str, Child],
        start: Callable[[Child], Awaitable[None]],
        restart: Callable[[Child], Awaitable[None]],
        standbys: Standbys,
        gateway_seconds: float,
    ) -> None:
        self._incarnation = time.time_ns()
        self._bus = Bus(SUPERVISOR_IDENTITY, self._incarnation, topology, context)
        self._children = children
        self._start = start
        self._restart = restart
        self._standbys = standbys
        self._gateway_seconds = gateway_seconds
        self._tasks: set[asyncio.Task[None]] = set()
        self._heartbeats: asyncio.Task[None] | None = None
        self._stopping = False

    def start(self) -> None:
        """Begins to listen, on the running loop."""
        self._bus.bind()
        self._bus.start(self._on_message)
        self._heartbeats = asyncio.create_task(self._publish_heartbeats())

    def stop(self) -> None:
        """Takes no swap any more, because all stages will end, and finishes swaps under way."""
        self._stopping = True

    def publish_death(self, child: Child, beat: Heartbeat) -> None:
        """Publishes that a stage's process ended, which the process cannot do itself."""
        self._bus.send(Send("telemetry", EVERYONE, beat))
        if child.death is not None:
            self._bus.send(Send("group", EVERYONE, child.death))

    async def close(self) -> None:
        """Waits for swaps under way, when the children are gone, and closes the sockets."""
        self._stopping = True
        await asyncio.gather(*self._tasks)
        if self._heartbeats is not None:
            self._heartbeats.cancel()
        self._bus.close()

    async def _publish_heartbeats(self) -> None:
        """Publishes heartbeats of the supervisor: a command that receives them will also receive an
        answer. Deaths without a successor are published with each."""
        while True:
            for child in self._children.values():
                if child.death is not None:
                    self._bus.send(Send("group", EVERYONE, child.death))
            stats = {"standbys_ready": float(self._standbys.ready)}
            beat = heartbeat(
                SUPERVISOR_IDENTITY, self._incarnation, "ready", pid=os.getpid(), stats=stats
            )
            self._bus.send(Send("telemetry", EVERYONE, beat))
            await asyncio.sleep(HEARTBEAT_SECONDS)

    def _on_message(self, _channel: str, header: FrameHeader, message: Message) -> None:
        if isinstance(message, Swap):
            task = asyncio.create_task(self._swap(message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._bus.reader.drop(f"a {type(message).__name__} of {header.sender}")

    def _publish_state(self, swap: Swap, state: Any, reason: str = "", **fields: Any) -> None:
        log.info("swap of %s: %s", swap.stage, " ".join(filter(None, (state, reason))))
        swap_state = SwapState(swap.swap, swap.stage, state, reason, **fields)
        self._bus.send(Send(CHANNEL, EVERYONE, swap_state))

    async def _swap(self, swap: Swap) -> None:
        group = self._group(swap.stage)
        if not group:
            self._publish_state(swap, "failed", f"there is no {swap.stage} here")
            return
        if self._stopping:
            self._publish_state(swap, "failed", STOPPING)
            return
        if any(child.swapping for child in group):
            pids = ", ".join(str(child.pid) for child in group)
            self._publish_state(
                swap, "failed", f"a swap is under way; to end it, kill process {pids}"
            )
            return
        for child in group:
            child.swapping = True
        try:
            for child in group:
                async with child.starting:  # a restart that has begun gets its process first
                    continue
            await self._replace(swap, group)
        finally:
            for child in group:
                child.swapping = False

    def _group(self, stage: str) -> list[Child]:
        """The child, or all ranks of its group: they share an epoch and cannot go one by one."""
        child = self._children.get(stage)
        if child is None or child.identity.name != "engine":
            return [] if child is None else [child]
        same = (c for c in self._children.values() if c.identity.name == "engine")
        return [c for c in same if c.identity.group == child.identity.group]

    async def _replace(self, swap: Swap, group: list[Child]) -> None:
        old, before = tuple(c.pid for c in group), [c.command for c in group]
        if not swap.command and group[0].identity.name == "engine":
            await asyncio.gather(*map(self._standbys.renew, group))
        began = time.monotonic()
        self._publish_state(swap, "leaving", old=old)
        await self._stop_group(group)
        failure = await self._start_group(swap, group, old)
        if not failure:
            new, seconds = tuple(c.pid for c in group), time.monotonic() - began
            self._publish_state(swap, "done", old=old, new=new, seconds=seconds)
            return
        for child in group:
            child.kill()
        await self._wait_ended(group, None)
        for child, command in zip(group, before, strict=True):
            child.command, child.swapping = command, False
            await self._restart(child)
        if all(child.running for child in group):
            failure += "; the command that ran before is started again"
        self._publish_state(swap, "failed", failure, old=old)

    async def _stop_group(self, group: list[Child]) -> None:
        """Ends the running processes, in good order if they can."""
        for child in group:
            child.signal(signal.SIGUSR1)
        leave_seconds = (
            self._gateway_seconds if group[0].identity.name == "gateway" else LEAVE_TIMEOUT
        )
        if not await self._wait_ended(group, leave_seconds + LEAVE_MARGIN):
            log.warning("%s did not leave in time and is killed", group[0].identity.id)
            for child in group:
                child.kill()
            await self._wait_ended(group, None)

    @staticmethod
    async def _wait_ended(group: list[Child], seconds: float | None) -> bool:
        """Whether all processes ended within `seconds`."""
        tasks = [asyncio.ensure_future(c.process.wait()) for c in group if c.process is not None]
        if not tasks:
            return True
        _, pending = await asyncio.wait(tasks, timeout=seconds)
        for wait in pending:
            wait.cancel()
        return not pending

    async def _start_group(self, swap: Swap, group: list[Child], old: tuple[int, ...]) -> str:
        """Starts the new processes and waits until they are ready; returns "", or why they are
        not."""
        try:
            for child in group:
                if swap.command:
                    child.command = Command(swap.command, swap.folder)
                await self._start(child)
        except (OSError, ValueError) as error:  # ValueError: a NUL in its words
            return f"cannot start {group[0].command}: {getattr(error, 'strerror', '') or error}"
        if self._stopping and not all(child.running for child in group):
            return STOPPING
        self._publish_state(swap, "starting", old=old, new=tuple(c.pid for c in group))
        return await self._wait_ready(group)

    async def _wait_ready(self, group: list[Child]) -> str:
        """Waits until all are ready, or one of them never will be; returns "", or why it is not."""
        ends = [asyncio.ensure_future(self._describe_end(child)) for child in group]
        ready = asyncio.ensure_future(_all_set([child.ready for child in group]))
        reported = asyncio.ensure_future(_all_set([child.has_reported for child in group]))
        try:
            await asyncio.wait(
                {*ends, reported}, timeout=FIRST_REPORT_TIMEOUT, return_when="FIRST_COMPLETED"
            )
            if not any(task.done() for task in (*ends, reported)):
                return f"its command was no stage that spoke within {FIRST_REPORT_TIMEOUT:g} s"
            await asyncio.wait({*ends, ready}, return_when="FIRST_COMPLETED")
            dead = [end for end, child in zip(ends, group, strict=True) if not child.running]
            return await dead[0] if dead else ""
        finally:
            for task in (*ends, ready, reported):
                task.cancel()

    @staticmethod
    async def _describe_end(child: Child) -> str:
        assert child.process is not None
        code = await child.process.wait()
        why = f": {child.failure_reason}" if child.failure_reason else ""
        return f"process {child.process.pid} ended before it was ready ({exit_cause(code)}){why}"


async def _all_set(events: list[asyncio.Event]) -> None:
    for event in events:
        await event.wait()


STOP_GRACE = 10.0  # seconds a stage may take to stop after its own drain


class Supervisor:
    """Runs `identities` until `stop()` or until one of them cannot go on; see `run`."""

    def __init__(
        self,
        settings: Settings,
        topology: Topology,
        topology_file: str,
        identities: list[Identity],
        context: zmq.Context[zmq.Socket[bytes]],
        clock: Callable[[], int] = time.time_ns,
        kept: KeptHolders | None = None,
    ) -> None:
        """Begins with no process.

        - clock: Unix time in ns, which may be set back
        - kept: holders that an earlier server left
        """
        self._settings = settings
        self._topology_file = topology_file
        numbers = IncarnationNumbers(clock)
        self._children = {i.id: Child(i, numbers=numbers) for i in identities}
        self._standbys = Standbys(self._start_standby)
        ranks = Counter(i.group for i in identities if i.name == "engine")
        elsewhere = any(count < settings.tp for count in ranks.values())
        if settings.standby and elsewhere:
            log.warning("--standby: there are none for groups with ranks on other hosts")
        if not settings.standby or elsewhere:
            self._standbys.stop()
        for child in self._children.values():
            child.on_report = partial(self._on_report, child)
        self._listener = Listener(topology, context)
        self._swaps: SwapController | None = None
        if topology.supervisor:
            hands = (self._start, self._restart, self._standbys, settings.drain_timeout)
            self._swaps = SwapController(topology, context, self._children, *hands)
        self._http_sockets = (
            InheritedSockets()
        )  # for HTTP; each gateway process inherits its sockets
        self._kept = kept or KeptHolders()
        self._holders: dict[str, HolderProcess] = {}  # by the engine's id
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()  # the gateways finish what runs
        self._ending = False  # the gateways have finished: nothing is started any more
        self._configs_valid = asyncio.Event()
        self._code = ORDERLY
        self.on_give_up: Callable[[str], None] | None = None

    async def run(self) -> int:
        """Starts everything. The gateway only loads its modules, until the engine's configuration
        has proved valid.

        Returns an exit code when all children are gone. Raises ConfigurationError if it cannot
        listen.
        """
        engines = [i.identity for i in self._other_children() if i.identity.name == "engine"]
        self._kept.end_others([i.id for i in engines] if keeps_memory(self._settings) else [])
        groups = {identity.group for identity in engines}
        schedulers = {stage_id("scheduler", group) for group in groups}  # on another host perhaps
        for stage in sorted(self._children.keys() - schedulers):
            self._listener.listen(stage)
        for stage in sorted(schedulers):
            self._listener.listen(stage, "telemetry", "group")
        self._listener.start(self._on_message)
        if self._swaps is not None:
            self._swaps.start()
        try:
            if self._gateways():
                self._http_sockets.bind(self._settings.host, self._settings.port)
                self._publish()
            for child in sorted(self._children.values(), key=_start_order):
                await self._start(child)
            self._check_configs()  # a host without engines has no configuration to wait for
            await self._wait_first(self._configs_valid, self._stopping)
            if self._gateways() and not self._stopping.is_set():
                self._http_sockets.listen()
            await self._stopping.wait()
            await self._stop_children()
        finally:
            self._stopping.set()
            self._kill_all()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._standbys.close()
            if self._swaps is not None:
                await self._swaps.close()
            for holder in self._holders.values():
                await holder.close()
            self._http_sockets.close()
            self._listener.close()
        return self._code

    def _publish(self) -> None:
        """Publishes URL and model, for commands on this host that look for a server."""
        made = self._settings
        url = servers.url_from_here(made.host, self._http_sockets.port, bool(made.tls_cert))
        served = servers.ServerInfo(url=url, model=made.model_name, path=made.model)
        servers.publish_served_model(Path(self._topology_file), served)

    def states(self) -> dict[str, tuple[State, str]]:
        """By stage id of this host: the stage's state, and its activity or the reason why it waits;
        empty once the server is stopping."""
        children = {} if self._stopping.is_set() else self._children
        return {stage: child.status for stage, child in children.items()}

    def stop(self, code: int = ORDERLY) -> None:
        """Drains and stops everything; called again, kills."""
        if self._stopping.is_set():
            self._kill_all()
            return
        self._code = code
        self._stopping.set()
        self._standbys.stop()
        if self._swaps is not None:
            self._swaps.stop()
        # Only the gateway's own copies are left: it refuses requests, and then closes them.
        self._http_sockets.close()

    def reload(self) -> None:
        """Makes the gateways read their files again (SIGHUP)."""
        for child in self._gateways():
            child.reload()

    def _kill_all(self) -> None:
        self._ending = True
        for child in self._children.values():
            child.kill()

    def _gateways(self) -> list[Child]:
        return [c for c in self._children.values() if c.identity.name == "gateway"]

    def _other_children(self) -> list[Child]:
        return [c for c in self._children.values() if c.identity.name != "gateway"]

    def _group(self, group: int) -> list[Child]:
        children = self._children.values()
        return [c for c in children if c.identity.name == "engine" and c.identity.group == group]

    # ------------------------------------------------------------------------- begin, death, begin

    async def _start(self, child: Child) -> None:
        """Starts the child's command, and watches it."""
        async with child.starting:
            if self._should_run(child):
                await self._spawn(child)
                self._watch(child)

    def _should_run(self, child: Child) -> bool:
        """Whether the child's process is to run: while gateways finish, all stages run that they
        need."""
        if self._ending or not self._stopping.is_set():
            return not self._ending
        return child.process is not None and child.identity.name != "gateway"

    async def _restart(self, child: Child) -> None:
        """Starts the child's last command again; gives up if that is impossible."""
        try:
            await self._start(child)
        except OSError as error:
            self._give_up(f"{child.identity.id}: cannot start {child.command}: {error}", FAILED)

    async def _spawn(self, child: Child) -> None:
        ranks = self._group(child.identity.group) if child.identity.name == "engine" else []
        standby = self._standbys.take(child, ranks) if ranks else None
        if standby is not None:
            child.promote(standby)
            log.info("the standby of %s, process %d, is promoted", child.identity.id, child.pid)
            return
        sockets = self._http_sockets
        extra = (sockets.arguments, sockets.descriptors)
        arguments, descriptors = extra if child.identity.name == "gateway" else ([], [])
        words = [*self._arguments(child.identity), *arguments]
        await child.start(words, self._environment(child.identity), descriptors)
        if not self._should_run(child):
            child.kill()  # too late for the signals that the others got

    async def _start_standby(self, standby: Child) -> asyncio.subprocess.Process:
        words = [*self._arguments(standby.identity), STANDBY_FLAG]
        return await standby.start(words, self._environment(standby.identity), (), standby=True)

    def _arguments(self, who: Identity) -> list[str]:
        return [
            who.name, "--topology", self._topology_file, "--group", str(who.group),
            "--rank", str(who.rank), "--index", str(who.index), "--child",
        ]  # fmt: skip

    def _environment(self, who: Identity) -> dict[str, str]:
        inherited = {
            k: v for k, v in os.environ.items() if not k.startswith(PREFIX) or k == SECRET_VARIABLE
        }
        environment = {**inherited, **to_environment(self._settings)}
        if who.name == "engine" and keeps_memory(self._settings):
            if who.id not in self._holders:
                self._holders[who.id] = HolderProcess(who.id, self._kept)
                self._holders[who.id].start()
            environment[HOLDER_VARIABLE] = self._holders[who.id].address
        return environment

    def _watch(self, child: Child) -> None:
        assert child.process is not None
        task = asyncio.create_task(self._on_end(child, child.process))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _on_end(self, child: Child, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        if process is child.process:
            child.read_reports()  # its last reports, before anything is made of its end
        if child.swapping or not self._should_run(child):
            return
        name = child.identity.id
        if code == MISCONFIGURED and not child.has_served:
            why = child.failure_reason
            if self.on_give_up is None:  # else the caller reports it
                report_error(self._settings, why or f"{name} cannot start")
            self._give_up(": ".join(filter(None, (f"{name} cannot start", why))), code)
            return
        if code >= 0 and not child.config_valid:  # a process killed by a signal may be valid
            self._give_up(f"{name} ended while it started ({exit_cause(code)})", FAILED)
            return
        # A stage that has served may be refused resources that it had, such as memory that other
        # processes took meanwhile.
        child.deaths += 1
        why = f": {child.failure_reason}" if child.failure_reason else ""
        if child.deaths > MAX_DEATHS:
            died = f"{name} died {child.deaths} times and was never ready between"
            self._give_up(f"{died}{why}", FAILED)
            return
        log.warning("%s ended (%s)%s, starting it again", name, exit_cause(code), why)
        self._publish_death(child, f"its process ended ({exit_cause(code)}){why}")
        if child.identity.name == "engine" and child.killed_for_group is not process:
            for other in self._group(child.identity.group):
                if other is not child:
                    other.kill_for_group()  # its own watcher starts it again
        await self._restart(child)

    # ---------------------------------------------------------------------------- status and deaths

    def _publish_death(self, child: Child, reason: str) -> None:
        """Publishes the end of a child's process, so that no stage waits until its silence or its
        successor is noticed."""
        notice = child.death_notice(reason)
        if self._swaps is not None and notice is not None:
            self._swaps.publish_death(child, notice)

    def _on_message(self, _channel: str, header: FrameHeader, message: Message) -> None:
        if isinstance(message, GroupFault):
            group = self._group(message.group)
            alive = [child for child in group if child.started_before(message.incarnations)]
            if any(child.killed_for_group is not child.process for child in alive):
                log.error("group %d: %s; restarting its engines", message.group, message.reason)
            for child in alive:
                child.kill_for_group()
        elif isinstance(message, Heartbeat) and header.sender in self._children:
            self._children[header.sender].on_heartbeat(message)
            self._on_report(self._children[header.sender])

    def _on_report(self, child: Child) -> None:
        self._check_configs()
        if child.identity.name == "engine":
            self._standbys.on_status(child)

    def _check_configs(self) -> None:
        """Notes when the engines' configurations are known to be valid."""
        if self._configs_valid.is_set():
            return
        engines = [c for c in self._children.values() if c.identity.name == "engine"]
        if all(engine.config_valid for engine in engines):
            self._configs_valid.set()

    def _give_up(self, reason: str, code: int) -> None:
        if code != MISCONFIGURED:
            log.error("%s; stopping", reason)
        if self.on_give_up is not None:
            self.on_give_up(reason)
        self.stop(code)
        self._code = code

    # ----------------------------------------------------------------------------------------- end

    async def _stop_children(self) -> None:
        """Stops the gateways first, so that requests are finished; then the others."""
        await self._terminate(self._gateways(), self._settings.drain_timeout + STOP_GRACE)
        self._ending = True
        await self._terminate(self._other_children(), STOP_GRACE)

    async def _terminate(self, children: list[Child], seconds: float) -> None:
        for child in children:
            child.signal(signal.SIGTERM)
        tasks = [asyncio.ensure_future(c.process.wait()) for c in children if c.process is not None]
        if not tasks:
            return
        _, pending = await asyncio.wait(tasks, timeout=seconds)
        if pending:
            for child in children:
                child.kill()
            await asyncio.wait(pending)

    @staticmethod
    async def _wait_first(*events: asyncio.Event) -> None:
        tasks = [asyncio.ensure_future(event.wait()) for event in events]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for wait in tasks:
            wait.cancel()


def _start_order(child: Child) -> int:
    """Sort key of the start: engines first, because they take longest, gateways last."""
    return {"engine": 0, "gateway": 2}.get(child.identity.name, 1)


# settings that name a file to read
FILES = ("chat_template", "api_key_file", "tls_cert", "tls_key")


@dataclass(frozen=True)
class LocalStages:
    """Stages of one host.

    Attributes:
    - service: runs the stages of `topology` as processes, or as tasks of one loop
    - topology: with the addresses of the stages
    """

    service: Supervisor | InProcess
    topology: Topology


def prepare_settings(
    given: Mapping[str, object],
    progress: Callable[[str], None],
    check: Callable[[Settings], None] = lambda _settings: None,
) -> Settings:
    """Settings from `given` over the environment over the topology file, the model as a folder.

    A hub id is downloaded here, once, and not by every stage. Raises ConfigurationError.

    - progress: gets lines about steps that take time
    - check: gets the settings before that, and raises errors that should be reported at once
    """
    named = {**config.from_environment(os.environ), **given}
    given_topology = _given(str(named.get("topology", "")))
    defaults = given_topology.defaults() if given_topology is not None else {}
    settings = config.build({**defaults, **named})
    if given_topology is None:  # else on other hosts perhaps
        _check_files(settings)
    check(settings)
    observer.check_opentelemetry(settings)
    if settings.model in ("", DEMO):
        progress(f"no model given: serving the bundled demo model {DEMO!r}")
    folder = find_model(settings, progress)
    found = msgspec.structs.replace(settings, model=str(folder.absolute()))
    return msgspec.structs.replace(
        found,
        served_model_name=(found if is_gguf(folder) else settings).model_name,
        revision="",
        # A stage that is swapped may run in another folder.
        chat_template=_absolute(settings.chat_template),
        record=_absolute(settings.record),
        api_key_file=_absolute(settings.api_key_file),
        tls_cert=_absolute(settings.tls_cert),
        tls_key=_absolute(settings.tls_key),
        profile_dir=_absolute(settings.profile_dir),
    )


def _check_files(settings: Settings) -> None:
    for name in FILES:
        path = str(getattr(settings, name))
        try:
            if path:
                Path(path).open("rb").close()
        except OSError as error:
            why = f"cannot read {path}: {error.strerror}"
            raise ConfigurationError(f"{flag(name)}: {why}") from None


def check_model(settings: Settings) -> None:
    """Raises ConfigurationError for a model that no stage could load, before any is started;
    `settings` are prepared."""
    outline = read_outline(Path(settings.model), settings.model_impl)
    outline.max_model_len(settings.max_model_len)
    pooling = read_pooling(Path(settings.model), settings.task)
    read_lora_modules(settings)
    if settings.enable_lora and pooling is not None:
        raise ConfigurationError("--enable-lora: the model makes vectors, adapters are for texts")


def check_port(settings: Settings, on: str = "") -> None:
    """Raises ConfigurationError if a gateway is to run here and the HTTP port is taken; `on` as for
    `local_stages`.

    The port is not opened yet: that waits until the model's configuration is known to be valid.
    """
    topology = _given(settings.topology)
    if topology is not None:
        here = _host(topology, on)
        if not any(e.name == "gateway" and e.host in here for e in topology.entries):
            return
    servers.check_free(settings.host, settings.port)


def _absolute(path: str) -> str:
    return str(Path(path).absolute()) if path else ""


@contextmanager
def local_stages(
    settings: Settings,
    context: zmq.Context[zmq.Socket[bytes]],
    without: str = "",
    on: str = "",
    on_give_up: Callable[[str], None] | None = None,
) -> Iterator[LocalStages]:
    """The stages of prepared `settings`, all but those called `without`: the caller runs those. The
    folder of their sockets is removed at the end. Raises ConfigurationError.

    - on: only the stages of that host, if the topology names several
    - on_give_up: gets the reason why the processes are not started again any more
    """
    if settings.keep_memory_on_stop and not keeps_memory(settings):
        why = "--in-process" if settings.in_process else "--no-keep-memory"
        raise ConfigurationError(f"--keep-memory-on-stop: memory ends with its engine ({why})")
    if settings.in_process:
        topology = _topology(settings, "inproc://")
        if topology.keyed:
            raise ConfigurationError("--in-process is one process, each stage's keys are its own")
        if settings.standby:
            raise ConfigurationError("--standby: with --in-process there is one process alone")
        from pipeinfer.runtime.entry import InProcess  # all that stages are made of

        identities = [e.identity for e in topology.entries if e.name != without]
        yield LocalStages(InProcess(settings, topology, identities, context), topology)
        return
    folder = tempfile.mkdtemp(prefix=FOLDER_PREFIX)
    try:
        topology = replace(
            _topology(settings, f"ipc://{folder}/"), supervisor=f"ipc://{folder}/supervisor"
        )
        here = _host(topology, on)
        identities = [e.identity for e in topology.entries if e.name != without and e.host in here]
        file = Path(folder, TOPOLOGY)
        file.write_text(topology.to_toml())
        names = {identity.name for identity in identities}
        with kept_holders(settings, _server_name(settings, "gateway" in names)) as kept:
            service = Supervisor(settings, topology, str(file), identities, context, kept=kept)
            service.on_give_up = on_give_up
            with record_running(file):
                yield LocalStages(service, topology)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _server_name(settings: Settings, has_gateway: bool) -> str:
    """The name by which a server finds the memory of an earlier one; "" without a port or a
    topology."""
    if not settings.topology and not (has_gateway and settings.port):
        return ""
    return f"{_absolute(settings.topology)} {settings.host} {settings.port}"


def _topology(settings: Settings, prefix: str) -> Topology:
    topology = _given(settings.topology)
    if topology is None:
        return topologies.local(settings, prefix)
    topologies.check_settings(settings, topology)
    return topology


def _given(file: str) -> Topology | None:
    """The topology of `file` and the environment; None if they give none."""
    return deployed_topology(file, os.environ) if file or os.environ.get(STAGES_VARIABLE) else None


def _host(topology: Topology, on: str) -> list[str]:
    """The values of `host` of the stages that belong to this host; stages without one always do."""
    hosts = topology.hosts()
    if on and on not in hosts:
        there = ", ".join(hosts) or "none"
        meant = did_you_mean(on, hosts)
        reason = f"--on {on}: the topology has no such host; there is {there}{meant}"
        raise ConfigurationError(reason)
    if not on and len(hosts) > 1:
        raise ConfigurationError(f"--on must say which host this is: {', '.join(hosts)}")
    return ["", on or "".join(hosts)]


READY_LINE = "ready "


class ServerNotReady(RuntimeError):
    """A server ended before it was ready; its error is on stderr."""


def serve_flags(settings: Mapping[str, object]) -> list[str]:
    """The settings as words of the command line of `pipeinfer serve`."""
    known = config.settings_help()
    words = [str(settings["model"])] if settings.get("model") else []
    for name, value in settings.items():
        if name == "model":
            continue
        flag = "--" + name.replace("_", "-")
        words += ([flag] if value else []) if known[name].kind is bool else [flag, str(value)]
    return words


def wait_ready(process: subprocess.Popen[str]) -> str:
    """The URL in the ready line of a process whose stdout is a pipe. Raises ServerNotReady."""
    output: IO[str] | None = process.stdout
    assert output is not None
    for line in output:
        if line.startswith(READY_LINE):
            return line.removeprefix(READY_LINE).strip()
    raise ServerNotReady(f"the server ended with code {process.wait()}")


class LocalServer:
    """`pipeinfer serve` on a free port, as a context manager; `url` is set when it is ready.

    All its graphs are captured by then, unless `settings` set that otherwise. `log`: an open file
    for its stderr; None: this process's.
    """

    def __init__(self, settings: Mapping[str, object], log: IO[str] | None = None) -> None:
        usual = {"log_level": "warning", "all_graphs_first": True}
        words = serve_flags({**usual, **settings, "port": 0})
        command = [sys.executable, "-m", "pipeinfer", "serve", *words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        self.url = ""

    def __enter__(self) -> LocalServer:
        try:
            self.url = wait_ready(self.process)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        stop_process(self.process)


def stop_process(process: subprocess.Popen[str], seconds: float = 60.0) -> None:
    """Stops a process by SIGTERM, and by SIGKILL if it does not end."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
