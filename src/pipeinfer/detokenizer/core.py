"""The detokenizer without its I/O: token rows in, text rows out, one message per gateway.

Knows which requests are open and where their text and their stop-string hits go, and keeps what a
restarted scheduler must be told; how ids become text is the stream's business. Knows no transport,
no clock and no model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from pipeinfer.core import Send
from pipeinfer.detokenizer.incremental import DecoderFactory
from pipeinfer.detokenizer.scores import scores_of
from pipeinfer.detokenizer.stream import Stream
from pipeinfer.detokenizer.token_offsets import TokenOffsets
from pipeinfer.events import Drain, Leave, Tick, Unsent
from pipeinfer.messages import (
    Abort,
    CacheReset,
    Delivered,
    Done,
    Message,
    Open,
    PromptTokens,
    Recover,
    Recovered,
    Refused,
    State,
    StopHit,
    Text,
    TextRow,
    TokenRow,
    Tokens,
)
from pipeinfer.packing import unpack
from pipeinfer.recovery import RollCall, answer, number

log = logging.getLogger(__name__)


COUNTED = ("opened", "finished", "aborted", "tokens", "stop_hits", "late_rows", "failed")


class DetokenizerCore:
    """Turns the tokens of open requests into text.

    The scheduler sends Open before a request's first row. A second Open of the same attempt is a
    no-op; one of a higher attempt starts the request's output over. A request's decoder is dropped
    with its last row, its ids with Done or Abort; rows that come later (the scheduler has not heard
    of a stop string yet) are counted and dropped.

    `schedulers` are asked at the start for all output of the requests that run. What one says
    before its answer does not count.
    """

    __transient__ = ("_decoders",)  # no part of a snapshot: made of the checkpoint alone

    def __init__(
        self,
        decoders: DecoderFactory,
        stage: str = "detokenizer-0",
        incarnation: int = 0,
        schedulers: Sequence[str] = (),
    ) -> None:
        self._decoders = decoders
        self._stage = stage
        self._streams: dict[str, Stream] = {}
        self._ended: dict[str, tuple[int, Delivered]] = {}  # with the group, until Done
        self._roll_call = RollCall(stage, incarnation, schedulers)
        self._draining = False
        self._left = False
        self._counts = dict.fromkeys(COUNTED, 0)

    def handle(self, event: Message, now: float) -> list[Send]:
        """See Core. Raises TypeError for a message that is not a detokenizer's."""
        handler = self._handlers.get(type(event))
        if handler is None:
            raise TypeError(f"the detokenizer takes no {type(event).__name__}")
        return handler(self, event, now)

    def state(self) -> tuple[State, str]:
        return ("draining" if self._draining or self._left else "ready", "")

    def stats(self) -> dict[str, float]:
        """running, kept: requests that go on, and that ended and whose clients may not have it all;
        late_rows: rows for requests that are over or unknown, or from before an answer."""
        return {
            "running": len(self._streams),
            "kept": len(self._ended),
            **{f"{name}_total": count for name, count in self._counts.items()},
        }

    def idle(self) -> bool:
        return self._left or not self._streams

    def _on_open(self, event: Open, _now: float) -> list[Send]:
        if not self._heeds(event.group):
            return []
        over = self._ended.get(event.request_id)
        known = self._streams.get(event.request_id) if over is None else over[1]
        if known is None or event.attempt > known.attempt:
            self._ended.pop(event.request_id, None)
            self._counts["aborted"] += over is None and known is not None
            self._counts["opened"] += 1
            context = [token for token in unpack(event.context_ids).tolist() if token >= 0]
            decoder = self._decoders.open(context, event.params.skip_special_tokens)
            scores = scores_of(event.params, self._decoders)
            offsets = TokenOffsets(self._decoders.texts) if event.token_offsets else None
            self._streams[event.request_id] = Stream(event, decoder, scores, offsets)
        elif over is None and event.attempt == known.attempt:
            self._streams[event.request_id].group = event.group  # another one took it over
        return []

    def _on_tokens(self, event: Tokens, _now: float) -> list[Send]:
        if not self._heeds(event.group):
            self._counts["late_rows"] += len(event.rows)
            return []
        texts: dict[int, list[TextRow]] = {}
        hits: list[Send] = []
        for row in event.rows:
            stream = self._streams.get(row.request_id)
            if stream is None or stream.group != event.group >= 0:
                self._counts["late_rows"] += 1
                continue
            before = stream.received
            text = self._take(stream, row)
            if text is None:
                continue
            self._counts["tokens"] += stream.received - before
            texts.setdefault(stream.gateway, []).append(text)
            if text.finish is not None:
                hits += self._end(stream, text, row)
        return [
            *(Send("text", f"gateway-{to}", Text(tuple(rows))) for to, rows in texts.items()),
            *hits,
        ]

    def _on_prompt(self, event: PromptTokens, _now: float) -> list[Send]:
        stream = self._streams.get(event.request_id)
        if stream is None or stream.attempt != event.attempt or not self._heeds(event.group):
            return []
        if stream.group != event.group >= 0:
            return []
        try:
            text = stream.score(event)
        except Exception as error:  # as for rows of tokens
            about = {"request_id": event.request_id}
            log.exception("request %s: prompt at %d", event.request_id, event.first, extra=about)
            text = stream.fail(f"log-probs of the prompt cannot be read: {error}")
        if text is None:
            return []
        hits: list[Send] = []
        if text.finish is not None:
            row = TokenRow(request_id=event.request_id, offset=stream.received, ids=b"")
            hits = self._end(stream, text, row)
        return [Send("text", f"gateway-{stream.gateway}", Text((text,))), *hits]

    def _end(self, stream: Stream, text: TextRow, row: TokenRow) -> list[Send]:
        """`text`, made of `row`, is its last; returns what its scheduler is told."""
        del self._streams[stream.request_id]
        self._counts["finished"] += 1
        self._ended[stream.request_id] = stream.group, stream.delivered(row)
        return self._upstream(stream, text, row)

    def _heeds(self, group: int) -> bool:
        """Whether what the scheduler of `group` says counts: see RollCall.begun.

        Two groups run one request if two tokenizers in turn chose them, so it is not enough that
        the request is open here.
        """
        return self._roll_call.begun(f"scheduler-{group}")

    def _take(self, stream: Stream, row: TokenRow) -> TextRow | None:
        try:
            return stream.take(row)
        except Exception as error:  # ids that no tokenizer can decode fail their request alone
            about = {"request_id": row.request_id}
            log.exception("request %s: row at %d", row.request_id, row.offset, extra=about)
            return stream.fail(f"the output cannot be decoded: {error}")

    def _upstream(self, stream: Stream, text: TextRow, row: TokenRow) -> list[Send]:
        """Tells the scheduler about an end that it does not know of."""
        if stream.cut is not None:
            self._counts["stop_hits"] += 1
        elif text.finish == "error" and row.finish is None:
            self._counts["failed"] += 1
        else:
            return []
        hit = StopHit(stream.request_id, stream.attempt, stream.received)
        return [Send("stops", f"scheduler-{stream.group}", hit)]

    def _on_refused(self, event: Refused, _now: float) -> list[Send]:
        self._forget(event.request_id, event.attempt)
        return [Send("text", f"gateway-{event.gateway}", event)]

    def _on_cache_reset(self, event: CacheReset, _now: float) -> list[Send]:
        return [Send("text", f"gateway-{event.gateway}", event)]

    def _on_abort(self, event: Abort, _now: float) -> list[Send]:
        self._forget(event.request_id, event.attempt)
        return []

    def _forget(self, request_id: str, attempt: int) -> None:
        stream = self._streams.get(request_id)
        if stream is not None and stream.attempt <= attempt:
            del self._streams[request_id]
            self._counts["aborted"] += 1
        over = self._ended.get(request_id)
        if over is not None and over[1].attempt <= attempt:
            del self._ended[request_id]

    def _on_done(self, event: Done, _now: float) -> list[Send]:
        for request_id in event.request_ids:
            self._counts["aborted"] += self._streams.pop(request_id, None) is not None
            self._ended.pop(request_id, None)
        return []

    # ------------------------------------------------------------------------------------ recovery

    def _on_recover(self, event: Recover, _now: float) -> list[Send]:
        group = number(event.stage, "scheduler")
        if group is None:
            return []
        told = self._delivered(group)
        return answer(self._stage, event, (Send("recovery", event.stage, one) for one in told))

    def _delivered(self, group: int) -> Iterator[Delivered]:
        for stream in self._streams.values():
            if stream.group == group:
                yield stream.delivered()
        for its_group, ended in self._ended.values():
            if its_group == group:
                yield ended

    def _on_recovered(self, event: Recovered, _now: float) -> list[Send]:
        self._roll_call.hear(event)
        return []

    # -------------------------------------------------------------------------------- time and stop

    def _on_tick(self, _event: Tick, now: float) -> list[Send]:
        return self._roll_call.ask(now)

    def _on_drain(self, _event: Drain, _now: float) -> list[Send]:
        self._draining = True
        return []

    def _on_leave(self, _event: Leave, _now: float) -> list[Send]:
        self._left = True
        return []

    def _ignore(self, _event: Message, _now: float) -> list[Send]:
        return []

    _handlers: ClassVar[dict[type[Message], Callable[..., list[Send]]]] = {
        Tokens: _on_tokens,
        Open: _on_open,
        PromptTokens: _on_prompt,
        Refused: _on_refused,
        CacheReset: _on_cache_reset,
        Abort: _on_abort,
        Done: _on_done,
        Recover: _on_recover,
        Recovered: _on_recovered,
        Tick: _on_tick,
        Drain: _on_drain,
        Leave: _on_leave,
        Unsent: _ignore,
    }
