"""The detokenizer without its I/O: token rows in, text rows out, one message per gateway.

DetokenizerCore knows which requests are open and where their text and their stop-string hits go,
and keeps what a restarted scheduler needs. RequestStream is one request's way from token
rows to text rows; how ids become text is in text.py. Knows no transport, no clock and no model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import msgspec

from pipeinfer.core import (
    Drain,
    Leave,
    RollCall,
    Send,
    SendFailed,
    Tick,
    bracketed_answer,
    stage_id,
    stage_number,
)
from pipeinfer.detokenizer.retained_outputs import (
    NO_BOUNDS,
    DroppedOutput,
    Origins,
    OutputBounds,
    RetainedOutput,
    RetainedOutputs,
    single_tokens,
)
from pipeinfer.detokenizer.text import (
    DecoderFactory,
    IncrementalDecoder,
    StopStrings,
    TokenOffsets,
    TokenTexts,
)
from pipeinfer.messages import (
    TOKEN_BYTES,
    Abort,
    CacheReset,
    Delivered,
    Done,
    FinishReason,
    HandOver,
    LogprobTexts,
    Message,
    OpenStream,
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
from pipeinfer.params import RequestParams
from pipeinfer.wire import (
    LOGPROB_WORDS,
    NO_ID,
    logprob_bytes,
    logprob_layout,
    unpack,
    unpack_few,
)

log = logging.getLogger(__name__)


STATISTICS = (
    "opened",
    "finished",
    "aborted",
    "tokens",
    "stop_hits",
    "late_rows",
    "failed",
    "diverged",
    "dropped",
)


class TokensDiverged(Exception):
    """The tokens of a group that runs a request are not those that were read of the request."""


class DetokenizerCore:
    """Turns the tokens of open requests into text.

    The scheduler sends OpenStream before a request's first row. A second OpenStream of the same
    attempt is a no-op; one of a higher attempt starts the request's output over. A request's
    decoder is dropped with its last row, its ids with Done or Abort; rows that come later (a
    StopHit has not reached the scheduler yet) are counted and dropped.

    Two groups run one request if two tokenizers in turn chose them, or if one group took the
    request over and the other does not know that yet. The group whose rows come first goes on with
    the request, while its tokens are those that were read before. Where they differ, the gateway is
    asked for a next attempt, which begins with the tokens that the client has.

    `schedulers` are asked at the start for all output of their requests. Messages of a
    scheduler before its answer are dropped.

    A request with a `retention` has one text row for each token, and one for its end, however many
    came together. So a gateway that is started again gets the same rows, which are made anew of the
    ids. Of requests that have ended the oldest are dropped beyond `bounds`, and their gateways get
    an Abort.
    """

    __transient__ = ("_decoders",)  # no part of a snapshot: made of the checkpoint alone

    def __init__(
        self,
        decoders: DecoderFactory,
        stage: str = "detokenizer-0",
        incarnation: int = 0,
        schedulers: Sequence[str] = (),
        bounds: OutputBounds = NO_BOUNDS,
    ) -> None:
        self._decoders = decoders
        self._stage = stage
        self._streams: dict[str, RequestStream] = {}
        self._ended: dict[str, tuple[int, Delivered]] = {}  # with the group, until Done
        self._retained = RetainedOutputs(bounds)
        self._roll_call = RollCall(stage, incarnation, schedulers)
        self._draining = False
        self._has_left = False
        self._counts = dict.fromkeys(STATISTICS, 0)

    def handle(self, event: Message, now: float) -> list[Send]:
        """See Core. Raises TypeError for a message that is not a detokenizer's."""
        handler = self._handlers.get(type(event))
        if handler is None:
            raise TypeError(f"the detokenizer takes no {type(event).__name__}")
        return handler(self, event, now)

    def state(self) -> tuple[State, str]:
        return ("draining" if self._draining or self._has_left else "ready", "")

    def stats(self) -> dict[str, float]:
        """Statistics; docs/reference/statistics.md explains all of them.

        - running: requests that go on
        - kept: ended requests without a Done or Abort yet
        - kept_bytes: bytes of ended requests whose answers outlive their gateway
        - dropped: of these requests, those that were dropped for their bytes
        - aborted: requests that ended without a last row here, by an Abort, by a later attempt, or
          by a Done, where another detokenizer's rows have already ended the answer
        - late_rows: rows of requests that have ended or are unknown, or from before the answer of
          their scheduler
        """
        return {
            "running": len(self._streams),
            "kept": len(self._ended),
            "kept_bytes": self._retained.bytes,
            **{f"{name}_total": count for name, count in self._counts.items()},
        }

    def idle(self) -> bool:
        return self._has_left or not self._streams

    def _on_open(self, event: OpenStream, _now: float) -> list[Send]:
        if not self._counts_from(event.group):
            return []
        over = self._ended.get(event.request_id)
        known = self._streams.get(event.request_id) if over is None else over[1]
        if known is None or event.attempt > known.attempt:
            self._forget_ended(event.request_id)
            self._counts["aborted"] += over is None and known is not None
            self._counts["opened"] += 1
            self._streams[event.request_id] = self._stream(event)
        elif over is None and event.attempt == known.attempt:
            self._streams[event.request_id].move_to(event.group)
        return []

    def _stream(self, opened: OpenStream) -> RequestStream:
        """A stream without output."""
        context = [token for token in unpack(opened.context_ids).tolist() if token >= 0]
        decoder = self._decoders.open(context, opened.params.skip_special_tokens)
        logprobs = logprobs_of(opened.params, self._decoders)
        offsets = TokenOffsets(self._decoders.texts) if opened.token_offsets else None
        return RequestStream(opened, decoder, logprobs, offsets)

    def _on_tokens(self, event: Tokens, now: float) -> list[Send]:
        if not self._counts_from(event.group):
            self._counts["late_rows"] += len(event.rows)
            return []
        texts: dict[int, list[TextRow]] = {}
        hits: list[Send] = []
        for row in event.rows:
            stream = self._streams.get(row.request_id)
            if stream is None:
                self._counts["late_rows"] += 1
                continue
            before = stream.num_tokens
            if row.offset != before or stream.group != event.group >= 0:
                # Never on the undisturbed path.
                try:
                    if not stream.take_over(row, event.group):
                        self._counts["late_rows"] += 1
                        continue
                except TokensDiverged:
                    hits.append(self._next_attempt(stream))
                    continue
            made = self._process_row(stream, row)
            if not made:
                continue
            self._counts["tokens"] += stream.num_tokens - before
            texts.setdefault(stream.gateway, []).extend(made)
            if made[-1].finish is not None:
                hits += self._finish(stream, made[-1], row, now)
        return [
            *(
                Send("text", stage_id("gateway", to), Text(tuple(rows)))
                for to, rows in texts.items()
            ),
            *hits,
        ]

    def _on_prompt(self, event: PromptTokens, now: float) -> list[Send]:
        stream = self._streams.get(event.request_id)
        if stream is None or stream.attempt != event.attempt or not self._counts_from(event.group):
            return []
        if not stream.is_run_by(event.group):
            return []
        try:
            text = stream.process_prompt_logprobs(event)
        except Exception as error:  # as for rows of tokens
            about = {"request_id": event.request_id}
            log.exception("request %s: prompt at %d", event.request_id, event.first, extra=about)
            text = stream.fail(f"log-probs of the prompt cannot be read: {error}")
        if text is None:
            return []
        hits: list[Send] = []
        if text.finish is not None:
            row = TokenRow(request_id=event.request_id, offset=stream.num_tokens, ids=b"")
            hits = self._finish(stream, text, row, now)
        return [Send("text", stage_id("gateway", stream.gateway), Text((text,))), *hits]

    def _finish(
        self, stream: RequestStream, text: TextRow, row: TokenRow, now: float
    ) -> list[Send]:
        """`text`, made of `row`, is the request's last; returns the StopHit for its scheduler, if
        the scheduler does not know of the end."""
        name, delivered = stream.request_id, stream.delivered(row)
        del self._streams[name]
        self._counts["finished"] += 1
        self._ended[name] = stream.group, delivered
        hits = self._stop_hits(stream, text, row)
        if stream.opened.retention is not None:
            last = row
            if text.finish == "error":  # perhaps of what cannot be decoded, which is in no output
                last = msgspec.structs.replace(
                    row, finish="error", stop_token=None, error=text.error
                )
            elif stream.stop_len is not None:  # its ids end there, and with no stop token
                last = msgspec.structs.replace(row, stop_token=None)
            output = RetainedOutput(stream.opened, tuple(stream.prompts), delivered, last)
            dropped = self._retained.add(output, now)
            self._counts["dropped"] += len(dropped)
            hits += map(_abort_of, dropped)
        return hits

    def _next_attempt(self, stream: RequestStream) -> Send:
        """The tokens that the client has are the right ones: its gateway begins the next attempt
        with them. Rows of this attempt are late from now on."""
        del self._streams[stream.request_id]
        self._counts["diverged"] += 1
        hand_over = HandOver(stream.request_id, stream.attempt)
        return Send("recovery", stage_id("gateway", stream.gateway), hand_over)

    def _counts_from(self, group: int) -> bool:
        """Whether messages of the scheduler of `group` count: see RollCall.has_begun. That the
        request is open here is not enough, since another group may run it, too."""
        return self._roll_call.has_begun(stage_id("scheduler", group))

    def _process_row(self, stream: RequestStream, row: TokenRow) -> list[TextRow]:
        """The text rows of `row`; the first with `finish` is the last."""
        made: list[TextRow] = []
        try:
            if stream.opened.retention is None:
                text = stream.process_row(row)
                return [] if text is None else [text]
            for piece in single_tokens(row, stream.num_tokens, stream.logprob_size):
                if (text := stream.process_row(piece)) is not None:
                    made.append(text)
                    if text.finish is not None:
                        break
        except Exception as error:  # ids that no tokenizer can decode fail their request alone
            about = {"request_id": row.request_id}
            log.exception("request %s: row at %d", row.request_id, row.offset, extra=about)
            made.append(stream.fail(f"the output cannot be decoded: {error}"))
        return made

    def _stop_hits(self, stream: RequestStream, text: TextRow, row: TokenRow) -> list[Send]:
        """The StopHit for the scheduler, if `text` is an end that it does not know of."""
        if stream.stop_len is not None:
            self._counts["stop_hits"] += 1
        elif text.finish == "error" and row.finish is None:
            self._counts["failed"] += 1
        else:
            return []
        hit = StopHit(stream.request_id, stream.attempt, stream.num_tokens)
        return [Send("stops", stage_id("scheduler", stream.group), hit)]

    def _on_refused(self, event: Refused, _now: float) -> list[Send]:
        self._remove(event.request_id, event.attempt)
        return [Send("text", stage_id("gateway", event.gateway), event)]

    def _on_cache_reset(self, event: CacheReset, _now: float) -> list[Send]:
        return [Send("text", stage_id("gateway", event.gateway), event)]

    def _on_abort(self, event: Abort, _now: float) -> list[Send]:
        stream = self._streams.get(event.request_id)
        if (
            stream is not None
            and stream.attempt == event.attempt
            and stream.on_handed_over(event.group)
        ):
            return []  # other groups go on with it
        group, ended = self._ended.get(event.request_id, (-1, None))
        if ended is not None and ended.attempt == event.attempt and group != event.group >= 0:
            return []
        self._remove(event.request_id, event.attempt)
        return []

    def _remove(self, request_id: str, attempt: int) -> None:
        stream = self._streams.get(request_id)
        if stream is not None and stream.attempt <= attempt:
            del self._streams[request_id]
            self._counts["aborted"] += 1
        over = self._ended.get(request_id)
        if over is not None and over[1].attempt <= attempt:
            self._forget_ended(request_id)

    def _forget_ended(self, request_id: str) -> None:
        self._ended.pop(request_id, None)
        self._retained.remove(request_id)

    def _on_done(self, event: Done, _now: float) -> list[Send]:
        for request_id in event.request_ids:
            self._counts["aborted"] += self._streams.pop(request_id, None) is not None
            self._forget_ended(request_id)
        return []

    # ------------------------------------------------------------------------------------ recovery

    def _on_recover(self, event: Recover, _now: float) -> list[Send]:
        gateway = stage_number(event.stage, "gateway")
        if gateway is not None:
            # The gateway asks again until all schedulers have answered.
            known = self._retained_text(gateway) if self._roll_call.complete else None
            return [] if known is None else bracketed_answer(self._stage, event, known)
        group = stage_number(event.stage, "scheduler")
        if group is None:
            return []
        delivered = self._delivered(group)
        return bracketed_answer(
            self._stage, event, (Send("recovery", event.stage, one) for one in delivered)
        )

    def _delivered(self, group: int) -> Iterator[Delivered]:
        for stream in self._streams.values():
            if stream.group == group:
                yield stream.delivered()
        for its_group, ended in self._ended.values():
            if its_group == group:
                yield ended

    def _retained_text(self, gateway: int) -> Iterator[Send]:
        """All of the text of retained requests of a gateway, behind what it must know of each."""
        live = (s.output() for s in self._streams.values() if s.opened.retention is not None)
        to = stage_id("gateway", gateway)
        outputs = [one for one in (*live, *self._retained) if one.opened.gateway == gateway]
        origins = Origins(output.opened for output in outputs)
        for output in outputs:
            if (adopt := origins.adopt(output.opened)) is not None:
                yield Send("recovery", to, adopt)
            rows = self._decode_from_start(output)
            for begin in range(0, len(rows), ROWS_PER_MESSAGE):
                part = tuple(rows[begin : begin + ROWS_PER_MESSAGE])
                yield Send("text", to, Text(part))
        yield from (_abort_of(one) for one in self._retained.dropped if one.gateway == gateway)

    def _decode_from_start(self, output: RetainedOutput) -> list[TextRow]:
        """The rows that the gateway before was sent."""
        stream = self._stream(output.opened)
        prompts = [stream.process_prompt_logprobs(one) for one in output.prompts]
        rows = self._process_row(stream, output.row())
        return [*(row for row in prompts if row is not None), *rows]

    def _on_recovered(self, event: Recovered, _now: float) -> list[Send]:
        self._roll_call.on_recovered(event)
        return []

    # -------------------------------------------------------------------------------- time and stop

    def _on_tick(self, _event: Tick, now: float) -> list[Send]:
        return self._roll_call.ask(now)

    def _on_drain(self, _event: Drain, _now: float) -> list[Send]:
        self._draining = True
        return []

    def _on_leave(self, _event: Leave, _now: float) -> list[Send]:
        self._has_left = True
        return []

    def _ignore(self, _event: Message, _now: float) -> list[Send]:
        return []

    _handlers: ClassVar[dict[type[Message], Callable[..., list[Send]]]] = {
        Tokens: _on_tokens,
        OpenStream: _on_open,
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
        SendFailed: _ignore,
    }


