"""What the detokenizers are told: openings, rows of new tokens, refusals, and all of it again.

Knows requests and messages; whom a request belongs to it reads from its work. Opens no socket.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from pipeinfer.core import Send
from pipeinfer.logprobs import AT_ONCE
from pipeinfer.messages import FinishReason, Message, Open, PromptTokens, Refused, TokenRow, Tokens
from pipeinfer.packing import pack
from pipeinfer.scheduler.request import TOKEN_BYTES, Request

CONTEXT_TOKENS = 16  # of the prompt, so that the decoder knows what the first output follows

Last = TokenRow | Refused  # with what a request ended


class Outbox:
    """Collects what one event sends. Rows come behind all else, so that each detokenizer gets one
    message of them.
    """

    def __init__(self, group: int) -> None:
        self._group = group
        self._sends: list[Send] = []
        self._rows: dict[int, list[TokenRow]] = {}  # by the number of the detokenizer

    def send(self, channel: str, to: str, message: Message) -> None:
        """One more message."""
        self._sends.append(Send(channel, to, message))

    def send_each(self, channel: str, stages: Iterable[str], message: Message) -> None:
        """The same message to each of `stages`."""
        self._sends += [Send(channel, to, message) for to in stages]

    def add(self, sends: Iterable[Send]) -> None:
        """More messages."""
        self._sends += sends

    def row(self, request: Request, row: TokenRow) -> None:
        """New tokens of a request, or its end."""
        rows = self._rows.get(request.work.detokenizer)  # hot path: once a token
        if rows is None:
            rows = self._rows[request.work.detokenizer] = []
        rows.append(row)

    def take(self) -> list[Send]:
        """All that was collected since it was last asked."""
        out, self._sends = self._sends, []
        out += [self._tokens(f"detokenizer-{to}", tuple(rows)) for to, rows in self._rows.items()]
        self._rows.clear()
        return out

    def opened(self, request: Request) -> Send:
        """Comes before a request's first row."""
        work = request.work
        opened = Open(
            request_id=work.request_id,
            attempt=work.attempt,
            gateway=work.gateway,
            params=work.params,
            context_ids=work.prompt_ids[-CONTEXT_TOKENS * TOKEN_BYTES :],
            trace=work.trace,
            group=self._group,
            token_offsets=work.token_offsets,
        )
        return Send("tokens", home(request), opened)

    def whole(self, request: Request, last: Last | None = None) -> Iterator[Send]:
        """All there is of a request, for a detokenizer that knows nothing of it."""
        if isinstance(last, Refused):
            yield Send("tokens", home(request), last)
            return
        yield self.opened(request)
        yield from self.prompt(request, 0)
        for row in all_rows(request, last):
            yield self._tokens(home(request), (row,))

    def prompt(self, request: Request, first: int) -> Iterator[Send]:
        """The log-probs of its prompt's tokens from `first` on, as far as they are known, in
        messages of a bounded size."""
        width, work = request.prompt_score_size, request.work
        for begin in range(first, request.scored, AT_ONCE):
            tokens = slice(begin * TOKEN_BYTES, min(begin + AT_ONCE, request.scored) * TOKEN_BYTES)
            told = PromptTokens(
                request_id=work.request_id,
                attempt=work.attempt,
                first=begin,
                ids=work.prompt_ids[tokens],
                logprobs=bytes(request.prompt_logprobs[begin * width : (begin + AT_ONCE) * width]),
                group=self._group,
            )
            yield Send("tokens", home(request), told)

    def _tokens(self, to: str, rows: tuple[TokenRow, ...]) -> Send:
        return Send("tokens", to, Tokens(rows=rows, group=self._group))


def home(request: Request) -> str:
    """The detokenizer stage to which `request` belongs."""
    return f"detokenizer-{request.work.detokenizer}"


def refusal(request: Request, status: int, message: str, param: str | None) -> Refused:
    """Instead of any row: the request cannot be served, and nothing of it was delivered."""
    work = request.work
    return Refused(
        request_id=work.request_id,
        attempt=work.attempt,
        gateway=work.gateway,
        status=status,
        message=message,
        param=param,
    )


def next_row(
    request: Request, offset: int, finish: FinishReason | None, stop_token: int | None
) -> TokenRow:
    """The row of what the request has generated from `offset` on."""
    logprobs = bytes(request.logprobs[offset * request.score_size :]) if request.score_size else b""
    return TokenRow(  # hot path: once a token
        request_id=request.work.request_id,
        offset=offset,
        ids=request.outputs[offset:].tobytes(),
        finish=finish,
        stop_token=stop_token,
        cached_tokens=request.cached if request.cached > 0 else 0,
        logprobs=logprobs,
    )


def all_rows(request: Request, last: TokenRow | None) -> Iterator[TokenRow]:
    """All that the request has generated, and `last`, if it has ended. With log-probs in rows of a
    bounded size."""
    many, size = len(request.outputs), AT_ONCE if request.score_size else len(request.outputs)
    begin = 0
    while many - begin > size:
        ids = request.outputs[begin : begin + size]
        yield _row(request, begin, pack(ids))
        begin += size
    row = _row(request, begin, pack(request.outputs[begin:]))
    if last is not None:
        yield msgspec.structs.replace(last, offset=begin, ids=row.ids, logprobs=row.logprobs)
    elif row.ids:
        yield row


def _row(request: Request, offset: int, ids: bytes) -> TokenRow:
    """Of these output tokens from `offset` on."""
    begin, many = offset * request.score_size, len(ids) // TOKEN_BYTES * request.score_size
    return TokenRow(
        request_id=request.id,
        offset=offset,
        ids=ids,
        cached_tokens=max(request.cached, 0),
        logprobs=bytes(request.logprobs[begin : begin + many]),
    )


def last_row(request: Request, finish: FinishReason | None, error: str = "") -> TokenRow:
    """The row that would end `request`; without `finish` its detokenizer ended it by itself.

    Such a one sees the same end again in the same ids. If it does not, a row was lost.
    """
    if finish is None:
        finish, error = "error", "it ended in a detokenizer that was lost, nobody knows how"
    stop_token = request.outputs[-1] if finish == "stop" and request.outputs else None
    return TokenRow(
        request_id=request.id,
        offset=len(request.outputs),
        ids=b"",
        finish=finish,
        stop_token=stop_token,
        error=error,
    )
