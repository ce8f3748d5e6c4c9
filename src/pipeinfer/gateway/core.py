"""The gateway without HTTP: records of all live requests, and the pipeline's health.

- GatewayCore: sans-IO. The HTTP driver and the offline classes drive it with the same local events
  (ledger.py).
- PipelineReadiness: the status that clients see, from the health table (health.py).

Knows no sockets, no clock, and nothing about the meaning of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import ClassVar

import msgspec

from pipeinfer.command_line import counted
from pipeinfer.core import (
    GIVE_UP_FACTOR,
    LOCAL,
    Deadlines,
    Drain,
    Leave,
    RollCall,
    Send,
    SendFailed,
    Tick,
    bracketed_answer,
    highest_random_weight,
    silence_limit,
    stage_id,
    stage_number,
)
from pipeinfer.gateway.health import ExpectedStage, Health, StageStatus
from pipeinfer.gateway.ledger import (
    AdoptionEnded,
    Backlog,
    Call,
    ClientDisconnected,
    EndedRequest,
    EndedRequests,
    Failed,
    OutputDelta,
    OutputDiverged,
    QueueShare,
    RequestRecord,
    RequestTraces,
    SetAdapters,
    Started,
    Status,
    StatusChanged,
    StreamGap,
    SubmitBuilder,
    call_tokens,
    occupied_tokens,
    offsets,
    prompt_beginning,
    resubmissions,
)
from pipeinfer.messages import (
    Abort,
    Accepted,
    AdapterChanges,
    Adopt,
    CacheReset,
    Delivered,
    HandOver,
    Heartbeat,
    Message,
    Reattached,
    Recover,
    Recovered,
    Refused,
    ResetCache,
    SetSleep,
    State,
    Text,
    TextRow,
)
from pipeinfer.params import choice_id, choice_ids

# Seconds of Retry-After: where room may come at any moment, and where the server shuts down.
RETRY_SOON = 1
RETRY_LATER = 5
QUEUE_FULL = "queue_full"  # the code of a refusal for which another gateway may have room
LATE_ROW_SECONDS = 2.0  # seconds for which rows of an ended request are no surprise
# Seconds after which detokenizers are asked, though a tokenizer has not answered.
ADOPTION_PATIENCE = 5.0
ADOPTION_TIMEOUT = 60.0  # seconds after which those that have not answered are not waited for


def local(message: Message) -> Send:
    """An event for the stage's own driver."""
    return Send(LOCAL, "", message)


