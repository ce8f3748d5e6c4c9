"""What a scheduler keeps and sends so that a lost stage costs no request.

Quarantine: requests that may have ended an engine, which are tried alone.
RecoveryRecords: requests that it does not run, because they have ended or are not known yet.
TakeoverTimes: how long requests waited for the engine after a lost one.
Outbox: messages for detokenizers: openings, rows of new tokens, refusals, and all of it again.
Knows requests and messages; no bus and no engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from math import inf

import msgspec

from pipeinfer.core import (
    TAKEOVER_PHASES,
    RecentTable,
    Send,
    TakeoverPhase,
    takeover_statistic,
)
from pipeinfer.messages import (
    Abort,
    Delivered,
    FinishReason,
    Message,
    OpenStream,
    PromptTokens,
    Refused,
    TokenizedRequest,
    TokenRow,
    Tokens,
)
from pipeinfer.scheduler.request import TOKEN_BYTES, Request
from pipeinfer.wire import LOGPROBS_PER_MESSAGE, pack

MAX_REMEMBERED = 10_000  # ids of requests that are over, at most
REMEMBERED_SECONDS = 60.0  # seconds for which they are remembered
ORPHANED_SECONDS = 60.0  # seconds that what was delivered waits for its work
# Seconds, at most, after which one that has finished is asked after.
MAX_RETENTION_SECONDS = 3_600.0

CRASHES_ALONE = 3  # not the first: an engine may be killed from outside while a suspect runs


class Quarantine:
    """Requests whose steps gave no result before two engines were lost, tried one at a time.

    An engine may be lost for any reason, so a request is a suspect only when it was in flight at
    two losses and had no token in between. Requests that lost their slot without being suspects are
    resumed first (Planner._compose). Then each suspect runs alone until it has produced a token,
    which clears it. One that is alone in CRASHES_ALONE crashes is the culprit and fails by itself.
    under_test: the suspect that is tried now; it may have finished since.
    """

    def __init__(self) -> None:
        self._suspects: deque[Request] = deque()
        self.under_test: Request | None = None

    def on_epoch_lost(self, requests: list[Request]) -> Request | None:
        """The engine was lost while `requests` were in flight; returns one that must fail. Those
        that are no suspects stay "lost"."""
        culprit = None
        tested, self.under_test = self.under_test, None
        if tested in requests:
            tested.crashes_alone += 1
            if tested.crashes_alone >= CRASHES_ALONE:
                culprit = tested
                requests = [r for r in requests if r is not culprit]
        elif tested is not None and tested.phase != "finished":
            if tested.phase == "lost":
                tested.move("quarantined")
            self._suspects.appendleft(tested)  # it had no step in flight: not its doing
        for request in requests:
            if request.lost_in_flight:
                request.move("quarantined")
                self._suspects.append(request)
            request.lost_in_flight = True
        return culprit

    def add(self, request: Request, crashes: int) -> None:
        """Another group lost its engine to it, or to others; `crashes` with it alone."""
        request.move("quarantined")
        request.lost_in_flight = True
        request.crashes_alone = crashes
        self._suspects.append(request)

    def crashes_alone(self, request: Request) -> int:
        """Of engines that ran `request` alone; -1 if it was in flight at no loss, or has had a
        token since. A group that takes it over tries it alone even after a first loss: its engine
        serves others."""
        return request.crashes_alone if request.lost_in_flight else -1

    def next(self) -> Request | None:
        """The request to run alone now; None without suspects."""
        while self.under_test is None or self.under_test.phase == "finished":
            if not self._suspects:
                self.under_test = None
                return None
            self.under_test = self._suspects.popleft()
        return self.under_test

    def clear(self, request: Request) -> None:
        """`request` produced a token."""
        request.lost_in_flight = False
        if request is self.under_test:
            request.crashes_alone = 0
            self.under_test = None

    def remove(self, request: Request) -> None:
        """`request` is over: it is no suspect any more."""
        self._suspects = deque(one for one in self._suspects if one is not request)

    def __len__(self) -> int:
        return len(self._suspects) + (self.under_test is not None)


class RecoveryRecords:
    """Of one scheduler; `tokenizers` and `detokenizers` are the stages that may know a request.

    It keeps a finished request, whole, until its client has it; the ids of those that have ended
    for good, because their work may be sent once more; what detokenizers delivered of requests
    whose work has not come; and which requests another group took over.

    finished: (request, the message that ended it), by id.
    retention_seconds: seconds, at least, that a finished request waits for its Done; at most
    MAX_RETENTION_SECONDS count. group: the scheduler's data-parallel group."""

    def __init__(
        self,
        tokenizers: Sequence[str],
        detokenizers: Sequence[str],
        retention_seconds: float = MAX_RETENTION_SECONDS,
        group: int = 0,
    ) -> None:
        self._group = group
        self._retention_seconds = min(retention_seconds, MAX_RETENTION_SECONDS)
        self.tokenizers = tuple(tokenizers)
        self.detokenizers = tuple(detokenizers)
        self.finished: dict[str, tuple[Request, FinalMessage]] = {}
        self._delivered: dict[str, tuple[Delivered, float]] = {}
        # The last attempt of each.
        self._ended_attempts = RecentTable[float](REMEMBERED_SECONDS, MAX_REMEMBERED)
        self._handed_over: dict[str, str] = {}  # to another group; where its output goes
        self._swept: dict[str, float] = {}  # of finished ones: the first sweep that saw them
        self._sweep_at = 0.0

    def add_finished(self, request: Request, last: FinalMessage) -> None:
        """`request` ended with `last`; its detokenizer may need it again."""
        self.finished[request.id] = request, last

    def has_ended(self, request_id: str, attempt: int) -> bool:
        """True if this attempt of the request has ended here, so that its work is a repetition.

        An earlier one that has ended is forgotten: another group went on with it since.
        """
        if self._ended(request_id) >= attempt:
            return True
        finished = self.finished.get(request_id)
        if finished is not None and finished[0].work.attempt < attempt:
            del self.finished[request_id]
            return False
        return finished is not None

    def _ended(self, request_id: str) -> float:
        """The last attempt of it that is over for good; 0: none."""
        return self._ended_attempts.get(request_id) or 0

    def add_delivered(self, delivered: Delivered, now: float) -> Abort | None:
        """What a detokenizer delivered of a request that is not live; what to answer, if anything.

        It waits for its work, unless the request is over.
        """
        name, attempt = delivered.request_id, delivered.attempt
        if self._ended(name) >= attempt:
            return Abort(name, attempt, "it has ended")
        finished = self.finished.get(name)
        if finished is None or finished[0].work.attempt < attempt:
            self._delivered[name] = delivered, now
        return None

    def hand_over(self, request: Request, crashes: int) -> Delivered:
        """What another group needs to go on with it. Its end will be reported here as well."""
        self._handed_over[request.id] = detokenizer_of(request)
        ids, attempt = pack(request.outputs), request.work.attempt
        return Delivered(
            request_id=request.id,
            attempt=attempt,
            ids=ids,
            crashes=crashes,
            logprobs=bytes(request.logprobs),
            prompt_logprobs=bytes(request.prompt_logprobs),
        )

    @property
    def orphans(self) -> int:
        """Requests of which something was delivered, but whose work no tokenizer has sent."""
        return len(self._delivered)

    def take_delivered(self, request_id: str) -> Delivered | None:
        """What was delivered of a request whose work has come."""
        self._handed_over.pop(request_id, None)
        delivered, _ = self._delivered.pop(request_id, (None, 0.0))
        return delivered

    def on_ended(self, request_id: str, now: float, attempt: float = inf) -> tuple[str, ...]:
        """The request is over for good, up to this `attempt`; returns the detokenizers that may
        know it."""
        self._ended_attempts.put(request_id, max(attempt, self._ended(request_id)), now)
        receivers: set[str] = set()
        waiting = self._delivered.get(request_id)
        if waiting is not None and waiting[0].attempt <= attempt:
            del self._delivered[request_id]
            receivers.update(self.detokenizers)
        request, _ = self.finished.get(request_id, (None, None))
        if request is not None and request.work.attempt <= attempt:
            del self.finished[request_id]
            receivers.add(detokenizer_of(request))
        if (moved := self._handed_over.pop(request_id, None)) is not None:
            receivers.add(moved)
        return tuple(sorted(receivers))

    def on_recovered(self, now: float) -> None:
        """All neighbours have sent what they have: what is missing now may be lost."""
        for name, (delivered, _) in self._delivered.items():
            self._delivered[name] = delivered, now

    def take_orphaned(self, now: float) -> Iterator[tuple[str, Abort]]:
        """(detokenizer, message for it) of requests whose work never came.

        Not to be called before the neighbours have sent all.
        """
        orphaned = [d for d, since in self._delivered.values() if now - since > ORPHANED_SECONDS]
        for delivered in orphaned:
            del self._delivered[delivered.request_id]
            why = "nobody asked for it"
            abort = Abort(delivered.request_id, delivered.attempt, why, self._group)
            yield from ((to, abort) for to in self.detokenizers)

    def take_unclaimed(self, now: float) -> list[Delivered]:
        """Of those that have finished, and that no Done came for: messages for a tokenizer, which
        aborts them wherever they are. Their gateway is lost, or their end is."""
        if now < self._sweep_at:
            return []
        self._swept = {name: self._swept.get(name, now) for name in self.finished}
        aged = [
            request
            for name, (request, _) in self.finished.items()
            if now >= self._swept[name] + self._retention_seconds + answer_retention(request.work)
        ]
        self._sweep_at = now + self._retention_seconds
        return [
            Delivered(request_id=r.id, attempt=r.work.attempt, ids=b"", ended=True) for r in aged
        ]


