"""What cores of all stages share: events in, messages out, and two helpers of several cores.

A core never reads a clock, opens a socket, draws entropy or spawns a task; its shell does. Here are

- the protocol `Core`, and `Send`, one output of a core;
- local events, which a core gets from its own shell or driver and which never travel on the bus
  (gateway/events.py and engine/core.py have those of one stage alone). They are messages, so that
  they can be recorded and replayed;
- recovery: how a new process learns from its neighbours what the process before it knew;
- `RecentTable`: entries of the last seconds by name.

Knows no stage and no transport.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sized
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

from pipeinfer.messages import Message, Recover, Recovered, State

if TYPE_CHECKING:
    import numpy as np

LOCAL = "local"  # to the stage's own driver: the device of an engine, the HTTP side of a gateway
EVERYONE = ""  # published to whoever listens: plans, telemetry


class Send(NamedTuple):
    """One output of a core: `message` goes to stage `to` ("detokenizer-0") on `channel`."""

    channel: str
    to: str
    message: Message


class Core(Protocol):
    """A stage without its I/O."""

    def handle(self, event: Message, now: float) -> list[Send]:
        """Takes one event at monotonic time `now` (seconds); returns what to send, in order."""
        ...

    def state(self) -> tuple[State, str]:
        """(state, reason) for the heartbeat."""
        ...

    def stats(self) -> dict[str, float]:
        """Statistics for the heartbeat."""
        ...

    def idle(self) -> bool:
        """True when nothing runs: a draining stage may stop."""
        ...


class Tick(Message, frozen=True):
    """A timer of the shell fired."""


class Drain(Message, frozen=True):
    """Refuse what is new, finish what runs."""


class Leave(Message, frozen=True):
    """Another process takes this stage over at once: begin nothing new, hand on what has begun.

    Requests are not finished; the successor learns them from its neighbours. A core that left is
    idle as soon as nothing of it is under way.
    """


class Unsent(Message, frozen=True):
    """A message of this request could not be sent, and never can be: `reason` says why.

    Nobody else was told anything in its place.
    """

    request_id: str
    attempt: int
    reason: str


class NewEpoch(Message, frozen=True):
    """To an engine: end the epoch in good order, so that what follows begins with empty memory."""


class Compiled(Message, frozen=True):
    """To an engine: the grammar that Compile(request_id) asked for is there, or cannot be because
    of `error`."""

    request_id: str
    error: str = ""


class GraphDue(Message, frozen=True):
    """To an engine: there was no step for a while, and one more CUDA graph can be captured."""


class StepDone(Message, frozen=True):
    """The device finished step `number`. R: rows that sampled, in the step's order.

    Attributes:
    - counts: int32 bytes [R], tokens that each row gave
    - token_ids: int32 bytes, row after row
    - seconds: that the step took
    - bad: int32 bytes, those of the R rows whose logits were not finite
    - logprobs: scores (wire.py) of those ids whose rows ask for them
    - prompts: scores of each of the chunks whose tokens are scored
    - refused: by row, why its grammar allows nothing
    - mask_units: by row, what its mask costs, where that is news
    """

    epoch: int
    number: int
    counts: bytes
    token_ids: bytes
    seconds: float = 0.0  # differs between a run and its replay
    bad: bytes = b""
    logprobs: bytes = b""
    prompts: tuple[bytes, ...] = ()
    refused: dict[int, str] = {}
    mask_units: dict[int, int] = {}


# ------------------------------------------------------------------------------------ recovery

DIGITS = re.compile("[0-9]{1,9}")
ASK_AGAIN = 1.0  # seconds after which a peer that has not answered is asked again


class StepNote(Message, frozen=True):
    """The engine's core gave step `number` to the device, at the record's time.

    rows: requests in it, `decodes` of them with one token; tokens: of all rows; sampled: rows that
    sample. When the step ran follows from its StepDone: it ended just before that record's time
    and had begun `seconds` earlier.
    """

    epoch: int
    number: int
    rows: int
    decodes: int
    tokens: int
    sampled: int


class _StepArrays(Protocol):
    @property
    def epoch(self) -> int: ...

    @property
    def number(self) -> int: ...

    @property
    def decodes(self) -> int: ...

    @property
    def slots(self) -> Sized: ...

    @property
    def tokens(self) -> Sized: ...

    @property
    def samples(self) -> np.ndarray: ...


def step_note(step: _StepArrays) -> StepNote:
    """The numbers of an engine's step (step.py, which light stages do not import)."""
    return StepNote(
        step.epoch,
        step.number,
        len(step.slots),
        step.decodes,
        len(step.tokens),
        int(step.samples.sum()),
    )


