"""Request spans: what happened to each request in one stage, and when.

A store holds the open spans of a stage, bounded whatever its messages say; observers (stages.py)
write to it. The messages that carry spans to others are control.RequestSpan (a span) and
control.TimedEvent (one of its events). Times are passed in.

`Traceparent` is the W3C header of that name: which trace a request belongs to, and which span it
comes from (https://www.w3.org/TR/trace-context/).
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

from pipeinfer.control import RequestSpan, TimedEvent
from pipeinfer.core import Send
from pipeinfer.messages import Message

# Open spans of a stage: more requests than a gateway lets wait and a scheduler lets run.
MAX_OPEN_SPANS = 16_384
# Events of a span; then the latest takes the place of the one before.
MAX_EVENTS = 32
# Seconds over which durations of stages are taken.
MINUTE = 60.0
# Durations of a stage of which the median is taken.
MAX_DURATIONS = 256


class OpenSpan:
    """A request that is in the stage now.

    began: Unix seconds.
    trace: the W3C traceparent that the request came with, or "".
    attempt: the gateway's attempt, as the stage knows it.
    output_marked: whether the first output has an event.
    output: how many output tokens there are by now, where they are counted; None once it has ended.
    span: the traceparent that a gateway passes on, where it has a span of its own; else "".
    client: of a gateway's: hash of who asks; else "".
    events: oldest first.
    """

    __slots__ = (
        "attempt", "began", "client", "events", "output", "output_marked", "span", "trace",
    )  # fmt: skip

    def __init__(self, began: float, trace: str, attempt: int) -> None:
        self.began = began
        self.trace = trace
        self.attempt = attempt
        self.output_marked = False
        self.output: TimedEvent | None = None
        self.span = self.client = ""
        self.events: list[TimedEvent] = []


class SpanStore:
    """The open spans of the stage with id `stage`, by request id.

    on_end: called with each span that ends.
    max_open: of more open spans the oldest is forgotten.
    """

    def __init__(
        self,
        stage: str,
        on_end: Callable[[RequestSpan], object],
        max_open: int = MAX_OPEN_SPANS,
    ) -> None:
        self.stage = stage
        self._on_end = on_end
        self._max_open = max_open
        self._open: OrderedDict[str, OpenSpan] = OrderedDict()
        self._changed: dict[str, None] = {}

    def __len__(self) -> int:
        """Open spans."""
        return len(self._open)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def get(self, request_id: str) -> OpenSpan | None:
        """The open span of a request."""
        return self._open.get(request_id)

    def begin(self, request_id: str, at: float, trace: str = "", attempt: int = 0) -> bool:
        """Opens a span; False if the request has an open span, which goes on."""
        if request_id in self._open:
            return False
        self._open[request_id] = OpenSpan(at, trace, attempt)
        self._changed[request_id] = None
        while len(self._open) > self._max_open:
            forgotten, _ = self._open.popitem(last=False)
            self._changed.pop(forgotten, None)
        return True

    def mark(self, request_id: str, at: float, name: str, **values: float) -> None:
        """Adds an event; does nothing if the request has no open span."""
        span = self._open.get(request_id)
        if span is not None:
            if len(span.events) >= MAX_EVENTS:
                del span.events[-1]
            span.events.append(TimedEvent(at, name, values))
            self._changed[request_id] = None

    def needing_mark(self, request_id: str, finish: str | None) -> OpenSpan | None:
        """The open span that an output concerns: the first output, or the last (`finish`); else
        None. Hot path: asked once for every token of every request."""
        span = self._open.get(request_id)
        return None if span is None or (span.output_marked and finish is None) else span

    def mark_first_output(self, request_id: str, at: float, name: str, **values: float) -> None:
        """Adds an event for the first output; nothing for further ones, until it starts over."""
        span = self._open.get(request_id)
        if span is not None and not span.output_marked:
            span.output_marked = True
            self.mark(request_id, at, name, **values)

    def count_output(self, request_id: str, at: float, output_tokens: int) -> None:
        """So many output tokens were there at that time. Hot path, while somebody watches."""
        span = self._open.get(request_id)
        if span is not None:
            span.output = TimedEvent(at, "streamed", {"output_tokens": output_tokens})
            self._changed[request_id] = None

    def amend(self, request_id: str, name: str, **values: float) -> None:
        """Adds values to the latest event of that name, if there is one."""
        span = self._open.get(request_id)
        for index in reversed(range(len(span.events) if span is not None else 0)):
            assert span is not None
            event = span.events[index]
            if event.name == name:
                span.events[index] = TimedEvent(event.at, name, {**event.values, **values})
                self._changed[request_id] = None
                return

    def end(self, request_id: str, at: float, outcome: str = "") -> None:
        """Ends a span; nothing if there is none."""
        span = self._open.pop(request_id, None)
        if span is not None:
            self._changed.pop(request_id, None)
            self._on_end(self._message(request_id, span, at, outcome))

    def finish(self, request_id: str, at: float, outcome: str, **values: float) -> None:
        """Ends the span of a request that is complete; `values`: of its last event."""
        self.mark(request_id, at, "finished", **values)
        self.end(request_id, at, outcome)

    def end_all(self, at: float, outcome: str) -> None:
        """Ends every span."""
        for request_id in list(self._open):
            self.end(request_id, at, outcome)

    def changes(self, limit: int) -> list[RequestSpan]:
        """At most `limit` open spans that began or got an event since they were returned last."""
        changed = list(islice(self._changed, limit))
        for request_id in changed:
            del self._changed[request_id]
        return [self._message(request_id, self._open[request_id]) for request_id in changed]

    def _message(
        self, request_id: str, span: OpenSpan, ended: float = 0.0, outcome: str = ""
    ) -> RequestSpan:
        streamed = (span.output,) if span.output is not None and not ended else ()
        return RequestSpan(
            stage=self.stage,
            request_id=request_id,
            began=span.began,
            ended=ended,
            outcome=outcome,
            trace=span.trace,
            moments=(*span.events, *streamed),
            span=span.span,
            client=span.client,
        )


class Exchange(NamedTuple):
    """One input of a core and all that came of it.

    event: the input. outputs: what the core sent. began, ended: Unix seconds at which the input
    came, and at which the outputs had left.
    """

    event: Message
    outputs: Sequence[Send]
    began: float
    ended: float


class SpanObserver(Protocol):
    """Reads the messages of one stage's core, and writes to `spans` what they did to requests."""

    spans: SpanStore

    def on_exchange(self, exchange: Exchange) -> None:
        """The next exchange of the core, in order."""
        ...