def answer_retention(work: TokenizedRequest) -> float:
    """For which a finished request is kept though its client may have all of it."""
    return 0.0 if work.retention is None else work.retention.seconds


class TakeoverTimes:
    """From the loss of an engine under requests to their next tokens, by core.TAKEOVER_PHASES.
    Times are seconds of one clock.

    count: takeovers in which all requests have gone on. waiting: ids of requests that have had no
    token since the loss.
    """

    def __init__(self) -> None:
        self.count = 0
        self.waiting: set[str] = set()
        self._seconds = dict.fromkeys(TAKEOVER_PHASES, 0.0)  # of the last one
        self._next: deque[TakeoverPhase] = deque()  # phases that have not ended
        self._since = 0.0

    def begin(self, requests: Iterable[Request], now: float) -> None:
        """An epoch was lost, and with it the slots of `requests`."""
        if not self._next or self._next[0] != "restart":  # else no engine has come since
            self._since = now
        self.waiting.update(request.id for request in requests)
        self._next.clear()
        if self.waiting:
            self._next.extend(TAKEOVER_PHASES)

    def reached(self, phase: TakeoverPhase, now: float) -> None:
        """The end of `phase`, if that is the one under way."""
        if self._next and self._next[0] == phase:
            self._next.popleft()
            self._seconds[phase], self._since = now - self._since, now
            self.count += phase == TAKEOVER_PHASES[-1]

    def on_token(self, request: Request, now: float) -> None:
        """One of `waiting` has a token."""
        self.reached("first_token", now)
        self.on_finished(request, now)

    def on_finished(self, request: Request, now: float) -> None:
        """`request` waits for nothing any more."""
        if request.id in self.waiting:
            self.waiting.remove(request.id)
            if not self.waiting:
                self.reached("last_token", now)
                self._next.clear()

    def statistics(self) -> dict[str, float]:
        """How many, and the seconds of each phase of the last one."""
        seconds = {takeover_statistic(phase): took for phase, took in self._seconds.items()}
        return {"takeovers_total": self.count, **seconds}


