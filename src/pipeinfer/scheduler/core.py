"""The scheduler without I/O: requests as token sequences in, numbered plans out.

Owns which requests run next, chunking, preemption and the end of a request by token or length.
Keeps up to `overlap_depth` steps in flight, and drops the tokens that these compute for a request
after its end. A new scheduler continues from the messages that tokenizers and detokenizers send it.
Knows no pages (only counts of them), no text, no device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import ClassVar, Literal, get_args

import msgspec

from pipeinfer.core import (
    EVERYONE,
    FORGET_FACTOR,
    LATE_WORK_SECONDS,
    Deadlines,
    Drain,
    Histogram,
    Leave,
    RollCall,
    Send,
    SuspendAwareClock,
    Tick,
    bracketed_answer,
    stage_id,
)
from pipeinfer.grammars.bounds import GRAMMAR_ERROR, NO_GRAMMAR_MEMORY
from pipeinfer.messages import (
    Abort,
    AdapterLoaded,
    Admitted,
    Asleep,
    CacheReset,
    Delivered,
    Digests,
    Done,
    Ended,
    Fault,
    GrammarCompiled,
    GroupFault,
    GroupReadiness,
    GroupStatus,
    HandOver,
    Hello,
    Message,
    MissedPlan,
    Plan,
    PromptLogprobs,
    RankStatus,
    Ready,
    Recover,
    Recovered,
    ResetCache,
    Result,
    SetSleep,
    State,
    StopHit,
    TokenizedRequest,
    TokenRow,
)
from pipeinfer.scheduler.engine_state import (
    BAD_LOGITS,
    EngineState,
    InvalidReport,
    RanksDisagree,
    StepOverdue,
)
from pipeinfer.scheduler.epochs import Epochs, GroupAnnouncer, RanksDiverged, SleepRequest
from pipeinfer.scheduler.planner import Planner, SchedulerOptions
from pipeinfer.scheduler.recovery import (
    Outbox,
    RecoveryRecords,
    TakeoverTimes,
    detokenizer_of,
    last_row,
    next_row,
    refusal,
)
from pipeinfer.scheduler.request import Request, TooLong, max_total, request_of

# "draining": new requests are refused until the live ones have ended. "left": the requests are left
# to another scheduler.
DrainState = Literal["serving", "draining", "left"]

# Error for the client, and its code, if engines cannot load an adapter.
ADAPTER_ERROR, ADAPTER_CODE = "the adapter cannot be loaded: ", "adapter_not_loaded"


class SchedulerCore:
    """The core of a scheduler; see core.Core. Nothing is planned before all `tokenizers` and
    `detokenizers` have sent their state (RollCall).

    - incarnation: greater than that of any earlier scheduler of the group; epochs are numbered from
      `incarnation` + 1, so their numbers are greater too
    """

    def __init__(
        self,
        options: SchedulerOptions,
        group: int = 0,
        incarnation: int = 0,
        tokenizers: Sequence[str] = (),
        detokenizers: Sequence[str] = (),
    ) -> None:
        self.options = options
        self._announcer = GroupAnnouncer(group, incarnation, options)
        self._engine = EngineState(options.tp)
        self._planner = Planner(options, self._engine.slots, self._engine.in_flight)
        self._epochs = Epochs(options.tp, incarnation)
        self._live = LiveRequests()
        self._sleep = SleepRequest()
        self._suspend_aware_clock = SuspendAwareClock()
        self._now = self._clock_time = 0.0  # _clock_time: by _suspend_aware_clock
        self._drain_state: DrainState = "serving"
        self._drains_since = 0.0
        recovering_stages = (*tokenizers, *detokenizers)
        self._roll_call = RollCall(stage_id("scheduler", group), incarnation, recovering_stages)
        self._records = RecoveryRecords(
            tokenizers, detokenizers, FORGET_FACTOR * options.host_loss, group
        )
        self._outbox = Outbox(group)
        self._takeover = TakeoverTimes()
        self._prefill_times = Histogram()
        self.counts.update(
            epochs=0, repeated_plans=0, bad_logits=0, **dict.fromkeys(FINISH_KINDS, 0)
        )

    @property
    def group(self) -> int:
        """Number of the scheduler's data-parallel group."""
        return self._announcer.group

    @property
    def counts(self) -> dict[str, int]:
        """Counters of events so far, for the statistics."""
        return self._planner.counts

    def handle(self, event: Message, now: float) -> list[Send]:
        """Takes one event; see core.Core. Timeouts of engines are measured by a clock that stands
        still while this stage does, because messages of engines wait to be read meanwhile."""
        handler = self._handlers.get(type(event))
        if handler is None:
            return []  # SendFailed; no stage sends GroupStatus and GroupFault to a scheduler
        if isinstance(event, Tick):
            self._suspend_aware_clock.tick(now)
        self._now, clock_time = now, self._suspend_aware_clock.at(now)
        self._clock_time = clock_time
        handler(self, event, clock_time)
        if self._roll_call.complete and self._drain_state != "left":
            if self._sleep.due(len(self._live)):
                self._fall_asleep(clock_time)
            self._publish_plans(clock_time)
        return self._outbox.take()

    def state(self) -> tuple[State, str]:
        if self._drain_state != "serving":
            return "draining", ""
        if not self._roll_call.complete:
            return "waiting", f"for what {', '.join(self._roll_call.missing)} will tell"
        if self._epochs.asleep:
            return "asleep", f"level {self._epochs.sleep_level}"
        return ("ready", "") if self._epochs.running else ("waiting", self._epochs.reason)

    def _group_readiness(self) -> GroupReadiness:
        ranks = self._announcer.ranks
        away = self._drain_state != "serving" or not self._roll_call.complete
        if away or self._epochs.sleep_level:
            return "waits"
        if not self._epochs.running:
            return "deserted" if ranks.deserted else "waits"
        return "waits" if ranks.deserted or ranks.silent else "serves"

    def status(self) -> GroupStatus:
        """The group's status for tokenizers."""
        shape = self._epochs.last_shape
        page_size = shape.page_size if shape is not None else 0
        return GroupStatus(
            group=self.group,
            incarnation=self._announcer.incarnation,
            readiness=self._group_readiness(),
            epoch=self._epochs.epoch,
            requests=len(self._live),
            tokens=sum(request.remaining_tokens for request in self._live),
            capacity=shape.pages * page_size if shape is not None else 0,
            evicted=self._engine.slots.evicted * page_size,
        )

    def stats(self) -> dict[str, float]:
        """Statistics for the heartbeat; docs/reference/statistics.md lists them."""
        step_tokens, prompt_rate = self._planner.prefill_allowed
        steps, running = self._engine.in_flight, len(self._engine.slots.running)
        return {
            "running": running,
            "waiting": len(self._live) - running,
            "held": self._planner.waiting_for_prefix,
            "preparing": self._planner.waiting_for_grammar,
            "loading_adapter": self._planner.waiting_for_adapter,
            "accepted_total": self._live.arrivals,
            "tokens_left": sum(request.remaining_tokens for request in self._live),
            "kept": len(self._records.finished),
            "orphans": self._records.orphans,
            "in_flight": len(steps),
            "sleep_level": self._epochs.sleep_level if self._epochs.asleep else 0,
            "deferred_total": steps.deferred,
            "recomputed_tokens_total": steps.recomputed,
            "agreed_plans": self._engine.agreed_plans,
            **steps.draft_counts.statistics(),
            "target_step_tokens": step_tokens,
            "target_prompt_rate": prompt_rate,
            **{f"{name}_total": count for name, count in self.counts.items()},
            **self._planner.queue_times.statistics("queue_seconds"),
            **self._prefill_times.statistics("prefill_seconds"),
            **self._takeover.statistics(),
        }

    def idle(self) -> bool:
        return (self._drain_state == "left" or not self._live) and not len(self._engine.in_flight)

    # -------------------------------------------------------------------------------- requests

    def _on_work(self, work: TokenizedRequest, now: float) -> None:
        known = self._live.get(work.request_id)
        if known is not None:
            if work.attempt <= known.work.attempt:
                return
            self._drop(known, "aborted")  # sent again by the gateway: start over
        if self._drain_state == "left" or self._records.has_ended(work.request_id, work.attempt):
            return
        if not self.options.shares_prefixes:
            work = msgspec.structs.replace(work, sampling_group="")
        request = self._live.new_request(work, self._now, now)
        if self._drain_state == "draining" and now >= self._drains_since + LATE_WORK_SECONDS:
            self._refuse(request, 503, "the server is shutting down", None)
            return
        if work.adapter is not None and not self.options.max_loras:
            self._refuse(request, 400, "adapters need --enable-lora", "model")
            return
        try:
            if self._epochs.running:
                request.max_total = max_total(request, self._epochs.shape)
        except TooLong as error:
            self._refuse(request, 400, str(error), error.param)
            return
        self._live.add(request)
        delivered = self._records.take_delivered(request.id)
        if delivered is None:
            self._outbox.add(self._outbox.all_of(request))
        else:
            self._resume(request, delivered)
            known, last = self._records.finished.get(request.id, (request, None))
            self._outbox.add(self._outbox.all_of(known, last))
        if request.phase != "new":
            return
        is_new = delivered is None and self._roll_call.complete
        if is_new and self._sleep.refuses:
            self._refuse(request, 503, "the server sleeps", None, "asleep")
        elif is_new and self._sleep.falls:
            self._sleep.deferred[request.id] = request
        else:
            self._planner.enqueue(request, -1 if delivered is None else delivered.crashes)

    def _on_abort(self, abort: Abort, _now: float) -> None:
        request = self._live.get(abort.request_id)
        if request is None or request.work.attempt <= abort.attempt:
            self._outbox.send_each("tokens", self._remove(abort.request_id, abort.attempt), abort)

    def _on_hand_over(self, hand_over: HandOver, _now: float) -> None:
        """Hands a request over to another group, unless this group has engines."""
        request = self._live.get(hand_over.request_id)
        waits = self._roll_call.complete and not self._epochs.running
        if request is not None and request.work.attempt == hand_over.attempt and waits:
            delivered = self._records.hand_over(request, self._planner.crashes_alone(request))
            self._outbox.send_each("recovery", self._records.tokenizers, delivered)
            self._drop(request, "handed_over")

    def _on_reset_cache(self, reset: ResetCache, _now: float) -> None:
        """Forgets cached prefixes by the next plan. Work that comes later is admitted by that plan,
        or by one after it; without an engine it is the first plan of the next epoch, which may
        begin with kept pages."""
        self._engine.slots.reset_cache()
        done = CacheReset(name=reset.name, gateway=reset.gateway, group=self.group)
        self._outbox.send("tokens", stage_id("detokenizer", reset.detokenizer), done)

    def _on_set_sleep(self, asked: SetSleep, now: float) -> None:
        if not asked.level:
            if self._epochs.sleep_level:
                self._epochs.wake_up()
            self._enqueue_deferred(self._sleep.wake_up())
            self._begin(now)
            return
        self._sleep.ask(asked)
        if self._sleep.falls and asked.mode == "abort":
            for request in [one for one in self._live if one.id not in self._sleep.deferred]:
                self._end_early(request, "aborted", "the server falls asleep")

    def _fall_asleep(self, now: float) -> None:
        """Ends the epoch and puts the ranks to sleep. Requests that hold slots go on at waking,
        with the tokens that they have."""
        self._enqueue_deferred(self._sleep.begin())
        self._epochs.sleep(self._sleep.level, self._sleep.refuses, now)
        lost, in_flight = self._engine.on_epoch_lost()
        self._planner.on_epoch_lost(lost, in_flight, not_request_fault=True)
        self._begin(now)

    def _enqueue_deferred(self, deferred: list[Request]) -> None:
        for request in deferred:
            self._planner.enqueue(request)

    def _on_asleep(self, asleep: Asleep, _now: float) -> None:
        self._epochs.on_asleep(asleep)

    def _on_done(self, done: Done, _now: float) -> None:
        by_detokenizer: dict[str, list[str]] = {}
        for request_id in done.request_ids:
            for to in self._remove(request_id):
                by_detokenizer.setdefault(to, []).append(request_id)
        for to, ids in by_detokenizer.items():
            self._outbox.send("tokens", to, Done(tuple(ids)))

    def _remove(self, request_id: str, attempt: float = inf) -> tuple[str, ...]:
        """Drops the request if it is live, whatever its attempt (callers have compared attempts),
        and notes that its attempts up to `attempt` are over. Returns the detokenizers that may have
        it."""
        request = self._live.get(request_id)
        if request is not None:
            self._drop(request, "aborted")
        known = self._records.on_ended(request_id, self._now, attempt)
        return known if request is None else (detokenizer_of(request),)

    def _on_stop_hit(self, hit: StopHit, _now: float) -> None:
        request = self._live.get(hit.request_id)
        if request is None or request.work.attempt != hit.attempt:
            return  # it ended by itself in the meantime; the client got the detokenizer's end
        if hit.length > len(request.outputs):
            return  # about rows of the previous scheduler: a detokenizer will send Delivered
        request.truncate(hit.length)
        self._drop(request, "stopped")
        self._records.add_finished(request, last_row(request, None))

    def _refuse(
        self,
        request: Request,
        status: int,
        message: str,
        param: str | None,
        code: str | None = None,
    ) -> None:
        self._drop(request, "refused")
        refused = refusal(request, status, message, param, code)
        self._outbox.send("tokens", detokenizer_of(request), refused)
        self._records.add_finished(request, refused)

    def _finish(self, request: Request, row: TokenRow, kind: FinishKind = "finished") -> None:
        self._outbox.row(request, row)
        self._drop(request, kind)
        self._records.add_finished(request, row)

    def _end_early(
        self, request: Request, kind: Literal["aborted", "failed", "timed_out"], message: str
    ) -> None:
        """Ends a live request before its output is complete, with finish "error" if it failed, else
        "abort"; the client keeps the output so far. message: for the client."""
        finish = "error" if kind == "failed" else "abort"
        self._finish(request, last_row(request, finish, message), kind)

    def _drop(self, request: Request, kind: FinishKind) -> None:
        """Ends a request in all containers; its slot is released with the next plan."""
        self.counts[kind] += 1
        self._sleep.deferred.pop(request.id, None)
        self._live.remove(request)
        self._planner.drop(request)
        self._takeover.on_finished(request, self._clock_time)

    # -------------------------------------------------------------------------------- recovery

    def _on_delivered(self, delivered: Delivered, _now: float) -> None:
        request = self._live.get(delivered.request_id)
        if request is not None and request.work.attempt >= delivered.attempt:
            self._resume(request, delivered)
            return
        abort = self._records.add_delivered(delivered, self._now)
        if abort is not None:
            self._outbox.send_each("tokens", self._records.detokenizers, abort)

    def _resume(self, request: Request, delivered: Delivered) -> None:
        """Continues after the output that the previous scheduler had delivered, or ends the request
        if that had ended."""
        if request.admission or request.work.attempt != delivered.attempt:
            return  # sent twice: it runs
        if not (delivered.ids or delivered.prompt_logprobs or delivered.ended):
            return
        self._planner.resume(request, delivered)
        if delivered.ended:
            self._drop(request, "finished")
            self._records.add_finished(
                request, last_row(request, delivered.finish, delivered.error)
            )
        elif self._epochs.running:
            self._fix_max_total(request)

    def _on_recover(self, recover: Recover, _now: float) -> None:
        known: list[Send] = []
        live = ((request, None) for request in self._live)
        for request, last in (*live, *self._records.finished.values()):
            if detokenizer_of(request) == recover.stage:
                known += self._outbox.all_of(request, last)
        self._outbox.add(bracketed_answer(self._roll_call.stage, recover, known))

    def _on_recovered(self, recovered: Recovered, _now: float) -> None:
        if self._roll_call.on_recovered(recovered):
            self._records.on_recovered(self._now)

    # ------------------------------------------------------------------------------ the engine

    def _on_hello(self, hello: Hello, now: float) -> None:
        if self._epochs.hello(hello):
            self._on_epoch_lost()
        if hello.sleep_level and not self._sleep.settled:  # put to sleep under a previous scheduler
            self._sleep.ask(SetSleep(hello.sleep_level, "keep", hello.refuses))
            self._fall_asleep(now)
        self._takeover.reached("restart", now)
        self._begin(now)

    def _begin(self, now: float) -> None:
        begin = self._epochs.begin(now)
        if begin is not None:
            self._outbox.send("plan", EVERYONE, begin)

    def _on_ready(self, ready: Ready, now: float) -> None:
        try:
            if not self._epochs.ready(ready):
                return
        except RanksDiverged as error:
            self._restart_ranks(str(error), now)
            return
        self._sleep.settled = True
        self._engine.begin()
        self._planner.begin(self._epochs.shape, self._epochs.incarnations, self._epochs.kept_pages)
        self._takeover.reached("begin", now)
        self.counts["epochs"] += 1
        for request in list(self._live):
            self._fix_max_total(request)

    def _fix_max_total(self, request: Request) -> None:
        """Sets the length limit of the request; ends the request if it has that length already, or
        could never fit."""
        try:
            request.max_total = max_total(request, self._epochs.shape)
        except TooLong as error:
            if request.outputs:  # the client has read some of the output
                self._end_early(request, "failed", str(error))
            else:
                self._refuse(request, 400, str(error), error.param)
            return
        if request.length >= request.max_total:
            self._finish(request, last_row(request, "length"))

    def _on_fault(self, fault: Fault, now: float) -> None:
        if not self._epochs.running or fault.epoch != self._epochs.epoch:
            return
        reason = f"rank {fault.rank}: {fault.reason}"
        if fault.orderly:
            self._epochs.end(reason)
            self._on_epoch_lost(not_request_fault=True)
        else:
            self._end_epoch(reason, now)

    def _on_missed_plan(self, missed: MissedPlan, now: float) -> None:
        """Publishes the missing plan and all later plans again, to all ranks. Ranks that have
        applied them ignore them (PlanFilter)."""
        if not self._epochs.running or missed.epoch != self._epochs.epoch:
            return
        plans = self._engine.published.since(missed.number)
        if not plans:
            reason = f"rank {missed.rank}: plan {missed.number} is missing and is not kept"
            self._end_epoch(reason, now, not_request_fault=True)
        for plan in plans:
            self._outbox.send("plan", EVERYONE, plan)
        self.counts["repeated_plans"] += len(plans)

    def _on_rank(self, status: RankStatus, now: float) -> None:
        if status.group == self.group:
            self._announcer.ranks.on_status(status, now)
            self._epochs.fenced.on_ended(status.rank, status.incarnation - 1)

    def _on_ended(self, ended: Ended, now: float) -> None:
        """The supervisor that reports the end restarts all ranks of its host; others follow."""
        ranks = self._announcer.ranks
        rank = self._announcer.engines.get(ended.stage)
        if rank is None:
            return
        ranks.on_ended(rank, ended, now)
        if self._epochs.has_joined(rank, ended.incarnation):
            reason = f"engine rank {rank}: {ended.reason}"
            self._epochs.restart_ranks(reason, now, ranks.alive(), ended.at)
            self._on_epoch_lost()
        self._epochs.fenced.on_ended(rank, ended.incarnation)

    def _end_epoch(self, reason: str, now: float, not_request_fault: bool = False) -> None:
        """Ends the epoch. With tp > 1 all ranks are restarted, because one of them may wait forever
        in a collective."""
        if self.options.tp > 1:
            self._restart_ranks(reason, now, not_request_fault)
            return
        self._epochs.end(reason)
        self._on_epoch_lost(not_request_fault)

    def _restart_ranks(self, reason: str, now: float, not_request_fault: bool = False) -> None:
        self._epochs.restart_ranks(reason, now, self._announcer.ranks.alive())
        self._on_epoch_lost(not_request_fault)
        self._publish_fault(reason)

    def _publish_fault(self, reason: str) -> None:
        fault = GroupFault(self.group, reason, self._epochs.fenced.to_kill)
        self._outbox.send("group", EVERYONE, fault)

    def _on_epoch_lost(self, not_request_fault: bool = False) -> None:
        lost, in_flight = self._engine.on_epoch_lost()
        self._takeover.begin(lost, self._clock_time)
        culprit = self._planner.on_epoch_lost(lost, in_flight, not_request_fault)
        if culprit is not None:
            self._end_early(culprit, "failed", "the engine crashed repeatedly on this request")

    def _on_grammar_compiled(self, compiled: GrammarCompiled, _now: float) -> None:
        for request in self._planner.on_grammar_compiled(compiled):
            self._without_grammar(request, compiled.error)

    def _on_adapter_loaded(self, loaded: AdapterLoaded, _now: float) -> None:
        """Takes a rank's answer to LoadAdapter. If loading failed: requests with output end with
        finish "error"; requests without output are refused with 400."""
        if not self._epochs.running or loaded.epoch != self._epochs.epoch:
            return
        for request in self._planner.on_adapter_loaded(loaded):
            if request.outputs:
                self._end_early(request, "failed", ADAPTER_ERROR + loaded.error)
            else:
                self._refuse(request, 400, ADAPTER_ERROR + loaded.error, "model", ADAPTER_CODE)

    def _on_admitted(self, admitted: Admitted, now: float) -> None:
        if not self._epochs.running or admitted.epoch != self._epochs.epoch:
            return
        try:
            self._engine.on_admitted(admitted)
        except InvalidReport as error:
            self._end_epoch(str(error), now, not_request_fault=True)

    def _on_result(self, result: Result, now: float) -> None:
        if not self._epochs.running or result.epoch != self._epochs.epoch:
            return
        try:
            for request, tokens, logprobs, trouble in self._engine.process_result(result):
                if trouble:
                    self._on_row_error(request, trouble)
                else:
                    if not request.outputs:
                        self._prefill_times.observe(now - request.admitted_at)
                    self._accept(request, tokens, logprobs)
        except (InvalidReport, RanksDisagree) as error:
            # a rank that answers has not crashed
            self._end_epoch(str(error), now, not_request_fault=True)

    def _on_digests(self, digests: Digests, now: float) -> None:
        if self._epochs.running and digests.epoch == self._epochs.epoch:
            try:
                self._engine.on_digests(digests)
            except RanksDisagree as error:
                self._end_epoch(str(error), now)

    def _on_prompt_logprobs(self, message: PromptLogprobs, now: float) -> None:
        if not self._epochs.running or message.epoch != self._epochs.epoch:
            return
        try:
            request = self._engine.in_flight.request_of_prompt_logprobs(message)
            if request is not None and request.add_prompt_logprobs(message.first, message.logprobs):
                self._outbox.add(self._outbox.prompt_logprobs(request, message.first))
        except (InvalidReport, ValueError) as error:
            self._end_epoch(str(error), now, not_request_fault=True)

    def _without_grammar(self, request: Request, why: str) -> None:
        """Ends a request whose grammar cannot be had: with output by finish "error"; without output
        it is refused, with 503 for NO_GRAMMAR_MEMORY, else 400.

        - why: reason, as engines report it
        """
        status = 503
        if why != NO_GRAMMAR_MEMORY:
            status, why = 400, GRAMMAR_ERROR + why
        if request.outputs:
            self._end_early(request, "failed", why)
        else:
            self._refuse(request, status, why, "structured_outputs")

    def _on_row_error(self, request: Request, trouble: str) -> None:
        """Ends a request of which a step could give no token."""
        if trouble == NO_GRAMMAR_MEMORY:
            self._without_grammar(request, trouble)
        elif trouble is BAD_LOGITS:
            request.bad_logits = True
            self.counts["bad_logits"] += 1
            self._end_early(request, "failed", trouble)
        else:
            self._end_early(request, "failed", GRAMMAR_ERROR + trouble)

    def _accept(self, request: Request, tokens: list[int], logprobs: bytes) -> None:
        offset = len(request.outputs)
        finish, stop_token = request.append(tokens, logprobs)
        self._planner.clear(request)
        if request.id in self._takeover.waiting:
            self._takeover.on_token(request, self._clock_time)
        if request.num_forced_ahead > 1 and finish is None:
            self._planner.on_known_ids(request)
        row = next_row(request, offset, finish, stop_token)
        if finish is None:
            self._outbox.row(request, row)
        else:
            self._finish(request, row)

    # ------------------------------------------------------------------------------- the clock

    def _on_tick(self, _tick: Tick, now: float) -> None:
        self._outbox.add(self._roll_call.ask(now))
        if self._roll_call.complete:
            for to, abort in self._records.take_orphaned(self._now):
                self._outbox.send("tokens", to, abort)
            for ended in self._records.take_unclaimed(self._now):
                self._outbox.send_each("recovery", self._records.tokenizers, ended)
        if self._announcer.ranks.check(now) and self._epochs.running and self.options.groups > 1:
            reason = f"an engine rank was not heard for {self.options.host_loss:g} s"
            self._end_epoch(reason, now, not_request_fault=True)  # another group may go on
        self._begin(now)
        if self._epochs.running and (probe := self._planner.probe(self._epochs.epoch, now)):
            self._publish(probe)
        for request in self._live.take_overdue(self._now):
            self._end_early(request, "timed_out", "the request's timeout is over")
        try:
            self._engine.in_flight.check(now, self.options.watchdog)
            if not self._announcer.ranks.asleep:
                self._epochs.check(now, self.options.watchdog)
        except (StepOverdue, RanksDiverged) as error:
            self._restart_ranks(str(error), now)
        if self._epochs.fenced.take_due(now):
            self._publish_fault(self._epochs.reason)
        self._outbox.add(self._announcer.take_due(self._group_readiness(), self._now, self.status))

    def _on_drain(self, _drain: Drain, now: float) -> None:
        if self._drain_state == "serving":
            self._drain_state, self._drains_since = "draining", now

    def _on_leave(self, _leave: Leave, _now: float) -> None:
        self._drain_state = "left"

    # -------------------------------------------------------------------------------- the loop

    def _publish_plans(self, now: float) -> None:
        """Publishes steps until enough are in flight or nothing is left to do."""
        while self._epochs.running and (plan := self._planner.plan(self._epochs.epoch, now)):
            self._publish(plan)
        if self._epochs.running:  # a plan may have found a request whose grammar is not compiled
            for message in self._planner.grammars_to_compile(now):
                self._outbox.send("plan", EVERYONE, message)
            for load in self._planner.adapters_to_load(self._epochs.epoch, now):
                self._outbox.send("plan", EVERYONE, load)

    def _publish(self, plan: Plan) -> None:
        self._engine.published.add(plan)
        self._outbox.send("plan", EVERYONE, plan)

    _handlers: ClassVar[dict[type[Message], Callable[..., None]]] = {
        TokenizedRequest: _on_work,
        Abort: _on_abort,
        Done: _on_done,
        StopHit: _on_stop_hit,
        HandOver: _on_hand_over,
        ResetCache: _on_reset_cache,
        SetSleep: _on_set_sleep,
        Hello: _on_hello,
        Asleep: _on_asleep,
        Ready: _on_ready,
        GrammarCompiled: _on_grammar_compiled,
        AdapterLoaded: _on_adapter_loaded,
        Admitted: _on_admitted,
        PromptLogprobs: _on_prompt_logprobs,
        Result: _on_result,
        Digests: _on_digests,
        Fault: _on_fault,
        MissedPlan: _on_missed_plan,
        RankStatus: _on_rank,
        Ended: _on_ended,
        Delivered: _on_delivered,
        Recover: _on_recover,
        Recovered: _on_recovered,
        Tick: _on_tick,
        Drain: _on_drain,
        Leave: _on_leave,
    }


