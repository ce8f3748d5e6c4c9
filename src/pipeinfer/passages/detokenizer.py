"""What a detokenizer's messages say of its requests, from Open to their last text.

Knows messages; nothing of how ids become text.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar

from pipeinfer.messages import Abort, Done, Open, Refused, StopHit, Text
from pipeinfer.passages.book import MOST_OPEN, Book
from pipeinfer.passages.exchange import Exchange


class DetokenizerObserver:
    """See Observer."""

    def __init__(self, book: Book) -> None:
        self.book = book
        # Attempts that have ended, until their clients have all: a scheduler that was started again
        # opens them once more.
        self._over: OrderedDict[str, int] = OrderedDict()

    def saw(self, exchange: Exchange) -> None:
        event, outputs, began, ended = exchange
        taken = self._takes.get(type(event))
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
        way = self.book.get(name)
        if opened.attempt <= self._over.get(name, -1):
            return
        if way is not None and opened.attempt <= way.attempt:
            return
        if way is not None:  # its output starts over
            way.attempt, way.flowing = opened.attempt, False
        self.book.begin(name, at, opened.trace, opened.attempt)
        self.book.mark(name, at, "opened", group=opened.group)

    def _abort(self, abort: Abort, at: float) -> None:
        way = self.book.get(abort.request_id)
        if abort.attempt >= self._over.get(abort.request_id, 0):
            self._over.pop(abort.request_id, None)
        if way is not None and way.attempt <= abort.attempt:
            self.book.end(abort.request_id, at, "abort")

    def _done(self, done: Done, at: float) -> None:
        for request_id in done.request_ids:
            self._over.pop(request_id, None)
            self.book.end(request_id, at, "abort")

    def _refused(self, refused: Refused, at: float) -> None:
        self.book.end(refused.request_id, at, "refused")

    def _stop_hit(self, hit: StopHit, at: float) -> None:
        self.book.mark(hit.request_id, at, "stop_string", output_tokens=hit.length)

    def _text(self, text: Text, came: float, at: float) -> None:
        """`came`: when the message did of which the text is made."""
        for row in text.rows:  # hot path: once for every token of every request
            way = self.book.worth_a_look(row.request_id, row.finish)
            if way is None:
                continue
            if row.text or row.ids:
                tokens, seconds = len(row.ids) // 4, at - came
                self.book.first(row.request_id, at, "first_text", tokens=tokens, seconds=seconds)
            if row.finish is not None:
                self.book.finish(
                    row.request_id,
                    at,
                    row.finish,
                    output_tokens=row.output_tokens,
                    cached_tokens=row.cached_tokens,
                )
                self._over[row.request_id] = way.attempt
                while len(self._over) > MOST_OPEN:
                    self._over.popitem(last=False)

    _takes: ClassVar[dict[type, Callable[[Any, Any, float], None]]] = {
        Open: _open,
        Abort: _abort,
        Done: _done,
        Refused: _refused,
    }