CONTEXT_TOKENS = 16  # of the prompt, so that the decoder knows what the first output follows

FinalMessage = TokenRow | Refused  # with what a request ended


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

    def open_message(self, request: Request) -> Send:
        """Comes before a request's first row."""
        work = request.work
        opened = OpenStream(
            request_id=work.request_id,
            attempt=work.attempt,
            gateway=work.gateway,
            params=work.params,
            context_ids=work.prompt_ids[-CONTEXT_TOKENS * TOKEN_BYTES :],
            trace=work.trace,
            group=self._group,
            token_offsets=work.token_offsets,
            retention=work.retention,
        )
        return Send("tokens", detokenizer_of(request), opened)

    def all_of(self, request: Request, last: FinalMessage | None = None) -> Iterator[Send]:
        """All there is of a request, for a detokenizer that has nothing of it."""
        if isinstance(last, Refused):
            yield Send("tokens", detokenizer_of(request), last)
            return
        yield self.open_message(request)
        yield from self.prompt_logprobs(request, 0)
        for row in all_rows(request, last):
            yield self._tokens(detokenizer_of(request), (row,))

    def prompt_logprobs(self, request: Request, first: int) -> Iterator[Send]:
        """The log-probs of its prompt's tokens from `first` on, as far as they are known, in
        messages of a bounded size."""
        width, work = request.prompt_logprob_size, request.work
        for begin in range(first, request.num_prompt_logprobs, LOGPROBS_PER_MESSAGE):
            tokens = slice(
                begin * TOKEN_BYTES,
                min(begin + LOGPROBS_PER_MESSAGE, request.num_prompt_logprobs) * TOKEN_BYTES,
            )
            prompt_tokens = PromptTokens(
                request_id=work.request_id,
                attempt=work.attempt,
                first=begin,
                ids=work.prompt_ids[tokens],
                logprobs=bytes(
                    request.prompt_logprobs[begin * width : (begin + LOGPROBS_PER_MESSAGE) * width]
                ),
                group=self._group,
            )
            yield Send("tokens", detokenizer_of(request), prompt_tokens)

    def _tokens(self, to: str, rows: tuple[TokenRow, ...]) -> Send:
        return Send("tokens", to, Tokens(rows=rows, group=self._group))


