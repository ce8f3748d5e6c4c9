"""`serve STAGE FILE --topology T`: takes the place of a recorded stage on the bus of a pipeline.

The other stages are real, and can be run under a debugger. A role (EngineRole, SchedulerRole,
SourceRole) decides, without I/O, which recorded outputs are sent and when, with ids, numbers and
incarnations rewritten to those of the live side. StagePlayer has the sockets and the clock.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import zmq

from pipeinfer import topology as topologies
from pipeinfer.bus.bus import Bus
from pipeinfer.bus.frames import FrameHeader
from pipeinfer.core import EVERYONE, PlanFilter, Send, stage_id
from pipeinfer.messages import (
    Admitted,
    BeginEpoch,
    GroupStatus,
    Hello,
    Message,
    MissedPlan,
    Plan,
    Ready,
    Recover,
    Recovered,
    Result,
)
from pipeinfer.replay.traces import (
    DIFFERENT,
    EQUAL,
    USAGE,
    CannotReplay,
    LoadedTrace,
    NumberedIds,
    TraceEntry,
    first_mismatch,
    load_stage,
    rewritten,
    warn_of_tail,
)
from pipeinfer.runtime.stage import heartbeat, rank_status
from pipeinfer.settings import ConfigurationError
from pipeinfer.topology import NAMES, Topology

AHEAD = 2  # plans that a live engine gets before the result of the first of them
PLAYED = ("engine", "scheduler", "gateway", "tokenizer")


class ReplayDiverged(Exception):
    """The live side said something else than the recorded one; the text says where."""


class TimedSend(NamedTuple):
    """A message to send, and how many recorded seconds after the live message that caused it."""

    after: float
    send: Send


class Role(Protocol):
    """`finished`: everything that was recorded has been said."""

    finished: bool

    def take(self, channel: str, message: Message) -> list[TimedSend]:
        """Takes a live message; returns what the recorded stage answered. Raises ReplayDiverged."""
        ...

    def tick(self) -> list[TimedSend]:
        """Called ten times a second; returns what must be repeated until it is answered."""
        ...


@dataclass
class RecordedAnswers:
    """An engine's recorded answers to one plan: those at once, and those when the step was done."""

    plan: Plan
    at: float
    outputs: list[TraceEntry] = field(default_factory=list)


class EngineRole:
    """A recorded engine for a live scheduler: plan N is answered with what it said of plan N."""

    def __init__(self, recording: LoadedTrace, incarnation: int) -> None:
        self._hello = _replaced(_last(recording, Hello), incarnation=incarnation)
        self._scheduler = stage_id("scheduler", recording.header.group)
        self._answers = _longest_epoch(recording)
        recorded = {one.plan.epoch for one in self._answers}
        messages = (entry.message for entry in recording.entries)
        begun = [one for one in messages if isinstance(one, Ready) and one.epoch in recorded]
        self._kept_pages = begun[-1].kept_pages if begun else 0  # by which the scheduler plans
        self._epoch: int | None = None
        self._plans = PlanFilter()
        self.finished = False

    def take(self, channel: str, message: Message) -> list[TimedSend]:
        if isinstance(message, BeginEpoch):
            return self._begin(message)
        if isinstance(message, Plan) and message.epoch == self._epoch:
            return self._plan(message)
        return _recovered(channel, message, "engine")

    def tick(self) -> list[TimedSend]:
        return [] if self._epoch is not None else [self._say(0.0, self._hello)]

    def _begin(self, begin: BeginEpoch) -> list[TimedSend]:
        if self._hello.incarnation not in begin.incarnations:
            self._epoch = None
            return []
        self._epoch, self._plans = begin.epoch, PlanFilter()
        self._recorded_ids, self._live_ids = NumberedIds("r"), NumberedIds("r")
        return [
            self._say(
                0.0,
                Ready(
                    epoch=begin.epoch,
                    rank=self._hello.rank,
                    incarnation=self._hello.incarnation,
                    kept_pages=self._kept_pages,
                ),
            )
        ]

    def _plan(self, plan: Plan) -> list[TimedSend]:
        order = self._plans.take(plan.number)
        if order == "gap":
            missed = MissedPlan(plan.epoch, self._hello.rank, self._plans.expected)
            return [self._say(0.0, missed)]
        if self.finished or order == "repeated":
            return []
        answers = self._answers[plan.number]
        _same(answers.plan, plan, self._recorded_ids, self._live_ids)
        self.finished = self._plans.expected == len(self._answers)
        epoch = plan.epoch
        return [
            self._say(entry.time - answers.at, _replaced(entry.message, epoch=epoch))
            for entry in answers.outputs
        ]

    def _say(self, after: float, message: Message) -> TimedSend:
        return TimedSend(after, Send("result", self._scheduler, message))


