"""What a gateway's messages say of its requests: from a client's call to the last of its answer.

Local events of the gateway are known here by name and shape alone: its room lies above this one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from pipeinfer.choices import choice_id, choice_ids
from pipeinfer.messages import Accepted, Submit
from pipeinfer.params import SamplingParams
from pipeinfer.passages.book import Book
from pipeinfer.passages.exchange import Exchange


class _Call(Protocol):
    request_id: str
    params: SamplingParams
    trace: str
    only_encode: bool


class _Hangup(Protocol):
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
    """See Observer. A passage is a choice's, from Call to the Delta or Failed that ends it."""

    def __init__(self, book: Book) -> None:
        self.book = book

    def saw(self, exchange: Exchange) -> None:
        event, outputs, began, ended = exchange
        taken = self._takes.get(type(event).__name__)
        if taken is not None:
            taken(self, event, began)
        for send in outputs:  # hot path: a Delta for every token of every stream
            sent = self._sends.get(type(send.message).__name__)
            if sent is not None:
                sent(self, send.message, ended)

    def _call(self, call: _Call, at: float) -> None:
        if call.only_encode:  # a question to the tokenizer: nothing is generated
            return
        for name in choice_ids(call.request_id, range(call.params.n)):
            self.book.begin(name, at, call.trace)

    def _accepted(self, accepted: Accepted, at: float) -> None:
        for number in accepted.choices:
            name = choice_id(accepted.request_id, number)
            self.book.mark(
                name, at, "accepted", group=accepted.group, prompt_tokens=accepted.prompt_tokens
            )

    def _hangup(self, hangup: _Hangup, at: float) -> None:
        self.book.mark(hangup.request_id, at, "hung_up")
        self.book.end(hangup.request_id, at, "abort")

    def _submit(self, submit: Submit, at: float) -> None:
        for name in choice_ids(submit.request_id, submit.choices):
            self.book.mark(name, at, "submitted")
            way = self.book.get(name)
            if way is None or submit.trace == way.trace:
                continue
            # The stages are told of one span of the gateway's: the first choice's. The others'
            # spans are its children as well.
            if name == submit.request_id:
                way.span = submit.trace
            else:
                way.trace = submit.trace

    def _delta(self, delta: _Delta, at: float) -> None:
        if delta.ids and delta.finish is None:
            self.book.count(delta.request_id, at, delta.token_offset + len(delta.ids) // 4)
        if self.book.worth_a_look(delta.request_id, delta.finish) is None:
            return
        if delta.text or delta.ids:
            self.book.first(delta.request_id, at, "first_text", tokens=len(delta.ids) // 4)
        if delta.finish is not None:
            self.book.finish(
                delta.request_id,
                at,
                delta.finish,
                prompt_tokens=delta.prompt_tokens,
                output_tokens=delta.output_tokens,
                cached_tokens=delta.cached_tokens,
            )

    def _failed(self, failed: _Failed, at: float) -> None:
        self.book.mark(failed.request_id, at, "failed", status=failed.status)
        self.book.end(failed.request_id, at, failed.outcome)

    _takes: ClassVar[dict[str, Callable[[Any, Any, float], None]]] = {
        "Call": _call,
        "Accepted": _accepted,
        "Hangup": _hangup,
    }
    _sends: ClassVar[dict[str, Callable[[Any, Any, float], None]]] = {
        "Submit": _submit,
        "Delta": _delta,
        "Failed": _failed,
    }
