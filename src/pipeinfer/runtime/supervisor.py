"""Starts the stages of one host as child processes, and starts again what dies.

Knows processes and heartbeats, no request: that none is lost is the stages' own doing. All ranks
of a group go down together, because a rank that waits inside a collective cannot be talked to.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from pipeinfer.bus.listener import Listener
from pipeinfer.messages import GroupFault, Header, Heartbeat, Message
from pipeinfer.runtime.entry import FAILED, MISCONFIGURED, ORDERLY
from pipeinfer.runtime.topology import Identity, Topology
from pipeinfer.settings import PREFIX, Settings, to_environment

log = logging.getLogger(__name__)

RESTARTS, WINDOW = 5, 60.0  # so many deaths in so many seconds, never ready between: give up
GRACE = 10.0  # seconds a stage may take to stop after its own drain
CHECKED = ("loading", "waiting", "ready")  # states of an engine whose configuration is valid


@dataclass
class Child:
    """One stage process. `checked`: it got past its configuration once; `reason`: why it failed."""

    identity: Identity
    process: asyncio.subprocess.Process | None = None
    checked: bool = False
    was_ready: bool = False
    reason: str = ""
    deaths: deque[float] = field(default_factory=deque)
    extra: dict[str, str] = field(default_factory=dict)  # environment for the next start


class Supervisor:
    """Runs `identities` until `stop()` or until one of them cannot go on; see `run`."""

    def __init__(
        self,
        settings: Settings,
        topology: Topology,
        topology_file: str,
        identities: list[Identity],
        context: zmq.Context[zmq.Socket[bytes]],
    ) -> None:
        self._settings, self._topology_file = settings, topology_file
        self._children = {i.id: Child(i) for i in identities}
        self._listener = Listener(topology, context)
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._checked = asyncio.Event()
        self._code = ORDERLY
        self.on_give_up: Callable[[str], None] | None = None

    async def run(self) -> int:
        """Starts everything; the gateway last, when the engine's configuration proved valid.

        Returns an exit code when all children are gone.
        """
        for stage in self._children:
            self._listener.listen(stage)
        self._listener.start(self._on_telemetry)
        reserved = self._reserve_port()
        try:
            for child in self._children.values():
                if child.identity.name != "gateway":
                    await self._start(child)
            await self._first_of(self._checked, self._stopping)
            for child in self._children.values():
                if child.identity.name == "gateway" and not self._stopping.is_set():
                    await self._start(child)
            await self._stopping.wait()
            await self._stop_children()
        finally:
            for child in self._children.values():
                self._signal(child, signal.SIGKILL)
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._listener.close()
            if reserved is not None:
                reserved.close()
        return self._code

    def stop(self, code: int = ORDERLY) -> None:
        """Drains and stops everything; called again, kills."""
        if self._stopping.is_set():
            for child in self._children.values():
                self._signal(child, signal.SIGKILL)
            return
        self._code = code
        self._stopping.set()

    def _reserve_port(self) -> socket.socket | None:
        """Chooses what port 0 becomes, so that a gateway started again has the same one.

        Bound and not listening, so the gateway can bind it too, and nobody else is given it.
        """
        gateways = [c for c in self._children.values() if c.identity.name == "gateway"]
        if self._settings.port or len(gateways) != 1:
            return None
        host = self._settings.host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        holder = socket.socket(family, socket.SOCK_STREAM)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind((host, 0))
        except OSError:  # not this host's: the gateway says so when it tries to listen
            holder.close()
            return None
        gateways[0].extra[f"{PREFIX}PORT"] = str(holder.getsockname()[1])
        return holder

    async def _start(self, child: Child) -> None:
        who = child.identity
        command = [
            sys.executable, "-m", "pipeinfer.runtime", who.name, "--topology", self._topology_file,
            "--group", str(who.group), "--rank", str(who.rank), "--index", str(who.index),
            "--child",
        ]  # fmt: skip
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(PREFIX)}
        environment = {**inherited, **to_environment(self._settings), **child.extra}
        child.process = await asyncio.create_subprocess_exec(
            *command,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for this process, which drains them in order
        )
        task = asyncio.create_task(self._watch(child, child.process))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, child: Child, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        if self._stopping.is_set():
            return
        name = child.identity.id
        if code == MISCONFIGURED:
            self._give_up(": ".join(filter(None, (f"{name} cannot start", child.reason))), code)
            return
        # A gateway starts when all configuration has proved valid: a signal came from outside.
        if not child.checked and not (child.identity.name == "gateway" and code < 0):
            self._give_up(f"{name} ended while it started ({_cause(code)})", FAILED)
            return
        now = time.monotonic()
        child.deaths.append(now)
        while now - child.deaths[0] > WINDOW:
            child.deaths.popleft()
        if len(child.deaths) > RESTARTS and not child.was_ready:
            self._give_up(f"{name} died {len(child.deaths)} times in {WINDOW:g} s", FAILED)
            return
        log.warning("%s ended (%s), starting it again", name, _cause(code))
        child.was_ready = False
        self._kill_group(child.identity)
        await self._start(child)

    def _kill_group(self, identity: Identity) -> None:
        """The other ranks of an engine's group; their own watchers start them again."""
        if identity.name != "engine":
            return
        for other in self._children.values():
            who = other.identity
            if who.name == "engine" and who.group == identity.group and who != identity:
                self._signal(other, signal.SIGKILL)

    def _on_telemetry(self, _channel: str, header: Header, message: Message) -> None:
        if isinstance(message, GroupFault):
            log.error("group %d: %s; restarting its engines", message.group, message.reason)
            for child in self._children.values():
                if child.identity.name == "engine" and child.identity.group == message.group:
                    self._signal(child, signal.SIGKILL)
        elif isinstance(message, Heartbeat) and header.sender in self._children:
            self._on_heartbeat(self._children[header.sender], message)

    def _on_heartbeat(self, child: Child, beat: Heartbeat) -> None:
        if child.process is None or beat.pid != child.process.pid:
            return  # a last word of a process that is gone
        child.reason = beat.reason if beat.state == "failed" else child.reason
        child.checked = child.checked or beat.state in CHECKED
        child.was_ready = child.was_ready or beat.state == "ready"
        engines = [c for c in self._children.values() if c.identity.name == "engine"]
        if all(engine.checked for engine in engines):
            self._checked.set()

    def _give_up(self, reason: str, code: int) -> None:
        log.error("%s; stopping", reason)
        if self.on_give_up is not None:
            self.on_give_up(reason)
        self.stop(code)

    async def _stop_children(self) -> None:
        """The gateway first, so that what runs is finished; then the rest."""
        first = [c for c in self._children.values() if c.identity.name == "gateway"]
        rest = [c for c in self._children.values() if c.identity.name != "gateway"]
        await self._terminate(first, self._settings.drain_timeout + GRACE)
        await self._terminate(rest, GRACE)

    async def _terminate(self, children: list[Child], seconds: float) -> None:
        for child in children:
            self._signal(child, signal.SIGTERM)
        waits = [asyncio.ensure_future(c.process.wait()) for c in children if c.process is not None]
        if not waits:
            return
        _, late = await asyncio.wait(waits, timeout=seconds)
        if late:
            for child in children:
                self._signal(child, signal.SIGKILL)
            await asyncio.wait(late)

    @staticmethod
    def _signal(child: Child, number: signal.Signals) -> None:
        if child.process is not None and child.process.returncode is None:
            child.process.send_signal(number)

    @staticmethod
    async def _first_of(*events: asyncio.Event) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in events]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()


def _cause(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"code {code}"
