"""What a recorded stage sends on the bus of a running pipeline, and when: the recorded outputs,
with ids, numbers and incarnations rewritten to those of the live side.

Sans-IO; replay/serve.py has the sockets and the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from pipeinfer.core import EVERYONE, Send
from pipeinfer.messages import (
    Admitted,
    Begin,
    Hello,
    Message,
    Plan,
    Ready,
    Recover,
    Recovered,
    Result,
)
from pipeinfer.replay.codes import USAGE, CannotReplay
from pipeinfer.replay.compare import first_mismatch
from pipeinfer.replay.recording import LoadedTrace, TraceEntry

# Names whose values are one process's or one run's own.
LOCAL_NAMES = ("request_id", "request_ids", "epoch", "incarnation", "incarnations")

Value = TypeVar("Value")
Change = Callable[[Any], Any]


def rewritten(value: Value, changes: Mapping[str, Change]) -> Value:
    """`value` with `changes[name]` applied to every field of that name; tuples of such values
    (`request_ids`) element by element. Returns `value` itself where nothing changes."""
    return _rewritten(value, changes)


def _rewritten(value: Any, changes: Mapping[str, Change]) -> Any:
    if isinstance(value, msgspec.Struct):
        changed = {}
        for name in value.__struct_fields__:
            old = getattr(value, name)
            new = _changed(old, changes[name]) if name in changes else _rewritten(old, changes)
            if new is not old:
                changed[name] = new
        return msgspec.structs.replace(value, **changed) if changed else value
    if isinstance(value, tuple) and any(isinstance(one, msgspec.Struct) for one in value):
        new = tuple(_rewritten(one, changes) for one in value)
        return new if any(a is not b for a, b in zip(new, value, strict=True)) else value
    return value


def _changed(value: Any, change: Change) -> Any:
    if isinstance(value, tuple):
        return tuple(change(one) for one in value)
    return value if value is None else change(value)


class NumberedIds:
    """Names for values in the order in which they first appear: r0, r1, ..."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._names: dict[Hashable, str] = {}

    def __call__(self, value: Hashable) -> str:
        return self._names.setdefault(value, f"{self._prefix}{len(self._names)}")


class CountedIds:
    """Small numbers for large ones, in the order in which they first appear; 0 stays 0."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {0: 0}

    def __call__(self, value: int) -> int:
        return self._numbers.setdefault(value, len(self._numbers))


def canonical_changes() -> dict[str, Change]:
    """Changes under which two runs of the same requests become comparable."""
    requests, epochs, lives = NumberedIds("r"), CountedIds(), CountedIds()
    return {
        "request_id": requests,
        "request_ids": requests,
        "epoch": epochs,
        "incarnation": lives,
        "incarnations": lives,
    }


AHEAD = 2  # plans that a live engine gets before the result of the first of them
PLAYED = ("engine", "scheduler", "gateway", "tokenizer")


class ReplayDiverged(Exception):
    """The live side said something else than the recorded one; the text says where."""


class TimedSend(NamedTuple):
    """What to send, and how many recorded seconds after the live message that caused it."""

    after: float
    send: Send


class Role(Protocol):
    """`finished`: everything that was recorded has been said."""

    finished: bool

    def take(self, channel: str, message: Message) -> list[TimedSend]:
        """A live message; what the recorded stage answered. Raises ReplayDiverged."""
        ...

    def tick(self) -> list[TimedSend]:
        """Ten times a second; what must be repeated until it is heard."""
        ...


@dataclass
class RecordedAnswers:
    """What an engine said of one plan: at once, and when the step was done."""

    plan: Plan
    at: float
    outputs: list[TraceEntry] = field(default_factory=list)


class EngineRole:
    """A recorded engine for a live scheduler: plan N is answered with what it said of plan N."""

    def __init__(self, recording: LoadedTrace, incarnation: int) -> None:
        self._hello = _replaced(_last(recording, Hello), incarnation=incarnation)
        self._scheduler = f"scheduler-{recording.header.group}"
        self._answers = _longest_epoch(recording)
        self._epoch: int | None = None
        self._next = 0
        self.finished = False

    def take(self, channel: str, message: Message) -> list[TimedSend]:
        if isinstance(message, Begin):
            return self._begin(message)
        if isinstance(message, Plan) and message.epoch == self._epoch:
            return self._plan(message)
        return _recovered(channel, message, "engine")

    def tick(self) -> list[TimedSend]:
        return [] if self._epoch is not None else [self._say(0.0, self._hello)]

    def _begin(self, begin: Begin) -> list[TimedSend]:
        if self._hello.incarnation not in begin.incarnations:
            self._epoch = None
            return []
        self._epoch, self._next = begin.epoch, 0
        self._recorded_ids, self._live_ids = NumberedIds("r"), NumberedIds("r")
        return [
            self._say(
                0.0,
                Ready(
                    epoch=begin.epoch, rank=self._hello.rank, incarnation=self._hello.incarnation
                ),
            )
        ]

    def _plan(self, plan: Plan) -> list[TimedSend]:
        if self.finished:
            return []
        answers = self._answers[self._next]
        _same(answers.plan, plan, self._recorded_ids, self._live_ids)
        self._next += 1
        self.finished = self._next == len(self._answers)
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
        if type(message).__name__ == "Fault":
            raise ReplayDiverged(f"the engine ended the epoch: {message.reason}")  # type: ignore[attr-defined]
        return _recovered(channel, message, "scheduler")

    def tick(self) -> list[TimedSend]:
        if self._running:
            return []
        lives = () if self._live is None else (self._live.incarnation,)
        return [TimedSend(0.0, Send("plan", EVERYONE, Begin(self._epoch, lives)))]

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
            plan = _replaced(answers.plan, epoch=self._epoch)
            out.append(TimedSend(answers.at - first, Send("plan", EVERYONE, plan)))
            self._sent += 1
        return out

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
        if isinstance(message, Plan):
            epochs.setdefault(message.epoch, {})[message.number] = RecordedAnswers(
                message, entry.time
            )
        elif isinstance(message, (Admitted, Result)):
            answers = epochs.get(message.epoch, {}).get(message.number)
            if answers is not None:
                answers.outputs.append(entry)
    whole = [plans for plans in epochs.values() if 0 in plans]
    if not whole:
        raise CannotReplay(USAGE, f"{recording.path} has no epoch from its beginning on")
    plans = max(whole, key=len)
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
    """A new neighbour that asks what it should know is told that there is nothing."""
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