class GatewayCore:
    """Records requests before it sends them, and delivers each byte of text once, in order.

    Once the pipeline has been ready, requests are taken while a stage restarts: they wait in the
    pipeline (status "degraded"). A restarted tokenizer asks for its requests; rows that repeat
    because of a restart are delivered once. The pipeline gets the end of every request: Done when
    its client has all of it, Abort when its client is gone or the request has failed.

    A request past its timeout fails with status 408 if nothing of it was delivered; else it ends
    with finish "abort" and keeps its text.

    A request with `retention` stays in all stages after its end, until the driver feeds
    ClientDisconnected. A restarted gateway asks for such requests (Adoption); from Adopt on they
    are its own records, and their text comes from the beginning.
    """

    def __init__(
        self,
        expected: Sequence[ExpectedStage],
        *,
        index: int = 0,
        seed: int = 0,
        backlog: Backlog | None = None,
        incarnation: int = 0,
        traces: RequestTraces | None = None,
        host_loss: float = inf,
    ) -> None:
        self.health = Health(expected, silence_limit(len(expected)), GIVE_UP_FACTOR * host_loss)
        self._readiness = PipelineReadiness(self.health)
        self._index = index
        self._submissions = SubmitBuilder(index, seed, traces or RequestTraces())
        self._tokenizers = [e.stage for e in expected if e.name == "tokenizer"]
        self._detokenizers = [e.stage for e in expected if e.name == "detokenizer"]
        self._adoption = Adoption(
            RollCall(stage_id("gateway", index), incarnation, self._tokenizers),
            RollCall(stage_id("gateway", index), incarnation, self._detokenizers),
        )
        self._adapters = AdapterChanges()
        gateways = max(sum(e.name == "gateway" for e in expected), 1)
        self._own_detokenizers = own_detokenizers(self._detokenizers, index, gateways)
        self._records: dict[str, RequestRecord] = {}
        self._finished: dict[str, RequestRecord] = {}  # ended, with kept answers
        self._backlog = backlog or Backlog()
        self._ended = EndedRequests()
        self._deadlines = Deadlines()
        self._leaves = False
        counts = (
            "requests_total", "late_rows", "stray_rows", "resubmitted", "diverged", "adopted",
        )  # fmt: skip
        self._counts = dict.fromkeys(counts, 0)

    # ------------------------------------------------------------------------------- a stage's core

    def handle(self, event: Message, now: float) -> list[Send]:
        """See Core. Raises TypeError for a message that is not a gateway's."""
        handler = self._handlers.get(type(event))
        if handler is None:
            raise TypeError(f"the gateway takes no {type(event).__name__}")
        out = handler(self, event, now)
        if self._ended.unreported:
            out += [Send("requests", to, done) for to, done in self._ended.take_unreported()]
        return out

    @property
    def status(self) -> Status:
        """The pipeline's status, as clients see it."""
        return self._readiness.status

    def state(self) -> tuple[State, str]:
        """(state, reason) for the heartbeat."""
        if self._readiness.draining:
            return "draining", f"{counted(len(self._records), 'request')} left"
        if self.can_serve():
            return "ready", ""
        return "waiting", self.health.reason()

    def stats(self) -> dict[str, float]:
        """Statistics; docs/reference/statistics.md explains all of them.

        - running, waiting: requests with output, and without
        - waiting_tokens: prompt tokens of waiting requests, as far as they are known
        - kept: requests that have ended and that the pipeline keeps
        - counts: requests sent on, rows dropped, requests repeated, requests whose tokens came out
          different when they were computed again, requests of the gateway before
        """
        return {
            "running": float(len(self._records) - self._backlog.requests),
            "waiting": float(self._backlog.requests),
            "waiting_tokens": float(self._backlog.tokens),
            "kept": float(len(self._finished)),
            **self._counts,
        }

    def idle(self) -> bool:
        """True when no request is live. Those that a successor adopts do not count for one that
        leaves."""
        if self._leaves:
            return all(record.submit.retention is not None for record in self._records.values())
        return not self._records

    def can_serve(self) -> bool:
        """Whether a request sent now would be served without a pause."""
        return self._readiness.can_serve

    # -------------------------------------------------------------------------------- from a client

    def _on_call(self, call: Call, now: float) -> list[Send]:
        if call.request_id in self._records:
            raise ValueError(f"request id {call.request_id!r} is in use")
        size, many = call_tokens(call), call.params.n  # of each choice
        refusal = self.refusal(requests=many, tokens=size * many)
        if refusal is not None:
            names = choice_ids(call.request_id, range(many))
            return [local(msgspec.structs.replace(refusal, request_id=name)) for name in names]
        tokenizer = self._choose(self._tokenizers, prompt_beginning(call))
        submit = self._submissions.build(call, self._detokenizer(call.request_id))
        self._counts["requests_total"] += len(submit.choices)
        for number in submit.choices:
            record = RequestRecord(submit, tokenizer, now, size, number)
            self._records[record.request_id] = record
            self._backlog.add(size)
            self._deadlines.set(record.request_id, record.deadline)
        return [Send("requests", tokenizer, submit)]

    def refusal(self, requests: int, name: str = "", tokens: int = 0) -> Failed | None:
        """The error with which so many more requests would be refused now; None if they would be
        taken.

        Asked before a request is read, so that a full server refuses at little cost.
        """
        if self._readiness.draining:
            message = "the server is shutting down"
            return Failed(name, 503, message, code="draining", retry_after=RETRY_LATER)
        if not self._readiness.was_ready:
            message = f"the server is starting: {self.health.reason()}"
            return Failed(name, 503, message, code="starting", retry_after=RETRY_SOON)
        reason = self._backlog.refusal_reason(requests, tokens)
        if reason:
            return Failed(name, 429, reason, code=QUEUE_FULL, retry_after=RETRY_SOON)
        return None

    def _on_disconnect(self, message: ClientDisconnected, now: float) -> list[Send]:
        record = self._records.get(message.request_id)
        if record is not None:
            return [self._abort(record, message.reason, now)]
        finished = self._finished.get(message.request_id)
        if finished is not None:
            self._release(finished, now)
        return []

    def _on_reattached(self, event: Reattached, _now: float) -> list[Send]:
        """From the driver: a client has come back for an adopted answer."""
        tokenizers: dict[str, list[str]] = {}
        for name in event.request_ids:
            record = self._records.get(name) or self._finished.get(name)
            if record is not None:
                tokenizers.setdefault(record.tokenizer, []).append(name)
        return [Send("requests", to, Reattached(tuple(names))) for to, names in tokenizers.items()]

    def _on_reset_cache(self, reset: ResetCache, _now: float) -> list[Send]:
        """Sends the reset to one tokenizer, which passes it on to all groups."""
        detokenizer = self._detokenizer(reset.name)
        reset = msgspec.structs.replace(reset, gateway=self._index, detokenizer=detokenizer)
        return [Send("requests", self._choose(self._tokenizers, b""), reset)]

    def _on_set_sleep(self, asked: SetSleep, _now: float) -> list[Send]:
        return [Send("requests", self._choose(self._tokenizers, b""), asked)]

    def _detokenizer(self, name: str) -> int:
        """The index of the detokenizer for what is called `name`."""
        rows, own = self.health.stages, self._own_detokenizers
        ready = any(rows[stage].state == "ready" for stage in own)
        stage = self._choose(own if ready else self._detokenizers, name.encode())
        return stage_number(stage, "detokenizer") or 0

    def _choose(self, stages: Sequence[str], key: bytes) -> str:
        """The one of `stages` for `key`: always the same while it is ready. While it is not, what
        it would get goes to others; where none is ready, it waits."""
        rows = self.health.stages
        ready = [stage for stage in stages if rows[stage].state == "ready"]
        return highest_random_weight(ready or stages, key)

    def _on_queue_share(self, share: QueueShare, _now: float) -> list[Send]:
        self._backlog.set_bounds(share.requests, share.tokens)
        return []

    def _on_set_adapters(self, event: SetAdapters, _now: float) -> list[Send]:
        """Tokenizers keep it for the gateway that comes after this one."""
        self._adapters = self._adapters.updated(event.changes)
        return [Send("requests", to, event.changes) for to in self._tokenizers]

    def _on_cache_reset(self, reply: CacheReset, _now: float) -> list[Send]:
        return [local(reply)]

    # ---------------------------------------------------------------------------- from the pipeline

    def _on_accepted(self, accepted: Accepted, now: float) -> list[Send]:
        out: list[Send] = []
        for number in accepted.choices:
            record = self._records.get(choice_id(accepted.request_id, number))
            if record is None or not record.adopt_attempt(accepted.attempt):
                continue
            moved = record.group >= 0  # another group took it over
            record.group = accepted.group
            if not moved:
                self._on_first_accepted(record, accepted, out, now)
        return out

    def _on_first_accepted(
        self, record: RequestRecord, accepted: Accepted, out: list[Send], now: float
    ) -> None:
        if record.prompt_tokens < 0:
            record.prompt_tokens = accepted.prompt_tokens
            self._update_size(record)
            out.append(local(_started(accepted, record)))
            if record.submit.only_encode:
                self._complete(record, now)
                out.append(local(_encoded(record)))
        early_rows, record.early = record.early, []
        for row in early_rows:
            if row.request_id in self._records:
                self._deliver(record, row, out, now)

    def _on_hand_over(self, event: HandOver, now: float) -> list[Send]:
        """The group of a request is lost: another group goes on after what was delivered, as the
        next attempt, and late rows of this attempt are dropped."""
        record = self._records.get(event.request_id)
        if record is None or record.attempt > event.attempt:
            finished = self._finished.get(event.request_id)
            if finished is not None:  # its text is not kept by the lost group any more
                self._release(finished, now)
            return []  # the request has ended, or the next attempt has begun
        if event.stage and self._adoption.awaits(record.awaited):
            return []  # the delivered output is not known yet; the tokenizer asks again
        self._counts["diverged"] += not event.stage
        return [self._next_attempt(record, event.stage or record.tokenizer, event.attempt + 1)]

    def _next_attempt(self, record: RequestRecord, tokenizer: str, attempt: int) -> Send:
        """A group goes on after what was delivered, as `attempt`."""
        record.adopt_attempt(attempt)
        delivered = Delivered(request_id=record.request_id, attempt=attempt, ids=bytes(record.ids))
        return Send("recovery", tokenizer, delivered)

    def _on_refused(self, refused: Refused, now: float) -> list[Send]:
        record = self._records.get(refused.request_id)
        if record is None or not record.adopt_attempt(refused.attempt):
            return []
        self._complete(record, now)
        retry = RETRY_SOON if refused.status in (429, 503) else 0
        failed = Failed(
            request_id=refused.request_id,
            status=refused.status,
            message=refused.message,
            param=refused.param,
            code=refused.code,
            retry_after=retry,
            never_ran=True,
        )
        return [local(failed)]

    def _on_send_failed(self, failure: SendFailed, now: float) -> list[Send]:
        """A message about a request cannot be encoded: all its choices fail."""
        record = self._records.get(failure.request_id)
        if record is None or record.attempt != failure.attempt:
            return []
        message, out = f"the request cannot be passed on: {failure.reason}", list[Send]()
        for name in choice_ids(record.submit.request_id, record.submit.choices):
            choice = self._records.get(name)
            if choice is not None:
                failed = Failed(choice.request_id, 500, message, code="request_failed")
                out += [self._abort(choice, "unsent", now), local(failed)]
        return out

    def _on_text(self, text: Text, now: float) -> list[Send]:
        out: list[Send] = []  # hot path: once for every token of every stream
        records = self._records
        for row in text.rows:
            record = records.get(row.request_id)
            if record is None:
                self._on_unknown_row(row, out, now)
            elif row.attempt != record.submit.attempt and not record.adopt_attempt(row.attempt):
                self._counts["late_rows"] += 1
            elif record.awaited and self._adoption.awaits(record.awaited):
                self._counts["late_rows"] += 1  # the answer brings all of it
            elif record.group < 0:  # not accepted yet
                record.early.append(row)
            else:
                self._deliver(record, row, out, now)
        return out

    def _deliver(self, record: RequestRecord, row: TextRow, out: list[Send], now: float) -> None:
        byte, token = record.bytes, record.tokens
        try:
            text, ids = record.advance(row)
            prompt = None if row.prompt is None else record.prompt(row)
        except OutputDiverged:
            # The stages that knew what was delivered died, and the output was computed anew.
            # Engines need not compute the same twice: the text would be a mixture of two outputs.
            self._counts["diverged"] += 1
            out.append(self._next_attempt(record, record.tokenizer, record.attempt + 1))
            return
        except StreamGap as gap:
            out.append(self._abort(record, "stream_broken", now))
            out.append(local(Failed(row.request_id, 500, str(gap), code="stream_broken")))
            return
        if row.finish is None:
            if text or ids:
                if not record.has_output:
                    self._on_first_output(record)
            elif prompt is None:
                return
            delta = OutputDelta(row.request_id, text, ids, byte, token)
            if prompt is not None or row.logprobs is not None or row.offsets:
                delta = msgspec.structs.replace(
                    delta,
                    logprobs=record.logprobs(row, ids),
                    prompt=prompt,
                    offsets=offsets(row, ids),
                )
            out.append(Send(LOCAL, "", delta))
        else:
            if record.submit.retention is None:
                self._complete(record, now)
            else:
                self._keep(record)
            delta = OutputDelta(row.request_id, text, ids, byte, token)
            self._finish(record, row, delta, out, now)

    def _finish(
        self, record: RequestRecord, row: TextRow, delta: OutputDelta, out: list[Send], now: float
    ) -> None:
        """An abort is one for time only if the deadline has come: the scheduler also aborts what
        runs when the server falls asleep. Its own deadline is never earlier than this one."""
        delivered = record.has_output or delta.text or delta.ids
        if row.finish == "error":
            message = row.error or "the request failed"
            if delta.text or delta.ids:  # the rest of its text, delivered with the error
                logprobs = record.logprobs(row, delta.ids)
                offset = offsets(row, delta.ids)
                delta = msgspec.structs.replace(delta, logprobs=logprobs, offsets=offset)
                out.append(local(delta))
            out.append(local(Failed(row.request_id, 500, message, code="request_failed")))
        elif row.finish == "abort" and now >= record.deadline and not delivered:
            out.append(local(_timed_out(record)))
        else:
            if row.vector:  # it is the output, and not the token that was sampled behind it
                delta = msgspec.structs.replace(delta, text="", ids=b"")
            counted = msgspec.structs.replace(
                delta,
                finish="stop" if row.vector else row.finish,
                stop_reason=row.stop_reason,
                prompt_tokens=record.once(record.prompt_tokens),
                output_tokens=0 if row.vector else row.output_tokens,
                cached_tokens=record.once(row.cached_tokens),
                logprobs=record.logprobs(row, delta.ids),
                offsets=offsets(row, delta.ids),
                vector=row.vector,
            )
            out.append(local(counted))

    def _on_unknown_row(self, row: TextRow, out: list[Send], now: float) -> None:
        """A row of a request that is not live: it is late, it belongs to a dead gateway, or the end
        of the request got lost, which is sent again."""
        end = self._ended.get(row.request_id)
        if row.request_id in self._finished:
            self._counts["late_rows"] += 1  # its detokenizer was started again
            return
        if end is None:
            if not self._adoption.complete:
                return  # if the request is kept, all of it comes when it is adopted
            self._counts["stray_rows"] += 1
            end = EndedRequest("", row.attempt, "unknown to its gateway", now)
        else:
            self._counts["late_rows"] += 1
            if now - end.at < LATE_ROW_SECONDS:
                return
            end = end._replace(reason=end.reason or "it has ended", at=now)
        self._ended.add(row.request_id, end)
        abort = Abort(row.request_id, end.attempt, end.reason)
        tokenizers = [end.tokenizer] if end.tokenizer else self._tokenizers
        out.extend(Send("requests", tokenizer, abort) for tokenizer in tokenizers)

    def _on_recover(self, event: Recover, now: float) -> list[Send]:
        """A tokenizer was started again: its requests, and the ends that it may have missed."""
        known = (*self._records.values(), *self._finished.values())
        records = [record for record in known if record.tokenizer == event.stage]
        self._counts["resubmitted"] += len(records)
        ended = self._ended.recent(event.stage, now)
        adapters = [self._adapters] * (self._adapters != AdapterChanges())
        sends = (
            Send("requests", event.stage, message)
            for message in (*adapters, *resubmissions(records), *ended)
        )
        return bracketed_answer(stage_id("gateway", self._index), event, sends)

    # ------------------------------------------------------------- from the gateway before this one

    def _on_adopt(self, adopt: Adopt, now: float) -> list[Send]:
        """Takes over a request whose answer is kept, as if this gateway had sent it. Ignored if the
        request is known already, or has ended since. Aborted if adoption is over: its detokenizer
        has sent its text already, and clients that came back for it were sent away."""
        submit = adopt.submit
        names = dict(
            zip(choice_ids(submit.request_id, submit.choices), submit.choices, strict=True)
        )
        new = [
            number
            for name, number in names.items()
            if name not in self._records
            and name not in self._finished
            and self._ended.get(name) is None
        ]
        if not new or submit.retention is None:
            return []
        if self._adoption.complete:
            return [self._abort_late(adopt, number, now) for number in new]
        submit = msgspec.structs.replace(submit, gateway=self._index, choices=tuple(new))
        size = occupied_tokens(submit.params, 0)
        for number in new:
            record = RequestRecord(submit, adopt.stage, now, size, number)
            record.awaited = stage_id("detokenizer", adopt.submit.detokenizer)
            self._records[record.request_id] = record
            self._backlog.add(size)
            self._deadlines.set(record.request_id, record.deadline)
        self._counts["adopted"] += len(new)
        out = [local(msgspec.structs.replace(adopt, submit=submit, accepted=None))]
        if adopt.accepted is not None:
            accepted = msgspec.structs.replace(adopt.accepted, choices=submit.choices)
            out += self._on_accepted(accepted, now)
        if self._adoption.asks_detokenizers:  # a detokenizer sent it: its tokenizer died, too
            out.append(Send("requests", adopt.stage, submit))
        return out

    def _abort_late(self, adopt: Adopt, choice: int, now: float) -> Send:
        """The Abort for a choice that this gateway never had."""
        name, attempt = choice_id(adopt.submit.request_id, choice), adopt.submit.attempt
        end = EndedRequest(adopt.stage, attempt, "its gateway did not wait for it", now)
        self._ended.add(name, end)
        return Send("requests", adopt.stage, Abort(name, attempt, end.reason))

    def _on_adapters(self, changes: AdapterChanges, _now: float) -> list[Send]:
        """Takes the adapters that earlier gateways have loaded, from a tokenizer."""
        self._adapters = self._adapters.updated(changes)
        return [local(changes)]

    def _on_recovered(self, bracket: Recovered, now: float) -> list[Send]:
        self._adoption.on_recovered(bracket)
        return self._ask(now)

    def _ask(self, now: float) -> list[Send]:
        asked = self._adoption.ask(now)
        return [*asked, local(AdoptionEnded())] if self._adoption.take_end(now) else asked

    def _on_dropped(self, abort: Abort, now: float) -> list[Send]:
        """A detokenizer keeps a request's output no more: too much is kept."""
        record = self._records.get(abort.request_id)
        finished = self._finished.get(abort.request_id)
        if finished is not None:
            self._release(finished, now)
        if record is None:
            return []
        failed = Failed(abort.request_id, 500, "its output is kept no more", code="request_failed")
        return [self._abort(record, abort.reason, now), local(failed)]

    # ------------------------------------------------------------------------------ time and health

    def _on_heartbeat(self, beat: Heartbeat, now: float) -> list[Send]:
        out: list[Send] = []
        self.health.on_heartbeat(beat, now)
        self._publish_status(out)
        return out

    def _on_tick(self, _event: Tick, now: float) -> list[Send]:
        out = self._ask(now)  # at the first tick before any request
        self.health.mark_lost(now)
        for row in self.health.lost_for_good(now):
            self._fail_requests_of(row, out, now)
        for name in self._deadlines.take_due(now):
            self._expire(self._records[name], out, now)
        self._publish_status(out)
        return out

    def _fail_requests_of(self, row: StageStatus, out: list[Send], now: float) -> None:
        """Fails the requests that need a stage which is lost for good."""
        message = f"{row.stage} is lost: {row.reason}"
        for record in list(self._records.values()):
            waits = record.group < 0 and record.tokenizer == row.stage
            if waits or row.stage == stage_id("detokenizer", record.submit.detokenizer):
                out.append(self._abort(record, "host_lost", now))
                failed = Failed(record.request_id, 503, message, code="host_lost")
                out.append(local(failed))

    def _expire(self, record: RequestRecord, out: list[Send], now: float) -> None:
        self._cut(record, "timeout", _timed_out(record), out, now)

    def _cut(
        self, record: RequestRecord, reason: str, failed: Failed, out: list[Send], now: float
    ) -> None:
        """Ends a request early: its client gets the output so far, or `failed` if there is no
        output."""
        out.append(self._abort(record, reason, now))
        if not record.has_output:
            out.append(local(failed))
            return
        delta = OutputDelta(
            request_id=record.request_id,
            text="",
            ids=b"",
            byte_offset=record.bytes,
            token_offset=record.tokens,
            finish="abort",
            prompt_tokens=record.once(record.prompt_tokens),
            output_tokens=record.tokens,
        )
        out.append(local(delta))

    def _on_leave(self, event: Leave, now: float) -> list[Send]:
        """Drains, to leave. Connections cannot be handed over; the successor adopts kept
        answers."""
        self._leaves = True
        return self._on_drain(event, now)

    def _on_drain(self, _event: Drain | Leave, now: float) -> list[Send]:
        self._readiness.draining = True
        out: list[Send] = []
        if self.health.asleep():  # it may never be woken
            for record in list(self._records.values()):
                refusal = self.refusal(1, record.request_id)
                assert refusal is not None
                self._cut(record, "asleep", refusal, out, now)
        self._publish_status(out)
        return out

    def _publish_status(self, out: list[Send]) -> None:
        """Gives the driver the status whenever it has changed."""
        status = self._readiness.status_change()
        if status is not None:
            out.append(local(status))

    # ------------------------------------------------------------------------------ ends of records

    def _on_first_output(self, record: RequestRecord) -> None:
        record.has_output = True
        self._backlog.remove(record.size)

    def _update_size(self, record: RequestRecord) -> None:
        """Counts a request's prompt tokens in the backlog, now that they are known, if they exceed
        the estimate."""
        extra_tokens = occupied_tokens(record.submit.params, record.prompt_tokens) - record.size
        if extra_tokens > 0 and not record.has_output:
            record.size += extra_tokens
            self._backlog.grow(extra_tokens)

    def _complete(self, record: RequestRecord, now: float) -> None:
        """Ends a record whose client has the whole answer; Done is sent after this event."""
        self._end(record, "", now)

    def _keep(self, record: RequestRecord) -> None:
        """The request has ended, and the pipeline keeps it until the driver needs it no more."""
        self._remove(record)
        self._finished[record.request_id] = record

    def _release(self, record: RequestRecord, now: float) -> None:
        """Ends a kept record; Done is sent after this event."""
        del self._finished[record.request_id]
        end = EndedRequest(record.tokenizer, record.attempt, "", now)
        self._ended.add(record.request_id, end)

    def _abort(self, record: RequestRecord, reason: str, now: float) -> Send:
        """Ends the record; returns the Abort for the pipeline."""
        self._end(record, reason, now)
        return Send("requests", record.tokenizer, Abort(record.request_id, record.attempt, reason))

    def _end(self, record: RequestRecord, reason: str, now: float) -> None:
        self._remove(record)
        end = EndedRequest(record.tokenizer, record.attempt, reason, now)
        self._ended.add(record.request_id, end)

    def _remove(self, record: RequestRecord) -> None:
        del self._records[record.request_id]
        self._deadlines.remove(record.request_id)
        if not record.has_output:
            self._backlog.remove(record.size)

    _handlers: ClassVar[dict[type[Message], Callable[..., list[Send]]]] = {
        Text: _on_text,
        Call: _on_call,
        ClientDisconnected: _on_disconnect,
        ResetCache: _on_reset_cache,
        SetSleep: _on_set_sleep,
        Reattached: _on_reattached,
        SetAdapters: _on_set_adapters,
        AdapterChanges: _on_adapters,
        CacheReset: _on_cache_reset,
        Accepted: _on_accepted,
        HandOver: _on_hand_over,
        Refused: _on_refused,
        Recover: _on_recover,
        Recovered: _on_recovered,
        Adopt: _on_adopt,
        Abort: _on_dropped,
        Heartbeat: _on_heartbeat,
        Tick: _on_tick,
        Drain: _on_drain,
        SendFailed: _on_send_failed,
        Leave: _on_leave,
        QueueShare: _on_queue_share,
    }


