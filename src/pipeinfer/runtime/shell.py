"""The shell of a stage: sockets, clock, timers, signals and heartbeats around a sans-IO core.

Knows no stage's business. Every input of the core passes `handle` here, in one order; that is what
makes a run repeatable.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable

import zmq

from pipeinfer.bus.bus import Bus
from pipeinfer.core import EVERYONE, LOCAL, Send
from pipeinfer.messages import Drain, GroupFault, Header, Heartbeat, Message, State, Tick
from pipeinfer.runtime.stage import TAKES, Stage, StageContext, builder
from pipeinfer.runtime.topology import Identity, Topology
from pipeinfer.settings import ConfigurationError, Settings

log = logging.getLogger(__name__)

HEARTBEAT = 0.5  # seconds


class StoppedWhileBuilding(Exception):
    """The stage was told to stop before it was built."""


class Shell:
    """Runs one stage on the current event loop until it is told to stop."""

    def __init__(
        self,
        settings: Settings,
        topology: Topology,
        identity: Identity,
        context: zmq.Context[zmq.Socket[bytes]],
        build: Callable[[StageContext], Stage] | None = None,
    ) -> None:
        self.identity, self.settings = identity, settings
        self.incarnation = time.time_ns()
        self.bus = Bus(identity, self.incarnation, topology, context)
        self._topology = topology
        self._build = build or builder(identity.name)
        self._takes = TAKES[identity.name]
        self._stage: Stage | None = None
        self._progress: tuple[State, str] = ("starting", "")
        self._shown: tuple[State, str] | None = None
        self._stop = asyncio.Event()
        self._drained_by = float("inf")
        self._failure: BaseException | None = None

    async def run(self) -> None:
        """Builds the stage and serves. Raises what the builder, the core or the driver raises."""
        self._loop = asyncio.get_running_loop()
        self.bus.bind()
        beat = self._loop.call_soon(self._heartbeat)
        try:
            stage = await self._built()
            for peer, channel in stage.listens:
                self.bus.listen(peer, channel)
            self._stage = stage
            if stage.driver is not None:
                await stage.driver.start(self.handle)
            self.bus.start(self._on_message)
            self._tick()
            await self._stop.wait()
        except ConfigurationError as error:
            self._progress = ("failed", str(error))
            self._publish_heartbeat()
            raise
        finally:
            self._stop.set()
            beat.cancel()
            if self._stage is not None and self._stage.driver is not None:
                await self._stage.driver.stop()
            self.bus.close()
        if self._failure is not None:
            raise self._failure

    def drain(self) -> None:
        """Finish what runs, then stop; called again, or after the drain timeout, stop at once."""
        if self._stage is None or self._drained_by < float("inf"):
            self._stop.set()
            return
        self._drained_by = self._loop.time() + self.settings.drain_timeout
        self.handle(Drain())
        self._check_drained()

    def stop(self) -> None:
        """Stops without finishing anything."""
        self._stop.set()

    def handle(self, event: Message) -> None:
        """One event through the core, and its outputs on their way; on the shell's loop only."""
        if self._stop.is_set() or self._stage is None:
            return
        try:
            for send in self._stage.core.handle(event, time.monotonic()):
                self._send(send)
        except Exception as error:  # a broken invariant ends the stage, with the reason in its log
            log.exception("%s failed on %s", self.identity.id, type(event).__name__)
            self._failure = error
            self._stop.set()

    async def _built(self) -> Stage:
        """The stage, built in a thread so that heartbeats go on while weights load.

        A daemon thread: a stage told to stop while it loads does not wait for the load.
        """
        context = StageContext(
            self.settings, self._topology, self.identity, self.incarnation, self._report
        )
        built: asyncio.Future[Stage] = self._loop.create_future()

        def settle(result: Stage | BaseException) -> None:
            if built.done():
                return
            if isinstance(result, Stage):
                built.set_result(result)
            else:
                built.set_exception(result)

        def work() -> None:
            result: Stage | BaseException
            try:
                result = self._build(context)
            except BaseException as error:
                result = error
            if not self._stop.is_set():
                self._loop.call_soon_threadsafe(settle, result)

        threading.Thread(target=work, name=f"build {self.identity.id}", daemon=True).start()
        stopping = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({built, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not built.done():
            raise StoppedWhileBuilding(self.identity.id)
        return built.result()

    def _send(self, send: Send) -> None:
        if isinstance(send.message, GroupFault):
            # A supervisor hears it and acts; without one, this line is what tells a person.
            log.error("group %d is stuck: %s", send.message.group, send.message.reason)
        if send.channel == LOCAL:
            assert self._stage is not None and self._stage.driver is not None
            self._stage.driver.deliver(send.message)
        else:
            self.bus.send(send)

    def _on_message(self, channel: str, header: Header, message: Message) -> None:
        if channel not in self._takes:
            self.bus.reader.bad(f"{self.identity.name} takes no {channel}, {header.sender} sent it")
            return
        self.handle(message)
        self._show_state()

    def _report(self, state: State, reason: str) -> None:
        """From the builder's thread."""
        self._progress = (state, reason)
        self._loop.call_soon_threadsafe(self._show_state)

    def _state(self) -> tuple[State, str]:
        if self._stage is None or self._progress[0] == "failed":
            return self._progress
        return self._stage.core.state()

    def _tick(self) -> None:
        if self._stop.is_set() or self._stage is None:
            return
        self.handle(Tick())
        self._show_state()
        if self._drained_by < float("inf"):
            self._check_drained()
        self._loop.call_later(self._stage.tick, self._tick)

    def _check_drained(self) -> None:
        assert self._stage is not None
        if self._stage.core.idle() or self._loop.time() >= self._drained_by:
            self._stop.set()

    def _show_state(self) -> None:
        if self._shown is not None and self._state()[0] != self._shown[0]:
            self._publish_heartbeat()

    def _heartbeat(self) -> None:
        if self._stop.is_set():
            return
        self._publish_heartbeat()
        self._loop.call_later(HEARTBEAT, self._heartbeat)

    def _stats(self) -> dict[str, float]:
        if self._stage is None:
            return {}
        driver = self._stage.driver
        return {**self._stage.core.stats(), **(driver.stats() if driver is not None else {})}

    def _publish_heartbeat(self) -> None:
        if self._stop.is_set():
            return
        state, reason = self._shown = self._state()
        stats = self._stats()
        who = self.identity
        beat = Heartbeat(
            who.id, who.name, who.group, who.rank, who.index, os.getpid(), self.incarnation,
            state, reason, {**stats, "bad_frames": float(self.bus.reader.bad_frames)},
        )  # fmt: skip
        self.bus.send(Send("telemetry", EVERYONE, beat))
        if who.name == "gateway":
            self.handle(beat)  # a gateway sees itself without a socket
