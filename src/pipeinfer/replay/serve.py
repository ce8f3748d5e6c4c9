"""`serve STAGE FILE --topology T`: takes the place of a recorded stage on the bus of a pipeline.

The stages beside it are real, and can be run under a debugger. Knows sockets, the clock and when to
stop; what is said when is decided in roles.py.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

import zmq

from pipeinfer import topology as topologies
from pipeinfer.bus.bus import Bus
from pipeinfer.bus.frames import FrameHeader
from pipeinfer.core import EVERYONE, Send
from pipeinfer.messages import GroupStatus, Message
from pipeinfer.replay.codes import DIFFERENT, EQUAL, USAGE, CannotReplay
from pipeinfer.replay.recording import LoadedTrace, load_stage, warn_of_tail
from pipeinfer.replay.roles import ReplayDiverged, Role, TimedSend, role_of
from pipeinfer.runtime.stage import heartbeat, rank_status
from pipeinfer.settings import ConfigurationError
from pipeinfer.topology import NAMES, Topology

TICK, HEARTBEAT = 0.1, 0.5  # seconds
MIN_TIMER_GAP = 1e-6  # seconds between two of a kind, for timers of one moment have no order


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stage", choices=NAMES)
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--topology", required=True, metavar="FILE")
    parser.add_argument("--realtime", action="store_true", help="answers take as long as recorded")


def run(options: argparse.Namespace) -> int:
    """EQUAL when the recording was played to its end, DIFFERENT if the live side diverged."""
    recording = load_stage(options.file, options.stage)
    print(recording.title)
    warn_of_tail(recording)
    try:
        topology = topologies.load(options.topology)
        topology.address(recording.stage)
    except ConfigurationError as error:
        raise CannotReplay(USAGE, str(error)) from None
    incarnation = time.time_ns()
    role = role_of(recording, incarnation)
    return asyncio.run(StagePlayer(recording, role, topology, incarnation, options.realtime).run())


class StagePlayer:
    """A role between sockets: on the bus as the recorded stage, until it has said everything."""

    def __init__(
        self,
        recording: LoadedTrace,
        role: Role,
        topology: Topology,
        incarnation: int,
        realtime: bool,
    ) -> None:
        self._identity, self._role, self._realtime = recording.identity, role, realtime
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._bus = Bus(recording.identity, incarnation, topology, self._context)
        self._incarnation = incarnation
        self._inputs = self._outputs = 0
        self._waiting = 0  # sends that are not due yet
        self._due_last: dict[type[Message], float] = {}

    async def run(self) -> int:
        """The exit code. CannotReplay if the stage's place is taken."""
        loop = asyncio.get_running_loop()
        self._over: asyncio.Future[int] = loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._end, EQUAL, "stopped")
        try:
            self._bus.bind()
        except zmq.ZMQError as error:
            raise CannotReplay(USAGE, f"{self._identity.id} runs already: {error}") from None
        if self._identity.name == "engine":
            self._bus.listen(f"scheduler-{self._identity.group}", "plan")
        self._bus.start(self._on_message)
        timers = [asyncio.create_task(self._every(TICK, self._tick)),
                  asyncio.create_task(self._every(HEARTBEAT, self._beat))]  # fmt: skip
        print(f"playing {self._identity.id}", flush=True)
        try:
            return await self._over
        finally:
            for timer in timers:
                timer.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await timer
            self._bus.close()
            self._context.term()

    def _on_message(self, channel: str, _header: FrameHeader, message: Message) -> None:
        self._inputs += 1
        try:
            self._send(self._role.take(channel, message))
        except ReplayDiverged as error:
            self._end(DIFFERENT, f"the live side diverges: {error}")

    def _tick(self) -> None:
        self._send(self._role.tick())

    def _send(self, sends: list[TimedSend]) -> None:
        loop = asyncio.get_running_loop()
        for after, send in sends:
            if not self._realtime:
                self._put(send)
                continue
            # Answers of one kind stay in order, however the live questions are spaced.
            kind = type(send.message)
            due = self._due_last[kind] = max(
                self._due_last.get(kind, 0.0) + MIN_TIMER_GAP, loop.time() + after
            )
            self._waiting += 1
            loop.call_at(due, self._due, send)
        self._check_end()

    def _due(self, send: Send) -> None:
        self._waiting -= 1
        self._put(send)
        self._check_end()

    def _put(self, send: Send) -> None:
        if not self._over.done():
            self._outputs += 1
            self._bus.send(send)

    def _check_end(self) -> None:
        if self._role.finished and not self._waiting:
            self._end(EQUAL, "the recording was played to its end, the live side did the same")

    def _end(self, code: int, text: str) -> None:
        if not self._over.done():
            print(f"{text}: {self._inputs} messages in, {self._outputs} out", flush=True)
            self._over.set_result(code)

    async def _every(self, seconds: float, call: object) -> None:
        assert callable(call)
        while True:
            call()
            await asyncio.sleep(seconds)

    def _beat(self) -> None:
        who = self._identity
        reason = "a recording is played"
        beat = heartbeat(who, self._incarnation, "ready", reason, pid=os.getpid())
        self._bus.send(Send("telemetry", EVERYONE, beat))
        if who.name == "engine":
            self._say(rank_status(who, self._incarnation, "ready"))
        if who.name == "scheduler":
            self._say(
                GroupStatus(group=who.group, incarnation=self._incarnation, readiness="serves")
            )

    def _say(self, message: Message) -> None:
        self._bus.send(Send("group", EVERYONE, message))
