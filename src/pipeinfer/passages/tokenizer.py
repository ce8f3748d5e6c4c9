"""What a tokenizer's messages say of its requests: from Submit until they are passed on.

Knows messages; nothing of how text becomes ids.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from pipeinfer.choices import choice_id, choice_ids
from pipeinfer.core import Send
from pipeinfer.messages import Abort, Accepted, Delivered, Done, Refused, Submit, Work
from pipeinfer.passages.book import Book
from pipeinfer.passages.exchange import Exchange
from pipeinfer.recovery import number


class TokenizerObserver:
    """See Observer. A passage ends when its request is with a group. One that is taken from a group
    without engines passes once more."""

    def __init__(self, book: Book) -> None:
        self.book = book

    def saw(self, exchange: Exchange) -> None:
        event, outputs, began, ended = exchange
        taken = self._takes.get(type(event))
        # A Submit of which nothing comes is known already: its gateway has told all again.
        if taken is not None and (outputs or type(event) is not Submit):
            taken(self, event, began)
        for send in outputs:
            sent = self._sends.get(type(send.message))
            if sent is not None:
                sent(self, send, ended)

    def _submit(self, submit: Submit, at: float) -> None:
        for name in choice_ids(submit.request_id, submit.choices):
            self.book.begin(name, at, submit.trace, submit.attempt)

    def _delivered(self, told: Delivered, at: float) -> None:
        if self.book.begin(told.request_id, at, attempt=told.attempt):
            self.book.mark(told.request_id, at, "taken_over", output_tokens=len(told.ids) // 4)

    def _abort(self, abort: Abort, at: float) -> None:
        self.book.end(abort.request_id, at, "abort")

    def _done(self, done: Done, at: float) -> None:
        for request_id in done.request_ids:
            self.book.end(request_id, at, "abort")

    def _work(self, send: Send, at: float) -> None:
        work: Any = send.message
        way, group = self.book.get(work.request_id), number(send.to, "scheduler")
        if way is None or group is None:
            return
        way.trace = way.trace or work.trace
        prompt = len(work.prompt_ids) // 4
        self.book.mark(work.request_id, at, "routed", group=group, prompt_tokens=prompt)
        self.book.end(work.request_id, at)

    def _accepted(self, send: Send, at: float) -> None:
        told: Any = send.message
        if told.group >= 0:
            return  # its Work says so
        for choice in told.choices:
            name = choice_id(told.request_id, choice)
            self.book.mark(name, at, "encoded", prompt_tokens=told.prompt_tokens)
            self.book.end(name, at)

    def _refused(self, send: Send, at: float) -> None:
        told: Any = send.message
        self.book.mark(told.request_id, at, "refused", status=told.status)
        self.book.end(told.request_id, at, "refused")

    _takes: ClassVar[dict[type, Callable[[Any, Any, float], None]]] = {
        Submit: _submit,
        Delivered: _delivered,
        Abort: _abort,
        Done: _done,
    }
    _sends: ClassVar[dict[type, Callable[[Any, Send, float], None]]] = {
        Work: _work,
        Accepted: _accepted,
        Refused: _refused,
    }
