"""Request spans: what happened to each request in one stage, and when.

A `SpanStore` holds the open spans of a stage, bounded whatever its messages say; the observer of
the stage's kind writes to it what messages say of requests:

    stage        a span lasts
    gateway      from a client's Call to the OutputDelta or Failed that ends the choice
    tokenizer    from Submit until the request is passed on
    scheduler    from TokenizedRequest to the request's last row
    engine       from Admit to Release
    detokenizer  from OpenStream to the request's last text

The messages that carry spans to others are control.RequestSpan (a span) and control.TimedEvent (one
of its events). Times are passed in. Local events of the gateway are known by name and shape: its
package lies above this one.

`Traceparent` is the W3C header of that name: which trace a request belongs to, and which span it
comes from (https://www.w3.org/TR/trace-context/).
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, ClassVar, NamedTuple, Protocol

from pipeinfer.control import RequestSpan, TimedEvent
from pipeinfer.core import ANY_PLAN, PlanFilter, Send, StepDone
from pipeinfer.core import stage_number as stage_number
from pipeinfer.messages import (
    TOKEN_BYTES,
    Abort,
    Accepted,
    Admitted,
    BeginEpoch,
    Delivered,
    Done,
    Fault,
    Message,
    OpenStream,
    Plan,
    Refused,
    Release,
    Result,
    StopHit,
    Submit,
    Text,
    TokenizedRequest,
    Tokens,
    num_ids,
)
from pipeinfer.params import RequestParams, choice_id, choice_ids

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

    Attributes:
    - began: Unix seconds
    - trace: the W3C traceparent that the request came with, or ""
    - attempt: the gateway's attempt, as the stage knows it
    - output_marked: whether the first output has an event
    - output: how many output tokens there are by now, where they are counted; None once it has
      ended
    - span: the traceparent that a gateway passes on, where it has a span of its own; else ""
    - client: of a gateway's: hash of who asks; else ""
    - events: oldest first
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
        """Number of open spans."""
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
        """Counts the request's output tokens so far, at time `at`. Hot path while spans are
        kept."""
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
        """Ends every open span."""
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
    """An input of a core and all outputs that followed from it.

    Attributes:
    - event: the input
    - outputs: what the core sent
    - began, ended: Unix seconds at which the input came, and at which the outputs had left
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
        """The header's text of this trace context."""
        return f"00-{self.trace_id}-{self.span_id}-{_SAMPLED if self.sampled else 0:02x}"


def read_traceparent(text: str) -> Traceparent | None:
    """Parses the header; None if it is invalid or its trace cannot be continued."""
    found = _TRACEPARENT.fullmatch(text)
    if found is None:
        return None
    version, trace_id, span_id, flags = found.groups()
    if version == "ff" or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return Traceparent(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))


class _Call(Protocol):
    request_id: str
    params: RequestParams
    trace: str
    only_encode: bool


class _ClientDisconnected(Protocol):
    request_id: str
    reason: str


class _Delta(Protocol):
    request_id: str
    text: str
    ids: bytes
    token_offset: int
    finish: str | None
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


class _Failed(Protocol):
    request_id: str
    status: int

    @property
    def outcome(self) -> str: ...