def _again(send: Send) -> Send:
    assert isinstance(send.message, Recover)
    return send._replace(message=msgspec.structs.replace(send.message, again=True))


class Adoption:
    """The questions of a new gateway at its start, by which it gets the requests of the previous
    gateway whose answers are kept. It asks first tokenizers for the requests, then detokenizers for
    their text. asks_detokenizers: tokenizers have answered, or were waited for long enough.
    complete: all have answered, or ADOPTION_TIMEOUT is over."""

    def __init__(self, tokenizers: RollCall, detokenizers: RollCall) -> None:
        self._tokenizers = tokenizers
        self._detokenizers = detokenizers
        self._began = inf
        self.asks_detokenizers = self.complete = False

    def ask(self, now: float) -> list[Send]:
        """The questions that are due at `now` (seconds)."""
        first = self._began == inf
        self._began = min(self._began, now)
        asked = [send if first else _again(send) for send in self._tokenizers.ask(now)]
        if self._tokenizers.complete or now - self._began >= ADOPTION_PATIENCE:
            self.asks_detokenizers = True
            asked += self._detokenizers.ask(now)
        return asked

    def awaits(self, detokenizer: str) -> bool:
        """Whether the answer of that detokenizer is still to come."""
        return not self.complete and not self._detokenizers.has_begun(detokenizer)

    def on_recovered(self, bracket: Recovered) -> None:
        """Takes a bracket of an answer."""
        self._tokenizers.on_recovered(bracket)
        self._detokenizers.on_recovered(bracket)

    def take_end(self, now: float) -> bool:
        """Whether it is complete since it was last asked; True once."""
        answered = self._tokenizers.complete and self._detokenizers.complete
        if self.complete or not (answered or now - self._began >= ADOPTION_TIMEOUT):
            return False
        self.complete = True
        return True