class LiveRequests:
    """Requests that have not ended: by id, numbered as they came, each with its deadline.

    Attributes:
    - arrivals: number of requests so far
    """

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self.arrivals = 0
        self._deadlines = Deadlines()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __getitem__(self, request_id: str) -> Request:
        return self._requests[request_id]

    def get(self, request_id: str) -> Request | None:
        """The request; None if it is not live."""
        return self._requests.get(request_id)

    def new_request(self, work: TokenizedRequest, now: float, since: float) -> Request:
        """The next request, which is not live yet; times as for `request_of`."""
        self.arrivals += 1
        return request_of(work, self.arrivals, now, since)

    def add(self, request: Request) -> None:
        """Adds the request and its deadline."""
        self._requests[request.id] = request
        self._deadlines.set(request.id, request.deadline)

    def remove(self, request: Request) -> None:
        """Removes the request and its deadline. No-op for a request that was refused before
        `add`."""
        self._requests.pop(request.id, None)
        self._deadlines.remove(request.id)

    def take_overdue(self, now: float) -> Iterator[Request]:
        """Requests whose deadline has come, each once."""
        return (self._requests[name] for name in self._deadlines.take_due(now))


FinishKind = Literal[
    "finished",  # by a stop token or its length
    "stopped",  # by a stop string or undecodable output, which the detokenizer reported
    "timed_out",
    "failed",
    # By the client, with the gateway, because the server falls asleep (mode "abort"), because the
    # gateway began a newer attempt, or by a Done while the request was live.
    "aborted",
    "refused",
    "handed_over",  # to another group
]
# Accepted requests are live, or have ended in one of these ways; each is a statistic.
FINISH_KINDS: tuple[FinishKind, ...] = get_args(FinishKind)