class SchedulerRole:
    """A recorded scheduler for a live engine: its plans, never more than AHEAD of the results."""

    def __init__(self, recording: LoadedTrace) -> None:
        self._answers = [
            answers
            for answers in _longest_epoch(recording)
            if any(entry.kind == "Result" for entry in answers.outputs)
        ]
        self._hello = _last(recording, Hello)
        self._live: Hello | None = None
        self._epoch = 0
        self._running = False
        self._sent = self._landed = 0
        self.finished = not self._answers

    def take(self, channel: str, message: Message) -> list[TimedSend]:
        match message:
            case Hello():
                return self._meet(message)
            case Ready() if self._live is not None and message.epoch == self._epoch:
                self._running = True
                return self._plans()
            case Admitted() | Result() if message.epoch == self._epoch:
                return self._answer(message)
            case MissedPlan() if message.epoch == self._epoch:
                return [self._plan(0.0, one) for one in self._answers[message.number : self._sent]]
        if type(message).__name__ == "Fault":
            raise ReplayDiverged(f"the engine ended the epoch: {message.reason}")  # type: ignore[attr-defined]
        return _recovered(channel, message, "scheduler")

    def tick(self) -> list[TimedSend]:
        if self._running:
            return []
        lives = () if self._live is None else (self._live.incarnation,)
        return [TimedSend(0.0, Send("plan", EVERYONE, BeginEpoch(self._epoch, lives)))]

    def _meet(self, hello: Hello) -> list[TimedSend]:
        for name in ("page_size", "pages", "max_slots", "max_model_len"):
            recorded, live = getattr(self._hello, name), getattr(hello, name)
            if recorded != live:
                raise ReplayDiverged(
                    f"the recorded engine had {name} {recorded}, this one has {live}"
                )
        if self._live is None or self._live.incarnation != hello.incarnation:
            self._live, self._running = hello, False
            self._epoch += 1
            self._sent = self._landed = 0
        return self.tick()

    def _plans(self) -> list[TimedSend]:
        """The next plans, as soon after each other as they were recorded."""
        out: list[TimedSend] = []
        first = self._answers[self._sent].at if self._sent < len(self._answers) else 0.0
        while self._sent < len(self._answers) and self._sent < self._landed + AHEAD:
            answers = self._answers[self._sent]
            out.append(self._plan(answers.at - first, answers))
            self._sent += 1
        return out

    def _plan(self, after: float, answers: RecordedAnswers) -> TimedSend:
        plan = _replaced(answers.plan, epoch=self._epoch)
        return TimedSend(after, Send("plan", EVERYONE, plan))

    def _answer(self, message: Admitted | Result) -> list[TimedSend]:
        kind = type(message).__name__
        if message.number >= self._sent:
            raise ReplayDiverged(f"{kind} of plan {message.number}, which was not sent")
        answers = self._answers[message.number]
        recorded = next((e for e in answers.outputs if e.kind == kind), None)
        if recorded is None:
            raise ReplayDiverged(f"plan {message.number} was not answered with {kind}")
        mismatch = first_mismatch(_replaced(recorded.message, epoch=self._epoch), message)
        if mismatch is not None:
            raise ReplayDiverged(
                f"{kind} of plan {message.number} (message {recorded.seq}): {mismatch.field} was "
                f"{mismatch.recorded}, is {mismatch.replayed}"
            )
        if kind != "Result":
            return []
        self._landed += 1
        self.finished = self._landed == len(self._answers)
        return self._plans()