def own_detokenizers(detokenizers: Sequence[str], gateway: int, gateways: int) -> list[str]:
    """The detokenizers that gateway number `gateway` gives its requests. Where they can be shared
    out evenly, each detokenizer has one gateway, or each gateway one detokenizer: so a step's text
    is in few messages."""
    by_index = {stage_number(stage, "detokenizer"): stage for stage in detokenizers}
    if len(by_index) % gateways == 0:
        return [stage for index, stage in by_index.items() if (index or 0) % gateways == gateway]
    if gateways % len(by_index) == 0:
        return [by_index[gateway % len(by_index)]]
    return list(detokenizers)


def _started(accepted: Accepted, record: RequestRecord) -> Started:
    """The prompt's text, if asked for, is the client's own; of ids and chats the tokenizer's."""
    submit = record.submit
    given = submit.text if submit.return_prompt_text else None
    return Started(
        request_id=record.request_id,
        group=accepted.group,
        prompt_tokens=record.once(accepted.prompt_tokens),
        prompt_ids=accepted.prompt_ids,
        prompt_text=accepted.prompt_text if given is None else given,
        reasoning=accepted.reasoning,
        refusal=accepted.refusal,
        token_strs=accepted.token_strs,
    )


def _encoded(record: RequestRecord) -> OutputDelta:
    """The end of a request whose prompt was only to be encoded."""
    return OutputDelta(
        request_id=record.request_id,
        text="",
        ids=b"",
        byte_offset=0,
        token_offset=0,
        finish="stop",
        prompt_tokens=record.once(record.prompt_tokens),
    )


