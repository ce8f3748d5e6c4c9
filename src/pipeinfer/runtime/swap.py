"""Puts another process in the place of a running stage, and the old command back if that fails.

Takes `Swap` from command lines beside a supervisor. Knows processes and when they are ready; that
the requests go on is the stages' own doing (events.Leave, and recovery from their neighbours).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import zmq

from pipeinfer.beats import HEARTBEAT
from pipeinfer.bus.bus import Bus
from pipeinfer.bus.frames import Header
from pipeinfer.control import CHANNEL, Swap, SwapState
from pipeinfer.core import EVERYONE, Send
from pipeinfer.messages import Heartbeat, Message
from pipeinfer.runtime.child import Child, Command, exit_cause
from pipeinfer.runtime.stage import LEAVE_TIMEOUT
from pipeinfer.topology.topology import Identity, Topology

log = logging.getLogger(__name__)

LEAVE_MARGIN = 5.0  # seconds beyond what a stage allows itself
STOPPING = "the server is stopping"
FIRST_REPORT_TIMEOUT = 60.0  # seconds within which a command must say that it is a stage


class SwapController:
    """The control side of a supervisor: hears `Swap`, says `SwapState` at every change.

    `start` starts a child's command, unless the server has no more use for it, and cares for its
    process once the swap is over; OSError if the command cannot be executed. `restart` does the
    same, and ends everything if it cannot.
    """

    def __init__(
        self,
        topology: Topology,
        context: zmq.Context[zmq.Socket[bytes]],
        children: Mapping[str, Child],
        start: Callable[[Child], Awaitable[None]],
        restart: Callable[[Child], Awaitable[None]],
        gateway_seconds: float,
    ) -> None:
        self._incarnation = time.time_ns()
        self._bus = Bus(Identity("supervisor"), self._incarnation, topology, context)
        self._children = children
        self._start = start
        self._restart = restart
        self._gateway_seconds = gateway_seconds
        self._tasks: set[asyncio.Task[None]] = set()
        self._heartbeats: asyncio.Task[None] | None = None
        self._stopping = False

    def start(self) -> None:
        """Listens, on the running loop."""
        self._bus.bind()
        self._bus.start(self._on_message)
        self._heartbeats = asyncio.create_task(self._publish_heartbeats())

    def stop(self) -> None:
        """All stages will end: takes no swap any more, and finishes those under way."""
        self._stopping = True

    def publish_death(self, child: Child, beat: Heartbeat) -> None:
        """Says of a stage what it cannot say itself."""
        self._bus.send(Send("telemetry", EVERYONE, beat))
        if child.death is not None:
            self._bus.send(Send("group", EVERYONE, child.death))

    async def close(self) -> None:
        """When the children are gone: waits for what is under way, and closes the sockets."""
        self._stopping = True
        await asyncio.gather(*self._tasks)
        if self._heartbeats is not None:
            self._heartbeats.cancel()
        self._bus.close()

    async def _publish_heartbeats(self) -> None:
        """Whoever hears it will also hear an answer. What has ended is told again and again."""
        while True:
            for child in self._children.values():
                if child.death is not None:
                    self._bus.send(Send("group", EVERYONE, child.death))
            beat = Heartbeat(
                stage="supervisor-0",
                name="supervisor",
                group=0,
                rank=0,
                index=0,
                pid=os.getpid(),
                incarnation=self._incarnation,
                state="ready",
            )
            self._bus.send(Send("telemetry", EVERYONE, beat))
            await asyncio.sleep(HEARTBEAT)

    def _on_message(self, _channel: str, header: Header, message: Message) -> None:
        if isinstance(message, Swap):
            task = asyncio.create_task(self._swap(message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._bus.reader.drop(f"a {type(message).__name__} of {header.sender}")

    def _publish_state(self, asked: Swap, state: Any, reason: str = "", **more: Any) -> None:
        log.info("swap of %s: %s", asked.stage, " ".join(filter(None, (state, reason))))
        said = SwapState(asked.swap, asked.stage, state, reason, **more)
        self._bus.send(Send(CHANNEL, EVERYONE, said))

    async def _swap(self, asked: Swap) -> None:
        group = self._group(asked.stage)
        if not group:
            self._publish_state(asked, "failed", f"there is no {asked.stage} here")
            return
        if self._stopping:
            self._publish_state(asked, "failed", STOPPING)
            return
        if any(child.swapping for child in group):
            pids = ", ".join(str(child.pid) for child in group)
            self._publish_state(
                asked, "failed", f"a swap is under way; to end it, kill process {pids}"
            )
            return
        for child in group:
            child.swapping = True
        try:
            for child in group:
                async with child.starting:  # a restart that has begun gets its process first
                    continue
            await self._replace(asked, group)
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

    async def _replace(self, asked: Swap, group: list[Child]) -> None:
        old, before = tuple(c.pid for c in group), [c.command for c in group]
        began = time.monotonic()
        self._publish_state(asked, "leaving", old=old)
        await self._stop_group(group)
        trouble = await self._start_group(asked, group, old)
        if not trouble:
            new, seconds = tuple(c.pid for c in group), time.monotonic() - began
            self._publish_state(asked, "done", old=old, new=new, seconds=seconds)
            return
        for child in group:
            child.kill()
        await self._wait_ended(group, None)
        for child, command in zip(group, before, strict=True):
            child.command, child.swapping = command, False
            await self._restart(child)
        if all(child.running for child in group):
            trouble += "; the command that ran before is started again"
        self._publish_state(asked, "failed", trouble, old=old)

    async def _stop_group(self, group: list[Child]) -> None:
        """Ends the running processes, in good order if they can."""
        for child in group:
            child.signal(signal.SIGUSR1)
        own = self._gateway_seconds if group[0].identity.name == "gateway" else LEAVE_TIMEOUT
        if not await self._wait_ended(group, own + LEAVE_MARGIN):
            log.warning("%s did not leave in time and is killed", group[0].identity.id)
            for child in group:
                child.kill()
            await self._wait_ended(group, None)

    @staticmethod
    async def _wait_ended(group: list[Child], seconds: float | None) -> bool:
        """Whether all processes ended within that time."""
        waits = [asyncio.ensure_future(c.process.wait()) for c in group if c.process is not None]
        if not waits:
            return True
        _, late = await asyncio.wait(waits, timeout=seconds)
        for wait in late:
            wait.cancel()
        return not late

    async def _start_group(self, asked: Swap, group: list[Child], old: tuple[int, ...]) -> str:
        """Starts the new processes and waits until they are ready; else says why they are not."""
        try:
            for child in group:
                if asked.command:
                    child.command = Command(asked.command, asked.folder)
                await self._start(child)
        except (OSError, ValueError) as error:  # ValueError: a NUL in its words
            return f"cannot start {group[0].command}: {getattr(error, 'strerror', '') or error}"
        if self._stopping and not all(child.running for child in group):
            return STOPPING
        self._publish_state(asked, "starting", old=old, new=tuple(c.pid for c in group))
        return await self._wait_ready(group)

    async def _wait_ready(self, group: list[Child]) -> str:
        """Returns when all are ready (""), or when one of them never will be."""
        ends = [asyncio.ensure_future(self._describe_end(child)) for child in group]
        ready = asyncio.ensure_future(_all_set([child.ready for child in group]))
        heard = asyncio.ensure_future(_all_set([child.has_reported for child in group]))
        try:
            await asyncio.wait(
                {*ends, heard}, timeout=FIRST_REPORT_TIMEOUT, return_when="FIRST_COMPLETED"
            )
            if not any(task.done() for task in (*ends, heard)):
                return f"its command was no stage that spoke within {FIRST_REPORT_TIMEOUT:g} s"
            await asyncio.wait({*ends, ready}, return_when="FIRST_COMPLETED")
            dead = [end for end, child in zip(ends, group, strict=True) if not child.running]
            return await dead[0] if dead else ""
        finally:
            for task in (*ends, ready, heard):
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