class SourceRole:
    """A recorded gateway or tokenizer: what it sent to the next stage, whatever comes back."""

    def __init__(self, recording: LoadedTrace) -> None:
        name = recording.header.name
        channel = {"gateway": "requests", "tokenizer": "work"}[name]
        self._name = name
        begin = recording.begin
        self._sends = [
            TimedSend(entry.time - begin, Send(channel, entry.peer, entry.message))
            for entry in recording.entries
            if entry.direction == "out" and entry.channel == channel
        ]
        self.finished = False

    def take(self, channel: str, message: Message) -> list[TimedSend]:
        return _recovered(channel, message, self._name)

    def tick(self) -> list[TimedSend]:
        sends, self._sends = self._sends, []
        return sends


def role_of(recording: LoadedTrace, incarnation: int) -> Role:
    """The role of the recorded stage. CannotReplay for a stage that has none."""
    name = recording.header.name
    if name == "engine":
        return EngineRole(recording, incarnation)
    if name == "scheduler":
        return SchedulerRole(recording)
    if name in ("gateway", "tokenizer"):
        return SourceRole(recording)
    raise CannotReplay(
        USAGE, f"a {name}'s role is not played: a real one needs neither weights nor a device"
    )


def _longest_epoch(recording: LoadedTrace) -> list[RecordedAnswers]:
    """The plans of the epoch that has the most, from 0 on, each with what was said of it.

    Reads an engine's trace (plans in, answers out) as well as a scheduler's (the other way round).
    """
    epochs: dict[int, dict[int, RecordedAnswers]] = {}
    for entry in recording.entries:
        message = entry.message
        if isinstance(message, Plan) and entry.counts:
            epochs.setdefault(message.epoch, {})[message.number] = RecordedAnswers(
                message, entry.time
            )
        elif isinstance(message, (Admitted, Result)):
            answers = epochs.get(message.epoch, {}).get(message.number)
            if answers is not None:
                answers.outputs.append(entry)
    complete = [plans for plans in epochs.values() if 0 in plans]
    if not complete:
        raise CannotReplay(USAGE, f"{recording.path} has no epoch from its beginning on")
    plans = max(complete, key=len)
    return [plans[number] for number in range(len(plans)) if number in plans]


def _same(recorded: Plan, live: Plan, recorded_ids: NumberedIds, live_ids: NumberedIds) -> None:
    """ReplayDiverged unless the plans are equal but for epoch and names of requests."""
    one = rewritten(_replaced(recorded, epoch=live.epoch), {"request_id": recorded_ids})
    other = rewritten(live, {"request_id": live_ids})
    mismatch = first_mismatch(one, other)
    if mismatch is not None:
        raise ReplayDiverged(
            f"plan {live.number} is the first that differs: {mismatch.field} was "
            f"{mismatch.recorded}, is {mismatch.replayed}"
        )


def _recovered(channel: str, message: Message, name: str) -> list[TimedSend]:
    """The empty answer to a new neighbour that asks for what it should know."""
    if not isinstance(message, Recover):
        return []
    return [
        TimedSend(0.0, Send(channel, message.stage, Recovered(name, message.incarnation, opening)))
        for opening in (True, False)
    ]


def _last(recording: LoadedTrace, kind: type[Any]) -> Any:
    found = [e.message for e in recording.entries if isinstance(e.message, kind)]
    if not found:
        raise CannotReplay(USAGE, f"{recording.path} has no {kind.__name__}: record from the start")
    return found[-1]


def _replaced(message: Any, **fields: Any) -> Any:
    return rewritten(message, {name: lambda _, v=value: v for name, value in fields.items()})


TICK, HEARTBEAT = 0.1, 0.5  # seconds
MIN_TIMER_GAP = 1e-6  # seconds between two of a kind, for timers of one moment have no order


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stage", choices=NAMES)
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--topology", required=True, metavar="FILE")
    parser.add_argument("--realtime", action="store_true", help="answers take as long as recorded")


def replay_serve(options: argparse.Namespace) -> int:
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
        """Plays the role; returns the exit code. Raises CannotReplay if the stage's place is
        taken."""
        loop = asyncio.get_running_loop()
        self._over: asyncio.Future[int] = loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._end, EQUAL, "stopped")
        try:
            self._bus.bind()
        except zmq.ZMQError as error:
            raise CannotReplay(USAGE, f"{self._identity.id} runs already: {error}") from None
        if self._identity.name == "engine":
            self._bus.listen(stage_id("scheduler", self._identity.group), "plan")
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
