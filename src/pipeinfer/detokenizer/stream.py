"""One request's way from token rows to text rows: offsets, stop strings, and where it ends.

Has the last word on the end of a request, because it alone reads tokens as text in order. Knows
rows, not channels: where they come from and go to is the core's business.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pipeinfer.detokenizer.incremental import IncrementalDecoder
from pipeinfer.detokenizer.scores import Scores
from pipeinfer.detokenizer.stops import StopStrings
from pipeinfer.detokenizer.token_offsets import TokenOffsets
from pipeinfer.messages import (
    Delivered,
    FinishReason,
    Open,
    PromptTokens,
    TextRow,
    TokenRow,
)
from pipeinfer.packing import unpack_few


class Stream:
    """The text of one request. After a row with `finish` it is over and must be dropped.

    `received`: output tokens read so far; `cut`: the number of output tokens up to and including
    the one that completed a stop string, None while there was none. All ids read are kept: they are
    what a restarted scheduler goes on from.
    """

    __slots__ = (
        "_decoder",
        "_ids",
        "_offsets",
        "_params",
        "_scores",
        "_sent_bytes",
        "_stops",
        "attempt",
        "cut",
        "gateway",
        "group",
        "received",
        "request_id",
    )

    def __init__(
        self,
        opened: Open,
        decoder: IncrementalDecoder,
        scores: Scores | None = None,
        offsets: TokenOffsets | None = None,
    ) -> None:
        """`scores`: for log-probs, `offsets`: for places of tokens, if the request asks for
        them."""
        self._params = params = opened.params
        self._scores = scores
        self.request_id = opened.request_id
        self.attempt = opened.attempt
        self.gateway = opened.gateway
        self.group = opened.group
        self.received = 0
        self.cut: int | None = None
        self._ids = bytearray()
        self._decoder = decoder
        self._stops = (
            StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None
        )
        self._sent_bytes = 0
        self._offsets = offsets

    def take(self, row: TokenRow) -> TextRow | None:
        """The text row for `row`; None if all of it was seen before.

        Ids go out with the row that they came in, even where their text waits for more. A hole
        before `row` fails the request: its text would be wrong.
        """
        raw = row.ids
        start = self.received
        if row.offset != start:
            if row.offset > start:
                return self.fail(f"output tokens {start} to {row.offset - 1} were lost")
            raw = raw[4 * (start - row.offset) :]
        if not raw and row.finish is None:
            return None
        stop_token = row.stop_token if row.finish == "stop" else None
        shown = raw[:-4] if stop_token is not None else raw
        text, hit = self._decode(unpack_few(shown))
        if hit is not None:
            return self._ended_by_string(row, start, shown, text, hit)
        self.received = start + len(raw) // 4
        self._keep(row, start, raw)
        if row.finish is not None:
            return self._ended(row, start, shown, text, stop_token)
        return self._row(start, shown, text, cached_tokens=row.cached_tokens)

    def score(self, told: PromptTokens) -> TextRow | None:
        """The text row for log-probs of the prompt; None if all of them were seen before."""
        scores = self._scores
        if scores is None:
            return None
        seen = scores.scored - told.first
        if seen < 0:
            return self.fail(f"log-probs of prompt tokens before {told.first} were lost")
        shown = scores.score(told.ids[4 * seen :], told.logprobs[scores.prompt.score_size * seen :])
        if shown is None:
            return None
        row = self._row(self.received, b"", "")
        return msgspec.structs.replace(row, prompt=shown, prompt_offset=told.first + seen)

    @property
    def scored(self) -> int:
        """Prompt tokens whose log-probs are known."""
        return 0 if self._scores is None else self._scores.scored

    def fail(self, reason: str) -> TextRow:
        """The request ends with an error that its client sees."""
        return self._row(self.received, b"", "", finish="error", error=reason)

    def delivered(self, last: TokenRow | None = None) -> Delivered:
        """What a restarted scheduler must know; `last`: the row with which it ended."""
        scores = self._scores
        found_again = self.cut is not None  # the end, in the same ids
        return Delivered(
            request_id=self.request_id,
            attempt=self.attempt,
            ids=bytes(self._ids),
            ended=last is not None,
            finish=None if last is None or found_again else last.finish,
            error="" if last is None or found_again else last.error,
            logprobs=b"" if scores is None else bytes(scores.output.kept),
            prompt_logprobs=b"" if scores is None else bytes(scores.prompt.kept),
        )

    def _keep(self, row: TokenRow, start: int, ids: bytes) -> None:
        """`ids` are output tokens from `start` on, and there are no others behind them."""
        self._ids[4 * start :] = ids
        if self._scores is not None:
            side, many = self._scores.output, len(ids) // 4
            begin = side.score_size * (start - row.offset)
            side.kept[side.score_size * start :] = row.logprobs[
                begin : begin + side.score_size * many
            ]

    def _decode(self, ids: Sequence[int]) -> tuple[str, str | None]:
        """(text, stop string); after a stop string `cut` is set and the rest is not decoded."""
        # Hot path: runs once for every output token of every request.
        step = self._decoder.step
        stops, scores, offsets = self._stops, self._scores, self._offsets
        if stops is None and scores is None and offsets is None:
            return (step(ids[0]) if len(ids) == 1 else "".join(map(step, ids))), None
        parts: list[str] = []
        for count, token in enumerate(ids, self.received + 1):
            text, hit = step(token), None
            if offsets is not None:
                offsets.token(token, text)
            if scores is not None:
                scores.output.token(text)
            if stops is not None:
                text, hit = stops.feed(text, count > self._params.min_tokens)
            parts.append(text)
            if hit is not None:
                self.cut = count
                return "".join(parts), hit
        return "".join(parts), None

    def _ended_by_string(
        self, row: TokenRow, start: int, ids: bytes, text: str, hit: str
    ) -> TextRow:
        assert self.cut is not None
        self.received = self.cut
        ids = ids[: 4 * (self.cut - start)]
        self._keep(row, start, ids)
        return self._row(
            start, ids, text, finish="stop", stop_reason=hit, cached_tokens=row.cached_tokens
        )

    def _ended(
        self, row: TokenRow, start: int, ids: bytes, text: str, stop_token: int | None
    ) -> TextRow:
        # What the prompt alone left unfinished is not the output's to show.
        tail = self._decoder.flush() if start or ids else ""
        if self._stops is not None:
            piece, hit = self._stops.feed(tail, self.received > self._params.min_tokens)
            text += piece
            if hit is not None:
                self.cut = start + len(ids) // 4
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
        before, scores, logprobs = self._sent_bytes, self._scores, None
        if scores is not None:
            side = scores.output
            logprobs = side.shown(ids, bytes(side.kept[side.score_size * start :]))
        offsets = b"" if self._offsets is None else self._offsets.take(len(ids) // 4)
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
            output_tokens=self.received,
            cached_tokens=cached_tokens,
            error=error,
            logprobs=logprobs,
            offsets=offsets,
        )