class GatewayObserver:
    """Spans of a gateway: one for each choice of a request."""

    def __init__(self, spans: SpanStore) -> None:
        self.spans = spans

    def on_exchange(self, exchange: Exchange) -> None:
        event, outputs, began, ended = exchange
        taken = self._on_input.get(type(event).__name__)
        if taken is not None:
            taken(self, event, began)
        for send in outputs:  # hot path: a Delta for every token of every stream
            sent = self._on_output.get(type(send.message).__name__)
            if sent is not None:
                sent(self, send.message, ended)

    def _call(self, call: _Call, at: float) -> None:
        if call.only_encode:  # a question to the tokenizer: nothing is generated
            return
        for name in choice_ids(call.request_id, range(call.params.n)):
            self.spans.begin(name, at, call.trace)

    def _accepted(self, accepted: Accepted, at: float) -> None:
        for number in accepted.choices:
            name = choice_id(accepted.request_id, number)
            self.spans.mark(
                name, at, "accepted", group=accepted.group, prompt_tokens=accepted.prompt_tokens
            )

    def _disconnected(self, event: _ClientDisconnected, at: float) -> None:
        self.spans.mark(event.request_id, at, "hung_up")
        self.spans.end(event.request_id, at, "abort")

    def _submit(self, submit: Submit, at: float) -> None:
        for name in choice_ids(submit.request_id, submit.choices):
            self.spans.mark(name, at, "submitted")
            span = self.spans.get(name)
            if span is None:
                continue
            span.client = submit.client
            if submit.trace == span.trace:
                continue
            # The stages know one span of the gateway's: the first choice's. The others'
            # spans are its children as well.
            if name == submit.request_id:
                span.span = submit.trace
            else:
                span.trace = submit.trace

    def _delta(self, delta: _Delta, at: float) -> None:
        if delta.ids and delta.finish is None:
            self.spans.count_output(
                delta.request_id, at, delta.token_offset + len(delta.ids) // TOKEN_BYTES
            )
        if self.spans.needing_mark(delta.request_id, delta.finish) is None:
            return
        if delta.text or delta.ids:
            self.spans.mark_first_output(
                delta.request_id, at, "first_text", tokens=num_ids(delta.ids)
            )
        if delta.finish is not None:
            self.spans.finish(
                delta.request_id,
                at,
                delta.finish,
                prompt_tokens=delta.prompt_tokens,
                output_tokens=delta.output_tokens,
                cached_tokens=delta.cached_tokens,
            )

    def _failed(self, failed: _Failed, at: float) -> None:
        self.spans.mark(failed.request_id, at, "failed", status=failed.status)
        self.spans.end(failed.request_id, at, failed.outcome)

    _on_input: ClassVar[dict[str, Callable[[Any, Any, float], None]]] = {
        "Call": _call,
        "Accepted": _accepted,
        "ClientDisconnected": _disconnected,
    }
    _on_output: ClassVar[dict[str, Callable[[Any, Any, float], None]]] = {
        "Submit": _submit,
        "OutputDelta": _delta,
        "Failed": _failed,
    }


class TokenizerObserver:
    """Spans of a tokenizer: a span ends when its request is with a group. A request that is taken
    from a group without engines gets a second span."""

    def __init__(self, spans: SpanStore) -> None:
        self.spans = spans

    def on_exchange(self, exchange: Exchange) -> None:
        event, outputs, began, ended = exchange
        taken = self._on_input.get(type(event))
        # A Submit of which nothing comes is known already: its gateway has submitted all again.
        if taken is not None and (outputs or type(event) is not Submit):
            taken(self, event, began)
        for send in outputs:
            sent = self._on_output.get(type(send.message))
            if sent is not None:
                sent(self, send, ended)

    def _submit(self, submit: Submit, at: float) -> None:
        for name in choice_ids(submit.request_id, submit.choices):
            self.spans.begin(name, at, submit.trace, submit.attempt)

    def _delivered(self, delivered: Delivered, at: float) -> None:
        if self.spans.begin(delivered.request_id, at, attempt=delivered.attempt):
            self.spans.mark(
                delivered.request_id, at, "taken_over", output_tokens=num_ids(delivered.ids)
            )

    def _abort(self, abort: Abort, at: float) -> None:
        self.spans.end(abort.request_id, at, "abort")

    def _done(self, done: Done, at: float) -> None:
        for request_id in done.request_ids:
            self.spans.end(request_id, at, "abort")

    def _work(self, send: Send, at: float) -> None:
        work: Any = send.message
        span, group = self.spans.get(work.request_id), stage_number(send.to, "scheduler")
        if span is None or group is None:
            return
        span.trace = span.trace or work.trace
        prompt = num_ids(work.prompt_ids)
        self.spans.mark(work.request_id, at, "routed", group=group, prompt_tokens=prompt)
        self.spans.end(work.request_id, at)

    def _accepted(self, send: Send, at: float) -> None:
        accepted: Any = send.message
        if accepted.group >= 0:
            return  # its TokenizedRequest says so
        for choice in accepted.choices:
            name = choice_id(accepted.request_id, choice)
            self.spans.mark(name, at, "encoded", prompt_tokens=accepted.prompt_tokens)
            self.spans.end(name, at)

    def _refused(self, send: Send, at: float) -> None:
        refused: Any = send.message
        self.spans.mark(refused.request_id, at, "refused", status=refused.status)
        self.spans.end(refused.request_id, at, "refused")

    _on_input: ClassVar[dict[type, Callable[[Any, Any, float], None]]] = {
        Submit: _submit,
        Delivered: _delivered,
        Abort: _abort,
        Done: _done,
    }
    _on_output: ClassVar[dict[type, Callable[[Any, Send, float], None]]] = {
        TokenizedRequest: _work,
        Accepted: _accepted,
        Refused: _refused,
    }


