"""The span observers: what the messages of each kind of stage say of its requests.

    stage        a span lasts
    gateway      from a client's Call to the OutputDelta or Failed that ends the choice
    tokenizer    from Submit until the request is passed on
    scheduler    from Work to the request's last row
    engine       from Admit to Release
    detokenizer  from Open to the request's last text

Reads messages only. Local events of the gateway are known by name and shape: its package lies above
this one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from pipeinfer.core import ANY_PLAN, PlanFilter, Send, StepDone
from pipeinfer.core import stage_number as stage_number
from pipeinfer.messages import (
    Abort,
    Accepted,
    Admitted,
    Begin,
    Delivered,
    Done,
    Fault,
    Message,
    Open,
    Plan,
    Refused,
    Release,
    Result,
    StopHit,
    Submit,
    Text,
    Tokens,
    Work,
)
from pipeinfer.observe.spans import MAX_OPEN_SPANS, Exchange, SpanObserver, SpanStore
from pipeinfer.params import RequestParams, choice_id, choice_ids
from pipeinfer.wire import unpack


class _Call(Protocol):
    request_id: str
    params: RequestParams
    trace: str
    only_encode: bool


class _ClientLeft(Protocol):
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

    def _hangup(self, hangup: _ClientLeft, at: float) -> None:
        self.spans.mark(hangup.request_id, at, "hung_up")
        self.spans.end(hangup.request_id, at, "abort")

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
            self.spans.count_output(delta.request_id, at, delta.token_offset + len(delta.ids) // 4)
        if self.spans.needing_mark(delta.request_id, delta.finish) is None:
            return
        if delta.text or delta.ids:
            self.spans.mark_first_output(
                delta.request_id, at, "first_text", tokens=len(delta.ids) // 4
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
        "ClientDisconnected": _hangup,
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
                delivered.request_id, at, "taken_over", output_tokens=len(delivered.ids) // 4
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
        prompt = len(work.prompt_ids) // 4
        self.spans.mark(work.request_id, at, "routed", group=group, prompt_tokens=prompt)
        self.spans.end(work.request_id, at)

    def _accepted(self, send: Send, at: float) -> None:
        accepted: Any = send.message
        if accepted.group >= 0:
            return  # its Work says so
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
        Work: _work,
        Accepted: _accepted,
        Refused: _refused,
    }


class _SlotRecord(NamedTuple):
    """The request in a slot, and the number of the plan that admitted it."""

    request_id: str
    number: int


def _taken(work: Work, outputs: Sequence[Send]) -> bool:
    """Whether the scheduler took the request: it answers a repeated Work with nothing."""
    answers = (send.message for send in outputs if type(send.message) in (Open, Refused))
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
        if taken is not None and (type(event) is not Work or _taken(event, outputs)):
            taken(self, event, began)
        # What a result brought comes first, although its rows are sent behind the next plan: that
        # plan releases the slots of those that the result has ended.
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

    def _work(self, work: Work, at: float) -> None:
        name = work.request_id
        span = self.spans.get(name)
        if span is not None and work.attempt <= span.attempt:
            return
        if span is not None:  # sent again by its gateway: it starts over
            span.attempt, span.output_marked = work.attempt, False
            others = (item for item in self._slots.items() if item[1].request_id != name)
            self._slots = dict(others)
        self.spans.begin(name, at, work.trace, work.attempt)
        self.spans.mark(name, at, "queued", prompt_tokens=len(work.prompt_ids) // 4)

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
        self.spans.mark(resumed.request_id, at, "resumed", output_tokens=len(resumed.ids) // 4)

    def _admitted(self, admitted: Admitted, _at: float) -> None:
        pairs = zip(unpack(admitted.slots).tolist(), unpack(admitted.cached).tolist(), strict=True)
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
                outputs = row.offset + len(row.ids) // 4
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

    def _begin(self, _begin: Begin, at: float) -> None:
        for record in self._slots.values():
            self.spans.mark(record.request_id, at, "engine_lost")
        self._slots.clear()
        self._plans = PlanFilter()

    def _plan(self, plan: Any, at: float) -> None:
        for release in plan.releases:
            record = self._slots.pop(release.slot, None)
            if record is not None:  # a request that has ended has no span, and gets no event
                outputs = len(release.output_ids) // 4
                self.spans.mark(record.request_id, at, "preempted", since_admitted=outputs)
        for admit in plan.admits:
            self._slots[admit.slot] = _SlotRecord(admit.request_id, plan.number)
            tokens = len(admit.token_ids) // 4
            self.spans.mark(admit.request_id, at, "admitted", slot=admit.slot, tokens=tokens)

    _on_input: ClassVar[dict[type, Callable[[Any, Any, float], None]]] = {
        Work: _work,
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
        Begin: _begin,
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
        self._epoch: int | None = None  # None: it takes part in whichever it hears of
        self._plans = PlanFilter(ANY_PLAN)

    def on_exchange(self, exchange: Exchange) -> None:
        event, outputs, began, ended = exchange
        kinds = {type(send.message) for send in outputs}
        if type(event) is Plan:
            self._plan(event, began, ended)
        elif type(event) is Begin:
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
            tokens = len(admit.token_ids) // 4
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
            self._rows[plan.number] = frozenset(unpack(plan.slots).tolist())
            while len(self._rows) > MAX_ENGINE_PLANS:
                del self._rows[next(iter(self._rows))]

    def _release(self, release: Release, at: float) -> None:
        self._waiting.pop(release.slot, None)
        name = self._slots.pop(release.slot, "")
        self.spans.mark(name, at, "released", output_tokens=len(release.output_ids) // 4)
        self.spans.end(name, at, "forgotten" if release.drop_prefix else "")

    def _admitted(self, admitted: Admitted, _at: float) -> None:
        pairs = zip(unpack(admitted.slots).tolist(), unpack(admitted.cached).tolist(), strict=True)
        for slot, cached in pairs:
            if slot in self._slots:
                self.spans.amend(self._slots[slot], "admitted", cached_tokens=cached)

    def _result(self, result: Result, at: float) -> None:
        if self._waiting:
            slots, counts = unpack(result.slots).tolist(), unpack(result.counts).tolist()
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

    def _open(self, opened: Open, at: float) -> None:
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
                tokens, seconds = len(row.ids) // 4, at - came
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
        Open: _open,
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