class RollCall:
    """Asks each of `peers` until it has told `stage`, a process with `incarnation`, all it knows.

    An answer stands between two messages, the brackets (Recovered). What was queued for a process
    that died may be lost, but never something after what arrived: an answer whose opening bracket
    came is whole; an answer without is asked for again.
    """

    def __init__(self, stage: str, incarnation: int, peers: Iterable[str]) -> None:
        self._question = Recover(stage, incarnation)
        self._missing = dict.fromkeys(peers, False)  # True: its answer has begun
        self._ask_at = float("-inf")

    def ask(self, now: float) -> list[Send]:
        """The questions that are due at `now` (seconds); the first time, one to each peer."""
        if not self._missing or now < self._ask_at:
            return []
        self._ask_at = now + ASK_AGAIN
        return [Send("recovery", peer, self._question) for peer in self._missing]

    def on_recovered(self, bracket: Recovered) -> bool:
        """Takes a bracket of an answer; True if it completes the last answer."""
        if bracket.stage not in self._missing or bracket.incarnation != self._question.incarnation:
            return False
        if bracket.opening:
            self._missing[bracket.stage] = True
            return False
        if not self._missing[bracket.stage]:
            return False
        del self._missing[bracket.stage]
        return not self._missing

    def has_begun(self, peer: str) -> bool:
        """Whether the answer of `peer` has come, or begun to; also true of a stage that is not
        asked.

        What `peer` sent before its answer may have been meant for the process before this one, or
        come from a process that is dead. What of that still holds is in the answer.
        """
        return self._missing.get(peer, True)

    @property
    def stage(self) -> str:
        """Id of the stage that asks."""
        return self._question.stage

    @property
    def missing(self) -> list[str]:
        """Peers whose answers are not complete."""
        return list(self._missing)

    @property
    def complete(self) -> bool:
        """Whether all answers are."""
        return not self._missing


def bracketed_answer(stage: str, asked: Recover, known: Iterable[Send]) -> list[Send]:
    """What `stage` sends to the stage that `asked`: all that is `known`, between two brackets."""
    opening = Recovered(stage, asked.incarnation, opening=True)
    end = Recovered(stage, asked.incarnation)
    return [
        Send("recovery", asked.stage, opening),
        *known,
        Send("recovery", asked.stage, end),
    ]


def stage_number(stage: str, name: str) -> int | None:
    """The group or index in the id of a stage called `name`: 2 of "scheduler-2".

    None for what is no such id: a peer may say anything.
    """
    kind, _, digits = stage.partition("-")
    return int(digits) if kind == name and DIGITS.fullmatch(digits) else None


# -------------------------------------------------------------------------------- recent entries

Value = TypeVar("Value")
SLICES = 8  # of a table's time and size; the oldest goes as a whole


class _Span(Generic[Value]):
    """Entries of one slice of time.

    Attributes:
    - begun, last: seconds, when the first and the last entry came
    - values: by name
    """

    __slots__ = ("begun", "last", "values")

    def __init__(self, begun: float) -> None:
        self.begun = self.last = begun
        self.values: dict[str, Value] = {}


class RecentTable(Generic[Value]):
    """Entries by name of the last `seconds`, oldest first, and never more than `max_size`: then at
    least the latest seven eighths of so many.

    Entries lie in slices of time, which are dropped whole. A single dict from which the oldest
    entry goes for each that comes gets holes at its beginning: it grows, and finding the oldest
    becomes slow.
    """

    __slots__ = ("_max_size", "_seconds", "_spans")

    def __init__(self, seconds: float, max_size: int) -> None:
        self._seconds = seconds
        self._max_size = max_size
        self._spans: list[_Span[Value]] = []

    def put(self, name: str, value: Value, now: float) -> None:
        """Replaces what was put under `name`; `now` in seconds."""
        for span in self._spans:
            span.values.pop(name, None)
        span = self._span(now)
        span.values[name] = value
        span.last = now

    def get(self, name: str) -> Value | None:
        """What was put last under `name`."""
        for span in self._spans:
            if name in span.values:
                return span.values[name]
        return None

    def items(self) -> Iterator[tuple[str, Value]]:
        """Oldest first."""
        for span in self._spans:
            yield from span.values.items()

    def __contains__(self, name: str) -> bool:
        return any(name in span.values for span in self._spans)

    def __len__(self) -> int:
        return sum(len(span.values) for span in self._spans)

    def _span(self, now: float) -> _Span[Value]:
        """The slice of `now`; drops those that are too old."""
        spans = self._spans
        while spans and now - spans[0].last >= self._seconds:
            del spans[0]
        full = spans and len(spans[-1].values) >= self._max_size // SLICES
        if not spans or full or now - spans[-1].begun >= self._seconds / SLICES:
            spans.append(_Span(now))
        while len(self) >= self._max_size:
            del spans[0]
        return spans[-1]