class _SlotRecord(NamedTuple):
    """The request in a slot, and the number of the plan that admitted it."""

    request_id: str
    number: int


def _taken(work: TokenizedRequest, outputs: Sequence[Send]) -> bool:
    """Whether the scheduler took the request: it answers a repeated TokenizedRequest with
    nothing."""
    answers = (send.message for send in outputs if type(send.message) in (OpenStream, Refused))
    return work.request_id in [getattr(message, "request_id", "") for message in answers]


class SchedulerObserver:
    """Spans of a scheduler. Its steps are read in observer.py."""

    def __init__(self, spans: SpanStore) -> None:
        self.spans = spans
        self._slots: dict[int, _SlotRecord] = {}
        self._plans = PlanFilter(ANY_PLAN)

    def on_exchange(self, exchange: Exchange) -> None:
        event, outputs, began, ended = exchange
        taken = self._on_input.get(type(event))
        if taken is not None and (type(event) is not TokenizedRequest or _taken(event, outputs)):
            taken(self, event, began)
        # Rows of a result come first, although they are sent behind the next plan: that plan
        # releases the slots of requests that the result has ended.
        plans: list[Message] = []
        for send in outputs:
            message = send.message
            if type(message) is Plan:
                if self._plans.take(message.number) == "next":
                    plans.append(message)
                continue
            sent = self._on_output.get(type(message))
            if sent is not None:
                sent(self, message, ended)
        for plan in plans:
            self._plan(plan, ended)

    # --------------------------------------------------------------------------------------- inputs

    def _work(self, work: TokenizedRequest, at: float) -> None:
        name = work.request_id
        span = self.spans.get(name)
        if span is not None and work.attempt <= span.attempt:
            return
        if span is not None:  # sent again by its gateway: it starts over
            span.attempt, span.output_marked = work.attempt, False
            others = (item for item in self._slots.items() if item[1].request_id != name)
            self._slots = dict(others)
        self.spans.begin(name, at, work.trace, work.attempt)
        self.spans.mark(name, at, "queued", prompt_tokens=num_ids(work.prompt_ids))

    def _abort(self, abort: Abort, at: float) -> None:
        span = self.spans.get(abort.request_id)
        if span is not None and span.attempt <= abort.attempt:
            self.spans.mark(abort.request_id, at, "aborted")
            self.spans.end(abort.request_id, at, "abort")

    def _done(self, done: Done, at: float) -> None:
        for request_id in done.request_ids:
            self.spans.end(request_id, at, "abort")

    def _stop_hit(self, hit: StopHit, at: float) -> None:
        span = self.spans.get(hit.request_id)
        if span is not None and span.attempt == hit.attempt:
            self.spans.mark(hit.request_id, at, "stopped", output_tokens=hit.length)
            self.spans.end(hit.request_id, at, "stop")

    def _resumed(self, resumed: Delivered, at: float) -> None:
        self.spans.mark(resumed.request_id, at, "resumed", output_tokens=num_ids(resumed.ids))

    def _admitted(self, admitted: Admitted, _at: float) -> None:
        pairs = zip(_ids(admitted.slots), _ids(admitted.cached), strict=True)
        for slot, cached in pairs:
            record = self._slots.get(slot)
            if record is not None and record.number == admitted.number:
                self.spans.amend(record.request_id, "admitted", cached_tokens=cached)

    # -------------------------------------------------------------------------------------- outputs

    def _tokens(self, tokens: Tokens, at: float) -> None:
        for row in tokens.rows:  # hot path: once for every token of every request
            if self.spans.needing_mark(row.request_id, row.finish) is None:
                continue
            if row.ids:
                self.spans.mark_first_output(row.request_id, at, "first_token")
            if row.finish is not None:
                outputs = row.offset + num_ids(row.ids)
                self.spans.finish(
                    row.request_id,
                    at,
                    row.finish,
                    output_tokens=outputs,
                    cached_tokens=row.cached_tokens,
                )

    def _refused(self, refused: Refused, at: float) -> None:
        self.spans.mark(refused.request_id, at, "refused", status=refused.status)
        self.spans.end(refused.request_id, at, "refused")

    def _handed_over(self, handed_over: Delivered, at: float) -> None:
        self.spans.end(handed_over.request_id, at, "handed_over")

    def _begin(self, _begin: BeginEpoch, at: float) -> None:
        for record in self._slots.values():
            self.spans.mark(record.request_id, at, "engine_lost")
        self._slots.clear()
        self._plans = PlanFilter()

    def _plan(self, plan: Any, at: float) -> None:
        for release in plan.releases:
            record = self._slots.pop(release.slot, None)
            if record is not None:  # a request that has ended has no span, and gets no event
                outputs = num_ids(release.output_ids)
                self.spans.mark(record.request_id, at, "preempted", since_admitted=outputs)
        for admit in plan.admits:
            self._slots[admit.slot] = _SlotRecord(admit.request_id, plan.number)
            tokens = num_ids(admit.token_ids)
            self.spans.mark(admit.request_id, at, "admitted", slot=admit.slot, tokens=tokens)

    _on_input: ClassVar[dict[type, Callable[[Any, Any, float], None]]] = {
        TokenizedRequest: _work,
        Abort: _abort,
        Done: _done,
        StopHit: _stop_hit,
        Delivered: _resumed,
        Admitted: _admitted,
    }
    _on_output: ClassVar[dict[type, Callable[[Any, Any, float], None]]] = {
        Tokens: _tokens,
        Refused: _refused,
        Delivered: _handed_over,
        BeginEpoch: _begin,
    }


