"""The gateway without HTTP: the root ledger of all requests, and the pipeline's health.

Sans-IO. The HTTP driver and the offline classes drive it with the same local events (events.py).
Knows no sockets, no clock, and nothing about the meaning of tokens.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from pipeinfer.core import LOCAL, Send
from pipeinfer.gateway.events import Call, Delta, Failed, Hangup, Started, Status, StatusChanged
from pipeinfer.gateway.health import Expected, Health
from pipeinfer.gateway.ledger import Hole, Record
from pipeinfer.messages import (
    Abort,
    Accepted,
    Drain,
    GroupFault,
    Heartbeat,
    Message,
    Refused,
    State,
    Submit,
    Text,
    TextRow,
    Tick,
)

RETRY_SOON, RETRY_LATER = 1, 5  # seconds, for Retry-After
REMEMBERED = 10_000  # ended requests whose late rows are expected
SEED_MASK = 2**64 - 1


def local(message: Message) -> Send:
    """An output for the stage's own driver."""
    return Send(LOCAL, "", message)


class GatewayCore:
    """Records requests before it sends them, and delivers each byte of text once, in order.

    Once the pipeline has been ready, requests are taken while a stage restarts: they wait in the
    pipeline (status "degraded"). A request that a restarted stage may have lost is sent again as a
    new attempt if nothing of it was delivered, else it fails.

    A request past its timeout fails with status 408 if nothing of it was delivered; else it ends
    with finish "abort" and keeps its text.
    """

    def __init__(
        self,
        expected: Sequence[Expected],
        *,
        index: int = 0,
        seed: int = 0,
        max_queue: int | None = None,
    ) -> None:
        self.health = Health(expected)
        self.status: Status = "starting"
        self._index = index
        self._random = random.Random(seed + index)
        self._max_queue = max_queue
        self._tokenizers = [e.stage for e in expected if e.name == "tokenizer"]
        self._dispatched = 0
        self._records: dict[str, Record] = {}
        self._waiting = 0  # records of which nothing was delivered
        self._ended: dict[str, None] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._draining = False
        self._was_ready = False
        self._told: StatusChanged | None = None
        self._late_rows = self._stray_rows = self._resubmitted = 0
        self._handlers: dict[type[Message], Callable[[Any, float], list[Send]]] = {
            Text: self._text,
            Call: self._call,
            Hangup: self._hangup,
            Accepted: self._accepted,
            Refused: self._refused,
            Heartbeat: self._heartbeat,
            GroupFault: self._ignore,
            Tick: self._tick,
            Drain: self._drain,
        }

    # ------------------------------------------------------------------------------- a stage's core

    def handle(self, event: Message, now: float) -> list[Send]:
        """Takes one event at `now` (monotonic seconds). KeyError for one that no gateway gets."""
        return self._handlers[type(event)](event, now)

    def state(self) -> tuple[State, str]:
        """(state, reason) for the heartbeat."""
        if self._draining:
            return "draining", f"{len(self._records)} requests are running"
        if self._was_ready and self.health.answering():
            return "ready", ""
        return "waiting", self.health.reason()

    def stats(self) -> dict[str, float]:
        """running, waiting: requests with and without output; rows dropped; attempts repeated."""
        return {
            "running": float(len(self._records) - self._waiting),
            "waiting": float(self._waiting),
            "late_rows": float(self._late_rows),
            "stray_rows": float(self._stray_rows),
            "resubmitted": float(self._resubmitted),
        }

    def idle(self) -> bool:
        """True when no request is live."""
        return not self._records

    def answering(self) -> bool:
        """Whether a request that came now would be answered without a pause."""
        return self._was_ready and not self._draining and self.health.answering()

    # -------------------------------------------------------------------------------- from a client

    def _call(self, call: Call, now: float) -> list[Send]:
        if call.request_id in self._records:
            raise ValueError(f"request id {call.request_id!r} is in use")
        refusal = self._refusal(call)
        if refusal is not None:
            return [local(refusal)]
        drawn = self._random.getrandbits(63)  # always, so that seeds depend on the order alone
        seed = drawn if call.params.seed is None else call.params.seed & SEED_MASK
        submit = Submit(
            call.request_id, 1, self._index, call.params, seed, call.text, call.prompt_ids,
            call.chat, call.template_arguments, call.add_special_tokens, call.priority,
            call.timeout, call.cache_salt, call.trace,
        )  # fmt: skip
        tokenizer = self._tokenizers[self._dispatched % len(self._tokenizers)]
        self._dispatched += 1
        self._records[call.request_id] = record = Record(submit, tokenizer, now)
        self._waiting += 1
        if call.timeout > 0:
            heapq.heappush(self._deadlines, (record.deadline, call.request_id))
        return [Send("requests", tokenizer, submit)]

    def _refusal(self, call: Call) -> Failed | None:
        name = call.request_id
        if self._draining:
            message = "the server is shutting down"
            return Failed(name, 503, message, code="draining", retry_after=RETRY_LATER)
        if not self._was_ready:
            message = f"the server is starting: {self.health.reason()}"
            return Failed(name, 503, message, code="starting", retry_after=RETRY_SOON)
        if self._max_queue is not None and self._waiting >= self._max_queue:
            message = f"{self._waiting} requests are waiting already"
            return Failed(name, 429, message, code="queue_full", retry_after=RETRY_SOON)
        return None

    def _hangup(self, hangup: Hangup, _now: float) -> list[Send]:
        record = self._records.get(hangup.request_id)
        if record is None:
            return []
        self._end(record)
        return [self._abort(record, hangup.reason)]

    # ---------------------------------------------------------------------------- from the pipeline

    def _accepted(self, accepted: Accepted, _now: float) -> list[Send]:
        record = self._records.get(accepted.request_id)
        if record is None or record.attempt != accepted.attempt or record.accepted:
            return []
        record.accepted, record.group = True, accepted.group
        out = []
        if record.prompt_tokens < 0:
            record.prompt_tokens = len(accepted.prompt_ids) // 4
            out = [local(Started(accepted.request_id, accepted.group, accepted.prompt_ids))]
        early, record.early = record.early, []
        for row in early:
            if row.request_id in self._records:
                self._deliver(record, row, out)
        return out

    def _refused(self, refused: Refused, _now: float) -> list[Send]:
        record = self._records.get(refused.request_id)
        if record is None or record.attempt != refused.attempt:
            return []
        self._end(record)
        retry = RETRY_SOON if refused.status in (429, 503) else 0
        failed = Failed(
            refused.request_id, refused.status, refused.message, refused.param, refused.code, retry
        )
        return [local(failed)]

    def _text(self, text: Text, _now: float) -> list[Send]:
        out: list[Send] = []  # hot path: once for every token of every stream
        records = self._records
        for row in text.rows:
            record = records.get(row.request_id)
            if record is None:
                self._unknown(row, out)
            elif row.attempt != record.attempt:
                self._late_rows += 1
            elif not record.accepted:
                record.early.append(row)
            else:
                self._deliver(record, row, out)
        return out

    def _deliver(self, record: Record, row: TextRow, out: list[Send]) -> None:
        byte, token = record.bytes, record.tokens
        try:
            text, ids = record.advance(row)
        except Hole as hole:
            self._fail(record, out, 500, str(hole), "stream_broken")
            return
        if row.finish is None:
            if not text and not ids:
                return
            self._begin(record)
            out.append(Send(LOCAL, "", Delta(row.request_id, text, ids, byte, token)))
        else:
            self._finish(record, row, Delta(row.request_id, text, ids, byte, token), out)

    def _finish(self, record: Record, row: TextRow, delta: Delta, out: list[Send]) -> None:
        delivered = record.started or delta.text or delta.ids
        self._end(record)
        if row.finish == "error":
            message = row.error or "the request failed"
            out.append(local(Failed(row.request_id, 500, message, code="request_failed")))
        elif row.finish == "abort" and record.timeout > 0 and not delivered:
            out.append(local(_timed_out(record)))
        else:
            counted = msgspec.structs.replace(
                delta,
                finish=row.finish,
                stop_reason=row.stop_reason,
                prompt_tokens=record.prompt_tokens,
                output_tokens=row.output_tokens,
                cached_tokens=row.cached_tokens,
            )
            out.append(local(counted))

    def _unknown(self, row: TextRow, out: list[Send]) -> None:
        """A row of a request that is not live: late after an abort, or of a gateway that died."""
        if row.request_id in self._ended:
            self._late_rows += 1
            return
        self._stray_rows += 1
        self._remember(row.request_id)
        if row.finish is None:
            abort = Abort(row.request_id, row.attempt, "unknown to its gateway")
            out.extend(Send("requests", tokenizer, abort) for tokenizer in self._tokenizers)

    # ------------------------------------------------------------------------------ time and health

    def _heartbeat(self, beat: Heartbeat, now: float) -> list[Send]:
        out: list[Send] = []
        if self.health.beat(beat, now):
            self._restarted(beat, out)
        self._tell(out)
        return out

    def _restarted(self, beat: Heartbeat, out: list[Send]) -> None:
        """Another process answers for this stage: what only the old one knew is lost."""
        for record in list(self._records.values()):
            if beat.name == "tokenizer":
                lost = record.tokenizer == beat.stage and not record.accepted
            elif beat.name == "scheduler":
                lost = record.accepted and record.group == beat.group
            else:
                lost = record.accepted and beat.name == "detokenizer"
            if not lost:
                continue
            if record.submit is not None:
                self._resubmit(record, record.submit, out)
            else:
                message = f"{beat.stage} was restarted and lost this request"
                self._fail(record, out, 503, message, "stage_restarted", RETRY_SOON)

    def _resubmit(self, record: Record, submit: Submit, out: list[Send]) -> None:
        """The abort goes first: the old attempt may still wait in a socket of the dead process."""
        out.append(self._abort(record, "sent again"))
        record.attempt += 1
        record.accepted = False
        record.early.clear()
        record.submit = msgspec.structs.replace(submit, attempt=record.attempt)
        self._resubmitted += 1
        out.append(Send("requests", record.tokenizer, record.submit))

    def _ignore(self, _event: Message, _now: float) -> list[Send]:
        return []

    def _tick(self, _tick: Tick, now: float) -> list[Send]:
        out: list[Send] = []
        self.health.check(now)
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, request_id = heapq.heappop(self._deadlines)
            record = self._records.get(request_id)
            if record is not None and record.deadline == deadline:
                self._expire(record, out)
        if len(self._deadlines) > 2 * len(self._records) + REMEMBERED:  # mostly of ended requests
            timed = (r for r in self._records.values() if r.timeout > 0)
            self._deadlines = [(r.deadline, r.request_id) for r in timed]
            heapq.heapify(self._deadlines)
        self._tell(out)
        return out

    def _expire(self, record: Record, out: list[Send]) -> None:
        self._end(record)
        out.append(self._abort(record, "timeout"))
        if not record.started:
            out.append(local(_timed_out(record)))
            return
        delta = Delta(
            record.request_id, "", b"", record.bytes, record.tokens, "abort", None,
            record.prompt_tokens, record.tokens,
        )  # fmt: skip
        out.append(local(delta))

    def _drain(self, _drain: Drain, _now: float) -> list[Send]:
        self._draining = True
        out: list[Send] = []
        self._tell(out)
        return out

    def _tell(self, out: list[Send]) -> None:
        """Tells the driver the status whenever it differs from what it was told."""
        missing = self.health.missing()
        self._was_ready = self._was_ready or not missing
        if self._draining:
            self.status = "draining"
        elif not missing:
            self.status = "ready"
        else:
            self.status = "degraded" if self._was_ready else "starting"
        told = StatusChanged(self.status, self.answering(), self.health.reason())
        if told != self._told:
            self._told = told
            out.append(local(told))

    # ------------------------------------------------------------------------------ ends of records

    def _begin(self, record: Record) -> None:
        if not record.started:
            record.started, record.submit = True, None
            self._waiting -= 1

    def _fail(
        self, record: Record, out: list[Send], status: int, message: str, code: str, retry: int = 0
    ) -> None:
        self._end(record)
        out.append(self._abort(record, code))
        out.append(local(Failed(record.request_id, status, message, code=code, retry_after=retry)))

    def _end(self, record: Record) -> None:
        del self._records[record.request_id]
        self._waiting -= not record.started
        self._remember(record.request_id)

    def _remember(self, request_id: str) -> None:
        self._ended[request_id] = None
        if len(self._ended) > REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def _abort(self, record: Record, reason: str) -> Send:
        return Send("requests", record.tokenizer, Abort(record.request_id, record.attempt, reason))


def _timed_out(record: Record) -> Failed:
    message = f"no output within the request's timeout of {record.timeout:g} s"
    return Failed(record.request_id, 408, message, "timeout", "timeout")
