"""Starts the stages of one host as child processes, and starts again what dies.

Knows processes and heartbeats, no request: that none is lost is the stages' own doing. All ranks
of a group go down together, because a rank that waits inside a collective cannot be talked to.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from pipeinfer.bus.bus import Listener
from pipeinfer.bus.frames import Header
from pipeinfer.messages import GroupFault, Heartbeat, Message, State
from pipeinfer.runtime import find
from pipeinfer.runtime.child import Child, exit_cause
from pipeinfer.runtime.deployment import SECRET
from pipeinfer.runtime.door import InheritedSockets
from pipeinfer.runtime.exit_codes import FAILED, MISCONFIGURED, ORDERLY
from pipeinfer.runtime.incarnations import IncarnationNumbers
from pipeinfer.runtime.swap import SwapController
from pipeinfer.settings import PREFIX, Settings, to_environment
from pipeinfer.topology.topology import Identity, Topology

log = logging.getLogger(__name__)

MAX_DEATHS = 5  # deaths of a stage with no readiness in between; one more: give up
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
    ) -> None:
        """`clock`: Unix time in ns, which may be set back."""
        self._settings = settings
        self._topology_file = topology_file
        numbers = IncarnationNumbers(clock)
        self._children = {i.id: Child(i, numbers=numbers) for i in identities}
        for child in self._children.values():
            child.on_report = self._check_configs
        self._listener = Listener(topology, context)
        self._swaps: SwapController | None = None
        if topology.supervisor:
            hands = (self._start, self._restart, settings.drain_timeout)
            self._swaps = SwapController(topology, context, self._children, *hands)
        self._http_sockets = (
            InheritedSockets()
        )  # for HTTP; each gateway process inherits its sockets
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()  # the gateways finish what runs
        self._all_ending = False  # they have: nothing is started any more
        self._configs_valid = asyncio.Event()
        self._code = ORDERLY
        self.on_give_up: Callable[[str], None] | None = None

    async def run(self) -> int:
        """Starts everything. The gateway only loads its modules, until the engine's configuration
        has proved valid.

        Returns an exit code when all children are gone. ConfigurationError if it cannot listen.
        """
        groups = {c.identity.group for c in self._others() if c.identity.name == "engine"}
        schedulers = {f"scheduler-{group}" for group in groups}  # on another host perhaps
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
            await self._first_of(self._configs_valid, self._stopping)
            if self._gateways() and not self._stopping.is_set():
                self._http_sockets.listen()
            await self._stopping.wait()
            await self._stop_children()
        finally:
            self._stopping.set()
            self._kill_all()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if self._swaps is not None:
                await self._swaps.close()
            self._http_sockets.close()
            self._listener.close()
        return self._code

    def _publish(self) -> None:
        """For commands on this host that look for a server."""
        made = self._settings
        url = find.url_from_here(made.host, self._http_sockets.port, bool(made.tls_cert))
        served = find.ServedModel(url=url, model=made.model_name, path=made.model)
        find.publish_served_model(Path(self._topology_file), served)

    def states(self) -> dict[str, tuple[State, str]]:
        """The state of each stage here by its id, and what it does or waits for."""
        return {stage: child.status for stage, child in self._children.items()}

    def stop(self, code: int = ORDERLY) -> None:
        """Drains and stops everything; called again, kills."""
        if self._stopping.is_set():
            self._kill_all()
            return
        self._code = code
        self._stopping.set()
        if self._swaps is not None:
            self._swaps.stop()
        # Only the gateway's own copies are left: it refuses requests, and then nobody listens.
        self._http_sockets.close()

    def reload(self) -> None:
        """SIGHUP: the gateways read again what they can."""
        for child in self._gateways():
            child.reload()

    def _kill_all(self) -> None:
        self._all_ending = True
        for child in self._children.values():
            child.kill()

    def _gateways(self) -> list[Child]:
        return [c for c in self._children.values() if c.identity.name == "gateway"]

    def _others(self) -> list[Child]:
        return [c for c in self._children.values() if c.identity.name != "gateway"]

    def _group(self, group: int) -> list[Child]:
        children = self._children.values()
        return [c for c in children if c.identity.name == "engine" and c.identity.group == group]

    # ------------------------------------------------------------------------- begin, death, begin

    async def _start(self, child: Child) -> None:
        """Starts the child's command, and watches it."""
        async with child.starting:
            if self._wanted(child):
                await self._spawn(child)
                self._watch(child)

    def _wanted(self, child: Child) -> bool:
        """Whether its process is to run: while gateways finish, all that they need for it is."""
        if self._all_ending or not self._stopping.is_set():
            return not self._all_ending
        return child.process is not None and child.identity.name != "gateway"

    async def _restart(self, child: Child) -> None:
        """Starts what ran before; without it nothing can go on."""
        try:
            await self._start(child)
        except OSError as error:
            self._give_up(f"{child.identity.id}: cannot start {child.command}: {error}", FAILED)

    async def _spawn(self, child: Child) -> None:
        who = child.identity
        arguments = [
            who.name, "--topology", self._topology_file, "--group", str(who.group),
            "--rank", str(who.rank), "--index", str(who.index), "--child",
        ]  # fmt: skip
        descriptors: list[int] = []
        if who.name == "gateway":
            descriptors, arguments = (
                self._http_sockets.descriptors,
                arguments + self._http_sockets.arguments,
            )
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(PREFIX) or k == SECRET}
        environment = {**inherited, **to_environment(self._settings)}
        await child.start(arguments, environment, descriptors)
        if not self._wanted(child):
            child.kill()  # too late for the signals that the others got

    def _watch(self, child: Child) -> None:
        assert child.process is not None
        task = asyncio.create_task(self._on_end(child, child.process))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _on_end(self, child: Child, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        if process is child.process:
            child.read_reports()  # its last words, before anything is made of its end
        if child.swapping or not self._wanted(child):
            return
        name = child.identity.id
        if code == MISCONFIGURED:
            self._give_up(
                ": ".join(filter(None, (f"{name} cannot start", child.failure_reason))), code
            )
            return
        if code >= 0 and not child.config_valid:  # killed by a signal, it is not to blame
            self._give_up(f"{name} ended while it started ({exit_cause(code)})", FAILED)
            return
        child.deaths += 1
        if child.deaths > MAX_DEATHS:
            self._give_up(f"{name} died {child.deaths} times and was never ready between", FAILED)
            return
        log.warning("%s ended (%s), starting it again", name, exit_cause(code))
        why = f": {child.failure_reason}" if child.failure_reason else ""
        self._publish_death(child, f"its process ended ({exit_cause(code)}){why}")
        if child.identity.name == "engine" and child.killed_for_group is not process:
            for other in self._group(child.identity.group):
                if other is not child:
                    other.kill_for_group()  # its own watcher starts it again
        await self._restart(child)

    # --------------------------------------------------------------------------------- what is said

    def _publish_death(self, child: Child, reason: str) -> None:
        """Nobody has to wait until a dead stage's silence or its successor is noticed."""
        word = child.death_notice(reason)
        if self._swaps is not None and word is not None:
            self._swaps.publish_death(child, word)

    def _on_message(self, _channel: str, header: Header, message: Message) -> None:
        if isinstance(message, GroupFault):
            group = self._group(message.group)
            alive = [child for child in group if child.started_before(message.incarnations)]
            if any(child.killed_for_group is not child.process for child in alive):
                log.error("group %d: %s; restarting its engines", message.group, message.reason)
            for child in alive:
                child.kill_for_group()
        elif isinstance(message, Heartbeat) and header.sender in self._children:
            self._children[header.sender].on_heartbeat(message)
            self._check_configs()

    def _check_configs(self) -> None:
        """Whether the engines' configurations are known to be valid."""
        if self._configs_valid.is_set():
            return
        engines = [c for c in self._children.values() if c.identity.name == "engine"]
        if all(engine.config_valid for engine in engines):
            self._configs_valid.set()

    def _give_up(self, reason: str, code: int) -> None:
        log.error("%s; stopping", reason)
        if self.on_give_up is not None:
            self.on_give_up(reason)
        self.stop(code)
        self._code = code

    # ----------------------------------------------------------------------------------------- end

    async def _stop_children(self) -> None:
        """The gateway first, so that what runs is finished; then the rest."""
        await self._terminate(self._gateways(), self._settings.drain_timeout + STOP_GRACE)
        self._all_ending = True
        await self._terminate(self._others(), STOP_GRACE)

    async def _terminate(self, children: list[Child], seconds: float) -> None:
        for child in children:
            child.signal(signal.SIGTERM)
        waits = [asyncio.ensure_future(c.process.wait()) for c in children if c.process is not None]
        if not waits:
            return
        _, late = await asyncio.wait(waits, timeout=seconds)
        if late:
            for child in children:
                child.kill()
            await asyncio.wait(late)

    @staticmethod
    async def _first_of(*events: asyncio.Event) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in events]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()


def _start_order(child: Child) -> int:
    """Engines have most to do before they are ready."""
    return {"engine": 0, "gateway": 2}.get(child.identity.name, 1)