MAX_ENGINE_PLANS = 64  # plans; far more than are ever in flight


class _Waiting(NamedTuple):
    """A request of which no row was computed yet. `admitted`: the number of its plan."""

    request_id: str
    admitted: int


class EngineObserver:
    """Spans of an engine: one for each time that a request holds a slot. Ranks above 0 send no
    results: there a request's first row counts as computed when its step is done."""

    def __init__(self, spans: SpanStore) -> None:
        self.spans = spans
        self._slots: dict[int, str] = {}
        self._waiting: dict[int, _Waiting] = {}  # by slot
        self._rows: dict[int, frozenset[int]] = {}  # slots, by number of the plan
        self._epoch: int | None = None  # None: it takes part in the first that a message names
        self._plans = PlanFilter(ANY_PLAN)

    def on_exchange(self, exchange: Exchange) -> None:
        event, outputs, began, ended = exchange
        kinds = {type(send.message) for send in outputs}
        if type(event) is Plan:
            self._plan(event, began, ended)
        elif type(event) is BeginEpoch:
            self._lose(began)
            self._epoch, self._plans = event.epoch, PlanFilter()
        elif type(event) is StepDone and Result not in kinds:
            self._computed(event.number, self._rows.get(event.number, ()), (), ended)
        for send in outputs if kinds & self._on_output.keys() else ():
            sent = self._on_output.get(type(send.message))
            if sent is not None:
                sent(self, send.message, ended)

    def _plan(self, plan: Plan, began: float, ended: float) -> None:
        if self._epoch not in (None, plan.epoch) or self._plans.take(plan.number) != "next":
            return
        for release in plan.releases:
            self._release(release, began)
        for admit in plan.admits:
            name = self._slots[admit.slot] = admit.request_id
            self._waiting[admit.slot] = _Waiting(name, plan.number)
            tokens = num_ids(admit.token_ids)
            self.spans.begin(name, began, admit.trace)
            self.spans.mark(
                name,
                ended,
                "admitted",
                slot=admit.slot,
                tokens=tokens,
                prompt_tokens=admit.prompt_len,
            )
        if self._waiting:
            self._rows[plan.number] = frozenset(_ids(plan.slots))
            while len(self._rows) > MAX_ENGINE_PLANS:
                del self._rows[next(iter(self._rows))]

    def _release(self, release: Release, at: float) -> None:
        self._waiting.pop(release.slot, None)
        name = self._slots.pop(release.slot, "")
        self.spans.mark(name, at, "released", output_tokens=num_ids(release.output_ids))
        self.spans.end(name, at, "forgotten" if release.drop_prefix else "")

    def _admitted(self, admitted: Admitted, _at: float) -> None:
        pairs = zip(_ids(admitted.slots), _ids(admitted.cached), strict=True)
        for slot, cached in pairs:
            if slot in self._slots:
                self.spans.amend(self._slots[slot], "admitted", cached_tokens=cached)

    def _result(self, result: Result, at: float) -> None:
        if self._waiting:
            slots, counts = _ids(result.slots), _ids(result.counts)
            self._computed(result.number, slots, counts, at)
        self._rows.pop(result.number, None)

    def _computed(
        self, number: int, slots: Iterable[int], counts: list[int] | tuple[()], at: float
    ) -> None:
        """Step `number` is over. `counts`: tokens of each row, where they are known."""
        for index, slot in enumerate(slots):
            waiting = self._waiting.get(slot)
            if waiting is None or number < waiting.admitted:
                continue  # computed before; or the slot was another request's then
            if not counts:
                self.spans.mark(waiting.request_id, at, "computed")
            elif counts[index]:
                self.spans.mark(waiting.request_id, at, "computed", tokens=counts[index])
            else:
                continue  # deferred
            del self._waiting[slot]

    def _fault(self, _fault: Fault, at: float) -> None:
        self._lose(at)
        self._epoch = -1  # of none, until the next one begins

    def _lose(self, at: float) -> None:
        """All slots are empty: the epoch is over."""
        self._slots.clear()
        self._waiting.clear()
        self._rows.clear()
        self.spans.end_all(at, "lost")

    _on_output: ClassVar[dict[type, Callable[[Any, Any, float], None]]] = {
        Admitted: _admitted,
        Result: _result,
        Fault: _fault,
    }


