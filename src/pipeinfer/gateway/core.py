"""The gateway without HTTP: records of all live requests, and the pipeline's health.

- GatewayCore: sans-IO. The HTTP driver and the offline classes drive it with the same local events
  (ledger.py).
- Health: the stages of the topology, their last heartbeats, and whether they can serve.
- PipelineReadiness: the status that clients see.

Knows no sockets, no clock, and nothing about the meaning of tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import ClassVar

import msgspec

from pipeinfer.core import LOCAL, Drain, Leave, Send, Tick, Unsent, bracketed_answer
from pipeinfer.gateway.ledger import (
    Backlog,
    Call,
    EndedRequest,
    EndedRequests,
    Failed,
    Hangup,
    OutputDelta,
    OutputDiverged,
    RequestDeadlines,
    RequestRecord,
    RequestTraces,
    Started,
    Status,
    StatusChanged,
    StreamGap,
    SubmitBuilder,
    call_tokens,
    occupied_tokens,
    offsets,
    resubmissions,
)
from pipeinfer.liveness import GIVE_UP_FACTOR, silence_limit
from pipeinfer.messages import (
    Abort,
    Accepted,
    CacheReset,
    Delivered,
    GroupFault,
    HandOver,
    Heartbeat,
    Message,
    Recover,
    Refused,
    ResetCache,
    State,
    Text,
    TextRow,
)
from pipeinfer.params import choice_id, choice_ids
from pipeinfer.topology import Topology

# Seconds of Retry-After: where room may come at any moment, and where the server shuts down.
RETRY_SOON = 1
RETRY_LATER = 5
LATE_ROW_SECONDS = 2.0  # seconds for which rows of an ended request are no surprise


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
        self._recover_request: Recover | None = Recover(f"gateway-{index}", incarnation)
        self._submissions = SubmitBuilder(index, seed, traces or RequestTraces())
        self._tokenizers = [e.stage for e in expected if e.name == "tokenizer"]
        self._dispatched = 0
        self._records: dict[str, RequestRecord] = {}
        self._backlog = backlog or Backlog()
        self._ended = EndedRequests()
        self._deadlines = RequestDeadlines(self._records)
        counts = ("requests_total", "late_rows", "stray_rows", "resubmitted", "diverged")
        self._counts = dict.fromkeys(counts, 0)

    # ------------------------------------------------------------------------------- a stage's core

    def handle(self, event: Message, now: float) -> list[Send]:
        """Takes one event at `now` (monotonic seconds). KeyError for one that no gateway gets."""
        out = self._handlers[type(event)](self, event, now)
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
            return "draining", f"{len(self._records)} requests are running"
        if self.can_serve():
            return "ready", ""
        return "waiting", self.health.reason()

    def stats(self) -> dict[str, float]:
        """running, waiting: requests with and without output; waiting_tokens: of the latter's
        prompts, as far as is known; requests sent on; rows dropped; requests repeated;
        requests whose tokens came out different when they were computed again."""
        return {
            "running": float(len(self._records) - self._backlog.requests),
            "waiting": float(self._backlog.requests),
            "waiting_tokens": float(self._backlog.tokens),
            **self._counts,
        }

    def idle(self) -> bool:
        """True when no request is live."""
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
        submit = self._submissions.build(call)
        tokenizer = self._tokenizers[self._dispatched % len(self._tokenizers)]
        self._dispatched += 1
        self._counts["requests_total"] += len(submit.choices)
        for number in submit.choices:
            record = RequestRecord(submit, tokenizer, now, size, number)
            self._records[record.request_id] = record
            self._backlog.add(size)
            self._deadlines.add(record)
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
            return Failed(name, 429, reason, code="queue_full", retry_after=RETRY_SOON)
        return None

    def _on_hangup(self, hangup: Hangup, now: float) -> list[Send]:
        record = self._records.get(hangup.request_id)
        return [] if record is None else [self._abort(record, hangup.reason, now)]

    def _on_reset_cache(self, reset: ResetCache, _now: float) -> list[Send]:
        """One tokenizer passes the request to reset on to all groups."""
        reset = msgspec.structs.replace(reset, gateway=self._index)
        tokenizer = self._tokenizers[self._dispatched % len(self._tokenizers)]
        return [Send("requests", tokenizer, reset)]

    def _on_cache_reset(self, reply: CacheReset, _now: float) -> list[Send]:
        return [local(reply)]

    # ---------------------------------------------------------------------------- from the pipeline

    def _on_accepted(self, accepted: Accepted, now: float) -> list[Send]:
        out: list[Send] = []
        for number in accepted.choices:
            record = self._records.get(choice_id(accepted.request_id, number))
            if record is None or not record.accepts_attempt(accepted.attempt):
                continue
            moved = record.group >= 0  # another group took it over
            record.group = accepted.group
            if not moved:
                self._start(record, accepted, out, now)
        return out

    def _start(
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

    def _on_hand_over(self, event: HandOver, _now: float) -> list[Send]:
        """The group of a request is lost: another group goes on after what was delivered, as the
        next attempt, and late rows of this attempt are dropped."""
        record = self._records.get(event.request_id)
        if record is None or record.attempt > event.attempt:
            return []  # the request has ended, or the next attempt has begun
        self._counts["diverged"] += not event.stage
        return [self._next_attempt(record, event.stage or record.tokenizer, event.attempt + 1)]

    def _next_attempt(self, record: RequestRecord, tokenizer: str, attempt: int) -> Send:
        """A group goes on after what was delivered, as `attempt`."""
        record.accepts_attempt(attempt)
        delivered = Delivered(request_id=record.request_id, attempt=attempt, ids=bytes(record.ids))
        return Send("recovery", tokenizer, delivered)

    def _on_refused(self, refused: Refused, now: float) -> list[Send]:
        record = self._records.get(refused.request_id)
        if record is None or not record.accepts_attempt(refused.attempt):
            return []
        self._complete(record, now)
        retry = RETRY_SOON if refused.status in (429, 503) else 0
        failed = Failed(
            refused.request_id, refused.status, refused.message, refused.param, refused.code, retry
        )
        return [local(failed)]

    def _on_unsent(self, unsent: Unsent, now: float) -> list[Send]:
        """A message about a request cannot be encoded: all its choices fail."""
        record = self._records.get(unsent.request_id)
        if record is None or record.attempt != unsent.attempt:
            return []
        message, out = f"the request cannot be passed on: {unsent.reason}", list[Send]()
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
            elif row.attempt != record.submit.attempt and not record.accepts_attempt(row.attempt):
                self._counts["late_rows"] += 1
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
                if not record.started:
                    self._mark_started(record)
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
            self._complete(record, now)
            delta = OutputDelta(row.request_id, text, ids, byte, token)
            self._finish(record, row, delta, out)

    def _finish(
        self, record: RequestRecord, row: TextRow, delta: OutputDelta, out: list[Send]
    ) -> None:
        delivered = record.started or delta.text or delta.ids
        if row.finish == "error":
            message = row.error or "the request failed"
            if delta.text or delta.ids:  # the rest of its text, delivered with the error
                logprobs = record.logprobs(row, delta.ids)
                offset = offsets(row, delta.ids)
                delta = msgspec.structs.replace(delta, logprobs=logprobs, offsets=offset)
                out.append(local(delta))
            out.append(local(Failed(row.request_id, 500, message, code="request_failed")))
        elif row.finish == "abort" and record.timeout > 0 and not delivered:
            out.append(local(_timed_out(record)))
        else:
            counted = msgspec.structs.replace(
                delta,
                finish=row.finish,
                stop_reason=row.stop_reason,
                prompt_tokens=record.once(record.prompt_tokens),
                output_tokens=row.output_tokens,
                cached_tokens=record.once(row.cached_tokens),
                logprobs=record.logprobs(row, delta.ids),
                offsets=offsets(row, delta.ids),
            )
            out.append(local(counted))

    def _on_unknown_row(self, row: TextRow, out: list[Send], now: float) -> None:
        """A row of a request that is not live: it is late, it belongs to a dead gateway, or the end
        of the request got lost, which is sent again."""
        end = self._ended.get(row.request_id)
        if end is None:
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
        records = [record for record in self._records.values() if record.tokenizer == event.stage]
        self._counts["resubmitted"] += len(records)
        ended = self._ended.recent(event.stage, now)
        sends = (
            Send("requests", event.stage, message) for message in (*resubmissions(records), *ended)
        )
        return bracketed_answer(f"gateway-{self._index}", event, sends)

    # ------------------------------------------------------------------------------ time and health

    def _on_heartbeat(self, beat: Heartbeat, now: float) -> list[Send]:
        out: list[Send] = []
        self.health.on_heartbeat(beat, now)
        self._publish_status(out)
        return out

    def _ignore(self, _event: Message, _now: float) -> list[Send]:
        return []

    def _on_tick(self, _event: Tick, now: float) -> list[Send]:
        out: list[Send] = []
        if self._recover_request is not None:  # the first tick, before any request
            out += [Send("recovery", to, self._recover_request) for to in self._tokenizers]
            self._recover_request = None
        self.health.mark_lost(now)
        for row in self.health.lost_for_good(now):
            self._fail_requests_of(row, out, now)
        for record in self._deadlines.expired(now):
            self._expire(record, out, now)
        self._publish_status(out)
        return out

    def _fail_requests_of(self, row: StageStatus, out: list[Send], now: float) -> None:
        """Fails the requests that need a stage which is lost for good."""
        message = f"{row.stage} is lost: {row.reason}"
        for record in list(self._records.values()):
            waits = record.group < 0 and record.tokenizer == row.stage
            if row.name == "detokenizer" or waits:
                out.append(self._abort(record, "host_lost", now))
                failed = Failed(record.request_id, 503, message, code="host_lost")
                out.append(local(failed))

    def _expire(self, record: RequestRecord, out: list[Send], now: float) -> None:
        out.append(self._abort(record, "timeout", now))
        if not record.started:
            out.append(local(_timed_out(record)))
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

    def _on_drain(self, _event: Drain | Leave, _now: float) -> list[Send]:
        self._readiness.draining = True
        out: list[Send] = []
        self._publish_status(out)
        return out

    def _publish_status(self, out: list[Send]) -> None:
        """Gives the driver the status whenever it has changed."""
        status = self._readiness.status_change()
        if status is not None:
            out.append(local(status))

    # ------------------------------------------------------------------------------ ends of records

    def _mark_started(self, record: RequestRecord) -> None:
        record.started = True
        self._backlog.remove(record.size)

    def _update_size(self, record: RequestRecord) -> None:
        """Its prompt tokens are known: they count in the backlog if they exceed the estimate."""
        extra_tokens = occupied_tokens(record.submit.params, record.prompt_tokens) - record.size
        if extra_tokens > 0 and not record.started:
            record.size += extra_tokens
            self._backlog.grow(extra_tokens)

    def _complete(self, record: RequestRecord, now: float) -> None:
        """Ends a record whose client has the whole answer; Done is sent after this event."""
        self._end(record, "", now)

    def _abort(self, record: RequestRecord, reason: str, now: float) -> Send:
        """Ends the record; returns the Abort for the pipeline."""
        self._end(record, reason, now)
        return Send("requests", record.tokenizer, Abort(record.request_id, record.attempt, reason))

    def _end(self, record: RequestRecord, reason: str, now: float) -> None:
        del self._records[record.request_id]
        if not record.started:
            self._backlog.remove(record.size)
        end = EndedRequest(record.tokenizer, record.attempt, reason, now)
        self._ended.add(record.request_id, end)

    _handlers: ClassVar[dict[type[Message], Callable[..., list[Send]]]] = {
        Text: _on_text,
        Call: _on_call,
        Hangup: _on_hangup,
        ResetCache: _on_reset_cache,
        CacheReset: _on_cache_reset,
        Accepted: _on_accepted,
        HandOver: _on_hand_over,
        Refused: _on_refused,
        Recover: _on_recover,
        Heartbeat: _on_heartbeat,
        GroupFault: _ignore,
        Tick: _on_tick,
        Drain: _on_drain,
        Unsent: _on_unsent,
        Leave: _on_drain,  # its connections cannot be handed over
    }


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
        thoughts=accepted.thoughts,
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


PER_GROUP = ("scheduler", "engine")
# A statistic that a stage's heartbeat has once the stage has started.
STARTED_STATISTIC = {"scheduler": "running", "engine": "pages_total"}
MAX_NAMED = 8  # stages that a reason names; the others it counts


@dataclass(frozen=True)
class ExpectedStage:
    """A stage of the topology.

    stage: its id ("engine-0-1"). name: its kind ("engine"). group, rank: numbers.
    """

    stage: str
    name: str
    group: int = 0
    rank: int = 0


def expected_stages(topology: Topology) -> list[ExpectedStage]:
    """The stages of a topology, as Health takes them."""
    return [ExpectedStage(e.identity.id, e.name, e.group, e.rank) for e in topology.entries]


@dataclass
class StageStatus:
    """Last known status of one stage.

    stage, name, group, rank: as ExpectedStage. state, reason: of its heartbeat, or "lost".
    pid, incarnation: of its process. last_seen: monotonic seconds of its last heartbeat.
    restarts: processes whose heartbeats came after the first process's. restarted_at: monotonic
        seconds of the first heartbeat of the newest of these.
    stats: statistics of its last heartbeat.
    """

    stage: str
    name: str
    group: int
    rank: int
    state: str = "starting"
    reason: str = "no heartbeat yet"
    pid: int = 0
    incarnation: int = 0
    last_seen: float | None = None
    restarts: int = 0
    restarted_at: float | None = None
    stats: dict[str, float] = field(default_factory=dict[str, float])


class Health:
    """The health table. Gateways are listed in it, but nothing waits for them.

    silence: seconds without a heartbeat after which a stage counts as lost.
    host_loss: seconds after that in which its return is awaited.
    stages: {stage id: status}.

    The counts below are updated with every heartbeat, whose cost must not grow with the number of
    stages.
    _not_ready: numbers of the stages that are not ready, in the topology's order.
    _group_not_ready: how many of these are in each group. _shared_not_ready: how many in none.
    _ready_groups: groups of which all stages are ready.
    """

    def __init__(
        self, expected: Iterable[ExpectedStage], silence: float = 5.0, host_loss: float = inf
    ) -> None:
        self._silence, self._host_loss = silence, host_loss
        self._lost_since: dict[str, float] = {}  # monotonic seconds
        self.stages = {e.stage: StageStatus(e.stage, e.name, e.group, e.rank) for e in expected}
        self._order = list(self.stages.values())
        self._index = {row.stage: number for number, row in enumerate(self._order)}
        self._not_ready = [
            number for number, row in enumerate(self._order) if row.name != "gateway"
        ]
        per_group = [row for row in self._order if row.name in PER_GROUP]
        self._group_not_ready = Counter(row.group for row in per_group)
        self._ready_groups = 0
        self._shared_not_ready = len(self._not_ready) - len(per_group)

    def on_heartbeat(self, beat: Heartbeat, now: float) -> None:
        """Takes a heartbeat; those of unknown stages and of earlier incarnations are ignored."""
        row = self.stages.get(beat.stage)
        if row is None or beat.incarnation < row.incarnation:
            return
        # The supervisor's notice of a process that ended has the incarnation of that process plus
        # one (Child.death_notice); incarnations of processes are times in ns, further apart.
        if row.incarnation and beat.incarnation > row.incarnation + 1:
            row.restarts, row.restarted_at = row.restarts + 1, now
        row.reason, row.pid = beat.reason, beat.pid
        row.incarnation, row.last_seen, row.stats = beat.incarnation, now, beat.stats
        self._set_state(row, beat.state)

    def mark_lost(self, now: float) -> None:
        """Marks stages as lost whose last heartbeat is too old."""
        for row in self._order:
            if (
                row.last_seen is not None
                and now - row.last_seen > self._silence
                and row.state != "lost"
            ):
                row.reason = f"silent for more than {self._silence:g} s"
                self._set_state(row, "lost")
                self._lost_since[row.stage] = now

    def lost_for_good(self, now: float) -> list[StageStatus]:
        """Stages that are lost for longer than `host_loss`."""
        lost = [stage for stage, since in self._lost_since.items() if now - since > self._host_loss]
        return [self.stages[stage] for stage in lost]

    def _set_state(self, row: StageStatus, state: str) -> None:
        was, row.state = row.state, state
        self._lost_since.pop(row.stage, None)
        if row.name == "gateway" or (was == "ready") == (state == "ready"):
            return
        number, change = self._index[row.stage], 1 if was == "ready" else -1
        at = bisect_left(self._not_ready, number)
        if change > 0:
            self._not_ready.insert(at, number)
        else:
            del self._not_ready[at]
        if row.name not in PER_GROUP:
            self._shared_not_ready += change
            return
        before = self._group_not_ready[row.group]
        self._group_not_ready[row.group] = before + change
        self._ready_groups += (before + change == 0) - (before == 0)

    def not_ready(self) -> list[StageStatus]:
        """The stages that are not ready, in the topology's order."""
        return [self._order[number] for number in self._not_ready]

    def all_ready(self) -> bool:
        """Whether every stage is ready."""
        return not self._not_ready

    def can_serve(self) -> bool:
        """Whether a request could be served: all common stages and one whole group are ready."""
        return self._shared_not_ready == 0 and self._ready_groups > 0

    def reason(self) -> str:
        """One line about what is missing; empty if nothing is. The first MAX_NAMED are named."""
        named = [self._order[number] for number in self._not_ready[:MAX_NAMED]]
        parts = [f"{r.stage} is {r.state}" + (f" ({r.reason})" if r.reason else "") for r in named]
        if len(self._not_ready) > MAX_NAMED:
            parts.append(f"and {len(self._not_ready) - MAX_NAMED} more")
        return "; ".join(parts)

    def one_per_group(self, name: str) -> list[StageStatus]:
        """One stage called `name` (a scheduler or an engine) of each group, rank 0 of the engines.

        Those that still start, whose statistics are not complete, are left out.
        """
        statistic = STARTED_STATISTIC[name]
        rows = self.stages.values()
        return [r for r in rows if r.name == name and r.rank == 0 and statistic in r.stats]

    def total(self, name: str, stat: str) -> float:
        """Sum of a statistic over all groups; of the ranks of a group, which agree, rank 0
        counts."""
        rows = (row for row in self.stages.values() if row.name == name and row.rank == 0)
        return sum(row.stats.get(stat, 0.0) for row in rows)


def kv_usage(engine: StageStatus) -> float:
    """Share of an engine's KV pages that requests use; cached pages count as free."""
    total, free, evictable = (
        engine.stats.get(f"pages_{name}", 0.0) for name in ("total", "free", "evictable")
    )
    return max(1.0 - (free + evictable) / total, 0.0) if total else 0.0


class PipelineReadiness:
    """The status that clients see, and whether this gateway takes requests.

    status: "starting", "ready", "degraded" or "draining". draining: set once, by Drain.
    was_ready: whether the pipeline was ready at any time.
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
        self.was_ready = self.was_ready or complete
        if self.draining:
            self.status = "draining"
        elif complete:
            self.status = "ready"
        else:
            self.status = "degraded" if self.was_ready else "starting"
        change = StatusChanged(self.status, self.can_serve, self._health.reason())
        if change == self._published:
            return None
        self._published = change
        return change