def _timed_out(record: RequestRecord) -> Failed:
    message = f"no output within the request's timeout of {record.timeout:g} s"
    return Failed(record.request_id, 408, message, "timeout", "timeout")


class PipelineReadiness:
    """The status that clients see, and whether this gateway takes requests.

    draining: set once, by Drain. was_ready: whether the pipeline was ready, or asleep, at any time.
    """

    def __init__(self, health: Health) -> None:
        self.status: Status = "starting"
        self.draining = False
        self.was_ready = False
        self._health = health
        self._published: StatusChanged | None = None

    @property
    def can_serve(self) -> bool:
        """Whether a request sent now would be served without a pause."""
        return self.was_ready and not self.draining and self._health.can_serve()

    def status_change(self) -> StatusChanged | None:
        """The status, if it differs from the one that was published last; else None."""
        complete = self._health.all_ready()
        asleep = self._health.asleep()
        self.was_ready = self.was_ready or complete or asleep
        if self.draining:
            self.status = "draining"
        elif complete:
            self.status = "ready"
        elif asleep:
            self.status = "asleep"
        else:
            self.status = "degraded" if self.was_ready else "starting"
        change = StatusChanged(self.status, self.can_serve, self._health.reason())
        if change == self._published:
            return None
        self._published = change
        return change