class DetokenizerObserver:
    """Spans of a detokenizer."""

    def __init__(self, spans: SpanStore) -> None:
        self.spans = spans
        # Attempts that have ended, until their clients have all: a scheduler that was started again
        # opens them once more.
        self._over: OrderedDict[str, int] = OrderedDict()

    def on_exchange(self, exchange: Exchange) -> None:
        event, outputs, began, ended = exchange
        taken = self._on_input.get(type(event))
        if taken is not None:
            taken(self, event, began)
        texts = []
        for send in outputs:
            if type(send.message) is Text:
                texts.append(send.message)
            elif type(send.message) is StopHit:  # sent behind the text that it ends
                self._stop_hit(send.message, ended)
        for text in texts:
            self._text(text, began, ended)

    def _open(self, opened: OpenStream, at: float) -> None:
        name = opened.request_id
        span = self.spans.get(name)
        if opened.attempt <= self._over.get(name, -1):
            return
        if span is not None and opened.attempt <= span.attempt:
            return
        if span is not None:  # its output starts over
            span.attempt, span.output_marked = opened.attempt, False
        self.spans.begin(name, at, opened.trace, opened.attempt)
        self.spans.mark(name, at, "opened", group=opened.group)

    def _abort(self, abort: Abort, at: float) -> None:
        span = self.spans.get(abort.request_id)
        if abort.attempt >= self._over.get(abort.request_id, 0):
            self._over.pop(abort.request_id, None)
        if span is not None and span.attempt <= abort.attempt:
            self.spans.end(abort.request_id, at, "abort")

    def _done(self, done: Done, at: float) -> None:
        for request_id in done.request_ids:
            self._over.pop(request_id, None)
            self.spans.end(request_id, at, "abort")

    def _refused(self, refused: Refused, at: float) -> None:
        self.spans.end(refused.request_id, at, "refused")

    def _stop_hit(self, hit: StopHit, at: float) -> None:
        self.spans.mark(hit.request_id, at, "stop_string", output_tokens=hit.length)

    def _text(self, text: Text, came: float, at: float) -> None:
        """`came`: when the message came of which the text is made."""
        for row in text.rows:  # hot path: once for every token of every request
            span = self.spans.needing_mark(row.request_id, row.finish)
            if span is None:
                continue
            if row.text or row.ids:
                tokens, seconds = num_ids(row.ids), at - came
                self.spans.mark_first_output(
                    row.request_id, at, "first_text", tokens=tokens, seconds=seconds
                )
            if row.finish is not None:
                self.spans.finish(
                    row.request_id,
                    at,
                    row.finish,
                    output_tokens=row.output_tokens,
                    cached_tokens=row.cached_tokens,
                )
                self._over[row.request_id] = span.attempt
                while len(self._over) > MAX_OPEN_SPANS:
                    self._over.popitem(last=False)

    _on_input: ClassVar[dict[type, Callable[[Any, Any, float], None]]] = {
        OpenStream: _open,
        Abort: _abort,
        Done: _done,
        Refused: _refused,
    }


OBSERVERS: dict[str, Callable[[SpanStore], SpanObserver]] = {
    "gateway": GatewayObserver,
    "tokenizer": TokenizerObserver,
    "scheduler": SchedulerObserver,
    "engine": EngineObserver,
    "detokenizer": DetokenizerObserver,
}


def span_observer(name: str, spans: SpanStore) -> SpanObserver:
    """The observer of the kind of stage called `name`, which writes to `spans`."""
    return OBSERVERS[name](spans)


def _ids(raw: bytes) -> list[int]:
    """Unpacks ids as wire.unpack does, but without numpy, which no other user of this module
    needs."""
    return memoryview(raw).cast("i").tolist()