ROWS_PER_MESSAGE = 512  # text rows of a request that are sent again together


def _abort_of(dropped: DroppedOutput) -> Send:
    abort = Abort(dropped.request_id, dropped.attempt, "too much is kept")
    return Send("recovery", stage_id("gateway", dropped.gateway), abort)


class RequestStream:
    """The text of one request, from token rows to text rows. It has the last word on the end of the
    request, because it alone reads tokens as text in order. After a row with `finish` the request
    has ended and its stream must be dropped. All ids read are kept: a restarted scheduler goes on
    from them.

    Attributes:
    - num_tokens: output tokens read so far
    - stop_len: the number of output tokens up to and including the one that completed a stop
      string, None while there was none
    - gateway: the number of the gateway that sent the request
    - group: the data-parallel group whose row was the last, or that opened the request since
    - opened: with what it began
    - prompts: of a retained request, what came of its prompt's log-probs
    """

    __slots__ = (
        "_decoder",
        "_ids",
        "_logprobs",
        "_offsets",
        "_other_groups",
        "_params",
        "_sent_bytes",
        "_stops",
        "attempt",
        "gateway",
        "group",
        "num_tokens",
        "opened",
        "prompts",
        "request_id",
        "stop_len",
    )

    def __init__(
        self,
        opened: OpenStream,
        decoder: IncrementalDecoder,
        logprobs: RequestLogprobs | None = None,
        offsets: TokenOffsets | None = None,
    ) -> None:
        """`logprobs`: for log-probs, `offsets`: for places of tokens, if the request asks for
        them."""
        self.opened = opened
        self.prompts: list[PromptTokens] = []
        self._params = params = opened.params
        self._logprobs = logprobs
        self.request_id = opened.request_id
        self.attempt = opened.attempt
        self.gateway = opened.gateway
        self.group = opened.group
        # Groups that run the request, too, and how many of their tokens were read.
        self._other_groups: dict[int, int] = {}
        self.num_tokens = 0
        self.stop_len: int | None = None
        self._ids = bytearray()
        self._decoder = decoder
        self._stops = (
            StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None
        )
        self._sent_bytes = 0
        self._offsets = offsets

    def is_run_by(self, group: int) -> bool:
        """Whether that group has opened this attempt of the request; -1: any group."""
        return group in (-1, self.group) or group in self._other_groups

    def move_to(self, group: int) -> None:
        """`group` has opened the request, or has sent more of its tokens than the others."""
        if group != self.group:
            self._other_groups[self.group] = self.num_tokens
            self._other_groups.pop(group, None)
            self.group = group

    def on_handed_over(self, group: int) -> bool:
        """Whether others go on with the request, now that `group` does no more; -1: all groups."""
        if group != self.group:
            self._other_groups.pop(group, None)
            return group >= 0
        if self._other_groups:
            self.group, _ = self._other_groups.popitem()  # its next row may repeat tokens
            return True
        return False

    def take_over(self, row: TokenRow, group: int) -> bool:
        """Makes the stream that of `group`, which sent `row` (-1: this stream's group), if the row
        has more tokens than were read, or the end; else notes how far that group has come. Returns
        whether the row is to be processed. Raises TokensDiverged if its tokens are others."""
        from_own_group = group in (-1, self.group)
        if not from_own_group and row.offset > self._other_groups.get(group, -1):
            self._other_groups.pop(group, None)  # rows of that group were lost
            return False
        begin = TOKEN_BYTES * row.offset
        overlap = max(min(len(row.ids), len(self._ids) - begin), 0)
        if overlap and not self._ids.startswith(row.ids[:overlap], begin):
            raise TokensDiverged
        end = row.offset + len(row.ids) // TOKEN_BYTES
        if from_own_group:
            return True
        if end > self.num_tokens or row.finish is not None:
            self.move_to(group)
            return True
        self._other_groups[group] = end
        return False

    def process_row(self, row: TokenRow) -> TextRow | None:
        """The text row for `row`; None if all of it was seen before.

        Ids go out with the row that they came in, even where their text waits for more. A hole
        before `row` fails the request: its text would be wrong.
        """
        raw = row.ids
        start = self.num_tokens
        if row.offset != start:
            if row.offset > start:
                return self.fail(f"output tokens {start} to {row.offset - 1} were lost")
            raw = raw[TOKEN_BYTES * (start - row.offset) :]
        if not raw and row.finish is None:
            return None
        stop_token = row.stop_token if row.finish == "stop" else None
        shown = raw[:-TOKEN_BYTES] if stop_token is not None else raw
        text, hit = self._decode(unpack_few(shown))
        if hit is not None:
            return self._ended_by_string(row, start, shown, text, hit)
        self.num_tokens = start + len(raw) // TOKEN_BYTES
        self._append_ids(row, start, raw)
        if row.finish is not None:
            return self._ended(row, start, shown, text, stop_token)
        return self._row(start, shown, text, cached_tokens=row.cached_tokens)

    def process_prompt_logprobs(self, prompt_tokens: PromptTokens) -> TextRow | None:
        """The text row for log-probs of the prompt; None if all of them were seen before."""
        logprobs = self._logprobs
        if logprobs is None:
            return None
        seen = logprobs.num_prompt_logprobs - prompt_tokens.first
        if seen < 0:
            return self.fail(f"log-probs of prompt tokens before {prompt_tokens.first} were lost")
        shown = logprobs.add_prompt(
            prompt_tokens.ids[TOKEN_BYTES * seen :],
            prompt_tokens.logprobs[logprobs.prompt.logprob_size * seen :],
        )
        if shown is None:
            return None
        if self.opened.retention is not None:
            self.prompts.append(prompt_tokens)
        row = self._row(self.num_tokens, b"", "")
        return msgspec.structs.replace(row, prompt=shown, prompt_offset=prompt_tokens.first + seen)

    @property
    def num_prompt_logprobs(self) -> int:
        """Prompt tokens whose log-probs are known."""
        return 0 if self._logprobs is None else self._logprobs.num_prompt_logprobs

    @property
    def logprob_size(self) -> int:
        """Bytes of the log-probs of an output token."""
        return 0 if self._logprobs is None else self._logprobs.output.logprob_size

    def output(self) -> RetainedOutput:
        """The prompt and the output so far of a retained request."""
        return RetainedOutput(self.opened, tuple(self.prompts), self.delivered())

    def fail(self, reason: str) -> TextRow:
        """The request ends with an error that its client sees."""
        return self._row(self.num_tokens, b"", "", finish="error", error=reason)

    def delivered(self, last: TokenRow | None = None) -> Delivered:
        """The request's output for a restarted scheduler; `last`: the row with which it ended."""
        logprobs = self._logprobs
        same_stop = self.stop_len is not None  # the end, in the same ids
        return Delivered(
            request_id=self.request_id,
            attempt=self.attempt,
            ids=bytes(self._ids),
            ended=last is not None,
            finish=None if last is None or same_stop else last.finish,
            error="" if last is None or same_stop else last.error,
            logprobs=b"" if logprobs is None else bytes(logprobs.output.raw),
            prompt_logprobs=b"" if logprobs is None else bytes(logprobs.prompt.raw),
        )

    def _append_ids(self, row: TokenRow, start: int, ids: bytes) -> None:
        """`ids` are output tokens from `start` on, and there are no others behind them."""
        self._ids[TOKEN_BYTES * start :] = ids
        if self._logprobs is not None:
            side, many = self._logprobs.output, len(ids) // TOKEN_BYTES
            begin = side.logprob_size * (start - row.offset)
            side.raw[side.logprob_size * start :] = row.logprobs[
                begin : begin + side.logprob_size * many
            ]

    def _decode(self, ids: Sequence[int]) -> tuple[str, str | None]:
        """Decodes the ids into (text, stop string). With a stop string stop_len is set, and the
        rest is not decoded."""
        # Hot path: runs once for every output token of every request.
        step = self._decoder.step
        stops, logprobs, offsets = self._stops, self._logprobs, self._offsets
        if stops is None and logprobs is None and offsets is None:
            return (step(ids[0]) if len(ids) == 1 else "".join(map(step, ids))), None
        parts: list[str] = []
        for count, token in enumerate(ids, self.num_tokens + 1):
            text, hit = step(token), None
            if offsets is not None:
                offsets.add_token(token, text)
            if logprobs is not None:
                logprobs.output.add_token(token, text)
            if stops is not None:
                text, hit = stops.feed(text, count > self._params.min_tokens)
            parts.append(text)
            if hit is not None:
                self.stop_len = count
                return "".join(parts), hit
        return "".join(parts), None

    def _ended_by_string(
        self, row: TokenRow, start: int, ids: bytes, text: str, hit: str
    ) -> TextRow:
        assert self.stop_len is not None
        self.num_tokens = self.stop_len
        ids = ids[: TOKEN_BYTES * (self.stop_len - start)]
        self._append_ids(row, start, ids)
        return self._row(
            start, ids, text, finish="stop", stop_reason=hit, cached_tokens=row.cached_tokens
        )

    def _ended(
        self, row: TokenRow, start: int, ids: bytes, text: str, stop_token: int | None
    ) -> TextRow:
        # A character that only the prompt began is no part of the output.
        tail = self._decoder.flush() if start or ids else ""
        if self._stops is not None:
            shown, hit = self._stops.feed(tail, self.num_tokens > self._params.min_tokens)
            text += shown
            if hit is not None:
                self.stop_len = start + len(ids) // TOKEN_BYTES
                return self._ended_by_string(row, start, ids, text, hit)
            tail = self._stops.flush()
        return self._row(
            start,
            ids,
            text + tail,
            finish=row.finish,
            stop_reason=stop_token if stop_token in self._params.stop_token_ids else None,
            cached_tokens=row.cached_tokens,
            error=row.error,
        )

    def _row(
        self,
        start: int,
        ids: bytes,
        text: str,
        *,
        finish: FinishReason | None = None,
        stop_reason: str | int | None = None,
        cached_tokens: int = 0,
        error: str = "",
    ) -> TextRow:
        before, request_logprobs, logprobs, vector = self._sent_bytes, self._logprobs, None, b""
        if request_logprobs is not None:
            side = request_logprobs.output
            if self._params.vector_size:
                vector = bytes(side.raw)
            else:
                logprobs = side.take_texts(ids, bytes(side.raw[side.logprob_size * start :]))
        offsets = b"" if self._offsets is None else self._offsets.take(len(ids) // TOKEN_BYTES)
        self._sent_bytes += len(text) if text.isascii() else len(text.encode())
        return TextRow(
            request_id=self.request_id,
            attempt=self.attempt,
            text=text,
            byte_offset=before,
            token_offset=start,
            ids=ids,
            finish=finish,
            stop_reason=stop_reason,
            output_tokens=self.num_tokens,
            cached_tokens=cached_tokens,
            error=error,
            logprobs=logprobs,
            offsets=offsets,
            vector=vector,
        )


class SequenceLogprobs:
    """Log-probs of the tokens of an output, or of a prompt.

    Attributes:
    - num_alternatives: of each token; None: not asked for
    - logprob_size: bytes of a token's packed log-probs
    - raw: those of all tokens so far, which a restarted scheduler must know
    """

    __slots__ = ("_offsets", "_texts", "logprob_size", "num_alternatives", "raw")

    def __init__(self, alternatives: int | None, texts: TokenTexts, vector_size: int = 0) -> None:
        self.num_alternatives = alternatives
        self.logprob_size = logprob_bytes(alternatives, vector_size)
        self.raw = bytearray()
        self._texts = texts
        self._offsets = TokenOffsets(texts)

    def add_token(self, token: int, text: str) -> None:
        """The next token, and the text that is certain since it came."""
        self._offsets.add_token(token, text)

    def take_texts(self, ids: bytes, raw: bytes, name_ids: bool = False) -> LogprobTexts | None:
        """Log-probs with texts of `ids` (int32 bytes), whose packed log-probs are `raw`. They are
        the first of the tokens that were added since the last call; the others are not shown. None
        if there are no ids, or log-probs are not asked for. name_ids: with the ids."""
        offsets = self._offsets.take(len(ids) // TOKEN_BYTES)
        if self.num_alternatives is None or not ids:
            return None
        tokens, named, end = unpack_few(ids), list[int](), LOGPROB_WORDS + self.num_alternatives
        raw = raw[: len(tokens) * self.logprob_size]
        for token, words in zip(
            tokens, logprob_layout(self.num_alternatives).iter_unpack(raw), strict=True
        ):
            named.append(token)
            # A token that nothing comes before has no rank, and no alternatives.
            named += words[LOGPROB_WORDS:end] if words[1] else [NO_ID] * self.num_alternatives
        texts = tuple(map(self._texts.__getitem__, named))
        return LogprobTexts(
            logprobs=raw, texts=texts, offsets=offsets, ids=ids if name_ids else b""
        )


class RequestLogprobs:
    """Log-probs of one request that asks for any: `output` and `prompt`."""

    __slots__ = ("_decoder", "output", "prompt")

    def __init__(self, params: RequestParams, decoders: DecoderFactory) -> None:
        self.output = SequenceLogprobs(params.logprobs, decoders.texts, params.vector_size)
        self.prompt = SequenceLogprobs(params.prompt_logprobs, decoders.texts)
        self._decoder: IncrementalDecoder = decoders.open((), params.skip_special_tokens)

    @property
    def num_prompt_logprobs(self) -> int:
        """Prompt tokens so far."""
        return len(self.prompt.raw) // self.prompt.logprob_size if self.prompt.logprob_size else 0

    def add_prompt(self, ids: bytes, raw: bytes) -> LogprobTexts | None:
        """More of the prompt's tokens."""
        for token in unpack_few(ids):
            self.prompt.add_token(token, self._decoder.step(token))
        self.prompt.raw += raw
        return self.prompt.take_texts(ids, raw, name_ids=True)


def logprobs_of(params: RequestParams, decoders: DecoderFactory) -> RequestLogprobs | None:
    """For a request with these parameters; None if it asks for no log-probs."""
    if params.logprobs is None and params.prompt_logprobs is None and not params.vector_size:
        return None
    return RequestLogprobs(params, decoders)
