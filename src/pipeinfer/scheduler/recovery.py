"""The scheduler's records and messages by which a lost stage costs no request.

- Quarantine: requests that may have ended an engine, which are tried alone
- RecoveryRecords: requests that the scheduler does not run, because they have ended or have not
  come yet
- TakeoverTimes: how long requests waited for the engine after a lost one
- Outbox: messages for detokenizers: openings, rows of new tokens, refusals, and their repetition

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
    stage_id,
    takeover_statistic,
)
from pipeinfer.messages import (
    TOKEN_BYTES,
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
    num_ids,
)
from pipeinfer.scheduler.request import Request
from pipeinfer.wire import LOGPROBS_PER_MESSAGE, pack

MAX_REMEMBERED = 10_000  # most ids of ended requests that are kept
REMEMBERED_SECONDS = 60.0  # seconds for which ids of ended requests are kept
ORPHANED_SECONDS = 60.0  # seconds for which a Delivered waits for its TokenizedRequest
# Most seconds that a finished request waits for its Done before a tokenizer is asked to abort it.
MAX_RETENTION_SECONDS = 3_600.0

# crashes; more than one, because an engine may be killed from outside while a suspect runs
CRASHES_ALONE = 3


class Quarantine:
    """Requests whose steps gave no result before two engines were lost, tried one at a time.

    An engine may be lost for any reason, so a request is a suspect only when it was in flight at
    two losses and had no token in between. Requests that lost their slot without being suspects are
    resumed first (Planner._compose). Then each suspect runs alone until it has produced a token,
    which clears it. A request that is alone in CRASHES_ALONE crashes is the culprit and fails by
    itself.

    Attributes:
    - under_test: the suspect that is tried now; it may have finished since. None: no suspect is
    """

    def __init__(self) -> None:
        self._suspects: deque[Request] = deque()
        self.under_test: Request | None = None

    def on_epoch_lost(self, requests: list[Request]) -> Request | None:
        """Takes the loss of an engine while `requests` were in flight; returns the request that
        must fail, or None. Requests that are no suspects stay "lost"."""
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
            # it had no step in flight, so it did not cause the loss
            self._suspects.appendleft(tested)
        for request in requests:
            if request.lost_in_flight:
                request.move("quarantined")
                self._suspects.append(request)
            request.lost_in_flight = True
        return culprit

    def add(self, request: Request, crashes: int) -> None:
        """Takes a suspect from another group, which lost its engine to it or to other requests,
        `crashes` times with this one alone."""
        request.move("quarantined")
        request.lost_in_flight = True
        request.crashes_alone = crashes
        self._suspects.append(request)

    def crashes_alone(self, request: Request) -> int:
        """Number of engines that crashed while they ran `request` alone; -1 if it was in flight at
        no loss, or has had a token since. A group that takes the request over tries it alone even
        after a first loss, because its engine serves other requests."""
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
        """Clears `request`, which has produced a token."""
        request.lost_in_flight = False
        if request is self.under_test:
            request.crashes_alone = 0
            self.under_test = None

    def remove(self, request: Request) -> None:
        """Removes `request`, which is over."""
        self._suspects = deque(one for one in self._suspects if one is not request)

    def __len__(self) -> int:
        return len(self._suspects) + (self.under_test is not None)


class RecoveryRecords:
    """Records of one scheduler of requests that it does not run.

    It keeps a finished request, whole, until its client has it; the ids of requests that have ended
    for good, because their work may be sent once more; Delivered messages of requests whose work
    has not come; and which requests another group took over.

    Attributes:
    - tokenizers, detokenizers: ids of the stages that may have a request
    - finished: (request, the message that ended it), by id

    Arguments:
    - retention_seconds: least seconds that a finished request waits for its Done; at most
      MAX_RETENTION_SECONDS count
    - group: the scheduler's data-parallel group
    """

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
        # By request id, the last attempt that has ended for good.
        self._ended_attempts = RecentTable[float](REMEMBERED_SECONDS, MAX_REMEMBERED)
        # by request id: detokenizer of a request that went to another group
        self._handed_over: dict[str, str] = {}
        # by id of a finished request: time of the first sweep that found it
        self._swept: dict[str, float] = {}
        self._sweep_at = 0.0

    def add_finished(self, request: Request, last: FinalMessage) -> None:
        """Adds `request`, which ended with `last`; its detokenizer may need it again."""
        self.finished[request.id] = request, last

    def has_ended(self, request_id: str, attempt: int) -> bool:
        """True if this attempt of the request has ended here, so that its work is a repetition.

        An earlier attempt that has ended is forgotten: another group has continued it since.
        """
        if self._ended(request_id) >= attempt:
            return True
        finished = self.finished.get(request_id)
        if finished is not None and finished[0].work.attempt < attempt:
            del self.finished[request_id]
            return False
        return finished is not None

    def _ended(self, request_id: str) -> float:
        """The last attempt of the request that is over for good; 0: none."""
        return self._ended_attempts.get(request_id) or 0

    def add_delivered(self, delivered: Delivered, now: float) -> Abort | None:
        """Takes the Delivered of a request that is not live; returns the answer, or None.

        The Delivered waits for the request's work, unless the request is over.
        """
        name, attempt = delivered.request_id, delivered.attempt
        if self._ended(name) >= attempt:
            return Abort(name, attempt, "it has ended")
        finished = self.finished.get(name)
        if finished is None or finished[0].work.attempt < attempt:
            self._delivered[name] = delivered, now
        return None

    def hand_over(self, request: Request, crashes: int) -> Delivered:
        """The message with which another group continues the request. Its end will be reported here
        as well."""
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
        """Number of requests with a Delivered, but whose work no tokenizer has sent."""
        return len(self._delivered)

    def take_delivered(self, request_id: str) -> Delivered | None:
        """Removes and returns the Delivered of a request whose work has come; None if there is
        none."""
        self._handed_over.pop(request_id, None)
        delivered, _ = self._delivered.pop(request_id, (None, 0.0))
        return delivered

    def on_ended(self, request_id: str, now: float, attempt: float = inf) -> tuple[str, ...]:
        """Notes that the request is over for good, up to this `attempt`; returns the detokenizers
        that may have it."""
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
        """All neighbours have sent their state: whatever is missing from `now` on may be lost."""
        for name, (delivered, _) in self._delivered.items():
            self._delivered[name] = delivered, now

    def take_orphaned(self, now: float) -> Iterator[tuple[str, Abort]]:
        """Removes requests whose work never came, and yields (detokenizer, message for it).

        Must not be called before the neighbours have sent all.
        """
        orphaned = [d for d, since in self._delivered.values() if now - since > ORPHANED_SECONDS]
        for delivered in orphaned:
            del self._delivered[delivered.request_id]
            why = "nobody asked for it"
            abort = Abort(delivered.request_id, delivered.attempt, why, self._group)
            yield from ((to, abort) for to in self.detokenizers)

    def take_unclaimed(self, now: float) -> list[Delivered]:
        """Messages for the tokenizers about finished requests for which no Done came: a tokenizer
        aborts them wherever they are. Their gateway, or the message of their end, is lost."""
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
    """Seconds for which a finished request is kept though its client may have all of it."""
    return 0.0 if work.retention is None else work.retention.seconds


class TakeoverTimes:
    """Durations from the loss of an engine with requests to their next tokens, by
    core.TAKEOVER_PHASES. Times are seconds of one clock.

    Attributes:
    - count: takeovers in which all requests have gone on
    - waiting: ids of requests that have had no token since the loss
    """

    def __init__(self) -> None:
        self.count = 0
        self.waiting: set[str] = set()
        self._seconds = dict.fromkeys(TAKEOVER_PHASES, 0.0)  # of the last one
        self._next: deque[TakeoverPhase] = deque()  # phases that have not ended
        self._since = 0.0

    def begin(self, requests: Iterable[Request], now: float) -> None:
        """Takes the loss of an epoch, and with it of the slots of `requests`."""
        # otherwise no engine has come since the last loss
        if not self._next or self._next[0] != "restart":
            self._since = now
        self.waiting.update(request.id for request in requests)
        self._next.clear()
        if self.waiting:
            self._next.extend(TAKEOVER_PHASES)

    def reached(self, phase: TakeoverPhase, now: float) -> None:
        """Ends `phase`, if that is the phase under way."""
        if self._next and self._next[0] == phase:
            self._next.popleft()
            self._seconds[phase], self._since = now - self._since, now
            self.count += phase == TAKEOVER_PHASES[-1]

    def on_token(self, request: Request, now: float) -> None:
        """Takes a token of `request`, one of `waiting`."""
        self.reached("first_token", now)
        self.on_finished(request, now)

    def on_finished(self, request: Request, now: float) -> None:
        """Takes the end of `request`, or its first token."""
        if request.id in self.waiting:
            self.waiting.remove(request.id)
            if not self.waiting:
                self.reached("last_token", now)
                self._next.clear()

    def statistics(self) -> dict[str, float]:
        """The number of takeovers, and the seconds of each phase of the last takeover."""
        seconds = {takeover_statistic(phase): took for phase, took in self._seconds.items()}
        return {"takeovers_total": self.count, **seconds}


# last ids of the prompt in OpenStream, so that the first output is decoded in its context
CONTEXT_TOKENS = 16

FinalMessage = TokenRow | Refused  # the message that ended a request


class Outbox:
    """Collects the messages that one event sends. Rows come after all other messages, so that each
    detokenizer gets one message of them."""

    def __init__(self, group: int) -> None:
        self._group = group
        self._sends: list[Send] = []
        self._rows: dict[int, list[TokenRow]] = {}  # by the number of the detokenizer

    def send(self, channel: str, to: str, message: Message) -> None:
        """Adds a message."""
        self._sends.append(Send(channel, to, message))

    def send_each(self, channel: str, stages: Iterable[str], message: Message) -> None:
        """Adds the same message to each of `stages`."""
        self._sends += [Send(channel, to, message) for to in stages]

    def add(self, sends: Iterable[Send]) -> None:
        """Adds messages."""
        self._sends += sends

    def row(self, request: Request, row: TokenRow) -> None:
        """Adds new tokens of a request, or its end."""
        rows = self._rows.get(request.work.detokenizer)  # hot path: once a token
        if rows is None:
            rows = self._rows[request.work.detokenizer] = []
        rows.append(row)

    def take(self) -> list[Send]:
        """Removes and returns all messages."""
        out, self._sends = self._sends, []
        out += [
            self._tokens(stage_id("detokenizer", to), tuple(rows))
            for to, rows in self._rows.items()
        ]
        self._rows.clear()
        return out

    def open_message(self, request: Request) -> Send:
        """The message that comes before a request's first row."""
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
        """All messages of a request so far, for a detokenizer that has none of them; `last`: the
        message that ended it, None if it is live."""
        if isinstance(last, Refused):
            yield Send("tokens", detokenizer_of(request), last)
            return
        yield self.open_message(request)
        yield from self.prompt_logprobs(request, 0)
        for row in all_rows(request, last):
            yield self._tokens(detokenizer_of(request), (row,))

    def prompt_logprobs(self, request: Request, first: int) -> Iterator[Send]:
        """The log-probs of the prompt's tokens from `first` on, as far as they are known, in
        messages of at most LOGPROBS_PER_MESSAGE log-probs."""
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
    """Id of the detokenizer stage that serves `request`."""
    return stage_id("detokenizer", request.work.detokenizer)


def refusal(
    request: Request, status: int, message: str, param: str | None, code: str | None = None
) -> Refused:
    """The refusal sent in place of any row: the request cannot be served, and nothing of it was
    delivered."""
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
    """The row of the ids that the request has generated from `offset` on."""
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
    """All ids that the request has generated, with the end `last` if it is not None. With log-probs
    in rows of at most LOGPROBS_PER_MESSAGE ids."""
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
    """The row of the output tokens `ids` from `offset` on."""
    begin, many = offset * request.logprob_size, num_ids(ids) * request.logprob_size
    return TokenRow(
        request_id=request.id,
        offset=offset,
        ids=ids,
        cached_tokens=max(request.first_cache_hit, 0),
        logprobs=bytes(request.logprobs[begin : begin + many]),
    )


def last_row(request: Request, finish: FinishReason | None, error: str = "") -> TokenRow:
    """The row that ends `request` behind the output that it has; without ids.

    - finish: why it ended; None if its detokenizer had ended it, at a stop string. A restarted
      detokenizer finds the stop string in the same ids again and never reads this row; if it does
      not find it, rows were lost, and the row is an error about that
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