def _whole(span: RequestSpan) -> float | None:
    return span.ended - span.began


def _until_admitted(span: RequestSpan) -> float | None:
    admitted = _event(span, "admitted")
    return None if admitted is None else admitted.at - span.began


def _of_first_text(span: RequestSpan) -> float | None:
    """A detokenizer's span lasts as long as its request generates; only the time that it took for
    the first text is its own. Measured by its clock alone: the scheduler's may be that of another
    host."""
    first = _event(span, "first_text")
    return None if first is None else first.values.get("seconds")


def _event(span: RequestSpan, name: str) -> TimedEvent | None:
    return next((event for event in span.moments if event.name == name), None)


# Which part of a span counts as the stage's own time; docs/page.md says the same to people.
MEASURED_PART: dict[str, Callable[[RequestSpan], float | None]] = {
    "tokenizer": _whole,
    "scheduler": _until_admitted,
    "detokenizer": _of_first_text,
}


class StageDurations:
    """How long each stage takes for a request: medians over the last minute by `clock` (Unix
    seconds)."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._latest: dict[str, deque[tuple[float, float]]] = {}

    def on_span(self, span: RequestSpan) -> None:
        """Takes any span; open ones, and those of stages without a measured part, do not count."""
        part = MEASURED_PART.get(span.stage.partition("-")[0])
        seconds = part(span) if part is not None and span.ended else None
        if seconds is not None:
            latest = self._latest.setdefault(span.stage, deque(maxlen=MAX_DURATIONS))
            latest.append((span.ended, seconds))

    def median(self, stage: str) -> float | None:
        """Seconds; None where no span of the stage ended in the last minute."""
        oldest = self._clock() - MINUTE
        recent = [seconds for at, seconds in self._latest.get(stage, ()) if at >= oldest]
        from statistics import median  # only here: the command line's start pays for every import

        return median(recent) if recent else None

    def clear(self) -> None:
        """Forgets all durations."""
        self._latest.clear()


_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_SAMPLED = 1


class Traceparent(NamedTuple):
    """Both ids as hexadecimal digits."""

    trace_id: str
    span_id: str
    sampled: bool

    @property
    def text(self) -> str:
        """As the header has it."""
        return f"00-{self.trace_id}-{self.span_id}-{_SAMPLED if self.sampled else 0:02x}"


def read_traceparent(text: str) -> Traceparent | None:
    """What the header says; None if it is none that may be gone on with."""
    found = _TRACEPARENT.fullmatch(text)
    if found is None:
        return None
    version, trace_id, span_id, flags = found.groups()
    if version == "ff" or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return Traceparent(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))