def detokenizer_of(request: Request) -> str:
    """The detokenizer stage to which `request` belongs."""
    return f"detokenizer-{request.work.detokenizer}"


def refusal(
    request: Request, status: int, message: str, param: str | None, code: str | None = None
) -> Refused:
    """Instead of any row: the request cannot be served, and nothing of it was delivered."""
    work = request.work
    return Refused(
        request_id=work.request_id,
        attempt=work.attempt,
        gateway=work.gateway,
        status=status,
        message=message,
        param=param,
        code=code,
    )


def next_row(
    request: Request, offset: int, finish: FinishReason | None, stop_token: int | None
) -> TokenRow:
    """The row of what the request has generated from `offset` on."""
    size = request.logprob_size
    logprobs = bytes(request.logprobs[offset * size :]) if size else b""
    return TokenRow(  # hot path: once a token
        request_id=request.work.request_id,
        offset=offset,
        ids=request.outputs[offset:].tobytes(),
        finish=finish,
        stop_token=stop_token,
        cached_tokens=request.first_cache_hit if request.first_cache_hit > 0 else 0,
        logprobs=logprobs,
    )


def all_rows(request: Request, last: TokenRow | None) -> Iterator[TokenRow]:
    """All that the request has generated, and `last`, if it has ended. With log-probs in rows of a
    bounded size."""
    many, size = (
        len(request.outputs),
        LOGPROBS_PER_MESSAGE if request.logprob_size else len(request.outputs),
    )
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
    begin, many = offset * request.logprob_size, len(ids) // TOKEN_BYTES * request.logprob_size
    return TokenRow(
        request_id=request.id,
        offset=offset,
        ids=ids,
        cached_tokens=max(request.first_cache_hit, 0),
        logprobs=bytes(request.logprobs[begin : begin + many]),
    )


def last_row(request: Request, finish: FinishReason | None, error: str = "") -> TokenRow:
    """The row that ends `request`, for a detokenizer that was restarted.

    finish: why it ended; None if its detokenizer had ended it, at a stop string. The next
        detokenizer finds the stop string in the same ids again and never reads this row; if it does
        not find it, rows were lost, and the row says so as an error.
    """
    if finish is None:
        finish = "error"
        error = "the detokenizer that ended this request was lost, and its finish reason with it"
    stop_token = request.outputs[-1] if finish == "stop" and request.outputs else None
    return TokenRow(
        request_id=request.id,
        offset=len(request.outputs),
        ids=b"",
        finish=finish,
        stop_token=stop_token,
        error=error,
    )
