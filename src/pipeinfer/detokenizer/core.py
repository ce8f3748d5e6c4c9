"""The detokenizer without its I/O: token rows in, text rows out, one message per gateway.

Knows which requests are open and where their text and their stop-string hits go; how ids become
text is the stream's business. Knows no transport, no clock and no model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from pipeinfer.core import Send
from pipeinfer.detokenizer.incremental import DecoderFactory
from pipeinfer.detokenizer.stream import Stream
from pipeinfer.messages import (
    Abort,
    Drain,
    Message,
    Open,
    Refused,
    State,
    StopHit,
    Text,
    TextRow,
    Tick,
    TokenRow,
    Tokens,
    unpack,
)

log = logging.getLogger(__name__)


class DetokenizerCore:
    """Turns the tokens of open requests into text.

    The scheduler sends Open before a request's first row. A second Open of the same attempt is a
    no-op; one of a higher attempt starts the request's output over. A request's state is dropped
    with its last row; rows that come later (the scheduler has not heard of a stop string yet) are
    counted and dropped.
    """

    def __init__(self, decoders: DecoderFactory) -> None:
        self._decoders = decoders
        self._streams: dict[str, Stream] = {}
        self._draining = False
        self._tokens = 0
        self._stop_hits = 0
        self._late_rows = 0
        self._failed = 0
        self._handlers: dict[type[Message], Callable[..., list[Send]]] = {
            Tokens: self._on_tokens,
            Open: self._on_open,
            Refused: self._on_refused,
            Abort: self._on_abort,
            Tick: lambda event: [],
            Drain: self._on_drain,
        }

    def handle(self, event: Message, now: float) -> list[Send]:
        """See Core. Raises TypeError for a message that is not a detokenizer's."""
        handler = self._handlers.get(type(event))
        if handler is None:
            raise TypeError(f"the detokenizer takes no {type(event).__name__}")
        return handler(event)

    def state(self) -> tuple[State, str]:
        return ("draining" if self._draining else "ready", "")

    def stats(self) -> dict[str, float]:
        """running: open requests; late_rows: rows for requests that are over or unknown."""
        return {
            "running": len(self._streams),
            "tokens_total": self._tokens,
            "stop_hits_total": self._stop_hits,
            "late_rows_total": self._late_rows,
            "failed_total": self._failed,
        }

    def idle(self) -> bool:
        return not self._streams

    def _on_open(self, event: Open) -> list[Send]:
        known = self._streams.get(event.request_id)
        if known is None or event.attempt > known.attempt:
            context = unpack(event.context_ids).tolist()
            decoder = self._decoders.open(context, event.params.skip_special_tokens)
            self._streams[event.request_id] = Stream(event, decoder)
        return []

    def _on_tokens(self, event: Tokens) -> list[Send]:
        texts: dict[int, list[TextRow]] = {}
        hits: list[Send] = []
        for row in event.rows:
            stream = self._streams.get(row.request_id)
            if stream is None:
                self._late_rows += 1
                continue
            before = stream.received
            text = self._take(stream, row)
            if text is None:
                continue
            self._tokens += stream.received - before
            texts.setdefault(stream.gateway, []).append(text)
            if text.finish is not None:
                del self._streams[row.request_id]
                hits.extend(self._upstream(stream, text, row))
        return [
            *(Send("text", f"gateway-{to}", Text(tuple(rows))) for to, rows in texts.items()),
            *hits,
        ]

    def _take(self, stream: Stream, row: TokenRow) -> TextRow | None:
        try:
            return stream.take(row)
        except Exception as error:  # ids that no tokenizer can decode fail their request alone
            log.exception("request %s: row at %d", row.request_id, row.offset)
            return stream.fail(f"the output cannot be decoded: {error}")

    def _upstream(self, stream: Stream, text: TextRow, row: TokenRow) -> list[Send]:
        """Tells the scheduler about an end that it does not know of."""
        if stream.cut is not None:
            self._stop_hits += 1
        elif text.finish == "error" and row.finish is None:
            self._failed += 1
        else:
            return []
        hit = StopHit(stream.request_id, stream.attempt, stream.received)
        return [Send("stops", f"scheduler-{stream.group}", hit)]

    def _on_refused(self, event: Refused) -> list[Send]:
        self._forget(event.request_id, event.attempt)
        return [Send("text", f"gateway-{event.gateway}", event)]

    def _on_abort(self, event: Abort) -> list[Send]:
        self._forget(event.request_id, event.attempt)
        return []

    def _forget(self, request_id: str, attempt: int) -> None:
        stream = self._streams.get(request_id)
        if stream is not None and stream.attempt <= attempt:
            del self._streams[request_id]

    def _on_drain(self, event: Drain) -> list[Send]:
        self._draining = True
        return []
