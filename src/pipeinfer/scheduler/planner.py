"""Turns requests into plans, one a call.

Composes a step by a policy, and writes it as a plan. SchedulerCore._publish_plans calls
Planner.plan in a loop and publishes the plans. SchedulerCore also reports when epochs begin and
end, and decides what becomes of a request's tokens. Knows no bus and no clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from pipeinfer.core import Histogram
from pipeinfer.messages import (
    AdapterLoaded,
    AppendTokens,
    CompileGrammar,
    Delivered,
    GrammarCompiled,
    Hello,
    LoadAdapter,
    Plan,
)
from pipeinfer.scheduler import policies
from pipeinfer.scheduler.drafting import Drafter
from pipeinfer.scheduler.engine_state import PageCredits, Slots, StepsInFlight
from pipeinfer.scheduler.policies import StepComposer
from pipeinfer.scheduler.queue import WaitingQueue
from pipeinfer.scheduler.recovery import Quarantine
from pipeinfer.scheduler.request import Request
from pipeinfer.step_cost import PrefillBudget, Targets, prefill_budget
from pipeinfer.wire import NO_DRAFTS, pack

MAX_DEFERRALS = 2  # deferrals of one request in a row, after which another request is preempted


DEFAULT_STEP_TOKENS = 2048


@dataclass(frozen=True)
class SchedulerOptions:
    """The scheduler's options, from the settings.

    Attributes:
    - policy: name of the scheduling policy
    - overlap_depth: most steps in flight
    - max_running: most requests with slots
    - max_step_tokens: most tokens of a step; 0: Hello.step_tokens of the engine, and
      DEFAULT_STEP_TOKENS if that is 0
    - watchdog: seconds without a result after which a rank hangs
    - tp: ranks of the group
    - mixed_step_tokens: token budget of a step that also decodes, if the policy mixes; 0: see
      step_cost.py
    - groups: data-parallel groups of the deployment
    - targets: latency targets, see step_cost.py
    - shares_prefixes: whether a prefix cache exists, so that requests wait for a prompt, or its
      beginning, that another request computes
    - least_shared_tokens: shortest beginning of a prompt for which requests wait
    - host_loss: seconds of silence after which a rank counts as lost
    - max_loras: slots for adapters; 0: there are none
    - drafts_always: requests draft whatever their text is
    """

    policy: str = "mixed"
    overlap_depth: int = 2
    max_running: int = 256
    max_step_tokens: int = DEFAULT_STEP_TOKENS
    watchdog: float = 120.0
    tp: int = 1
    mixed_step_tokens: int = 0
    groups: int = 1
    targets: Targets = field(default_factory=Targets)
    shares_prefixes: bool = True
    least_shared_tokens: int = 64
    host_loss: float = inf
    max_loras: int = 0
    drafts_always: bool = False

    def prefix_block_size(self, page_size: int) -> int:
        """Tokens of the blocks, whole pages, by which beginnings of prompts are compared; 0: they
        are not."""
        return -(-self.least_shared_tokens // page_size) * page_size if self.shares_prefixes else 0


class Planner:
    """Plans of one group. Raises ConfigurationError for an unknown policy.

    Gives slots of `slots` to requests, and adds each plan that it makes to `steps_in_flight`. Both
    belong to EngineState, which takes the engines' reports of them.

    Attributes, for the statistics:
    - counts: counters by name
    - prefill_allowed: tokens of prompts in a step, and tokens a second, within --itl-target, see
      PrefillBudget
    - queue_times: seconds from a request's arrival to its first slot
    """

    def __init__(
        self, options: SchedulerOptions, slots: Slots, steps_in_flight: StepsInFlight
    ) -> None:
        self._slots = slots
        self._steps_in_flight = steps_in_flight
        counted = "plans", "planned_tokens", "jumped_tokens", "preemptions"
        self.counts: dict[str, int] = dict.fromkeys(counted, 0)
        self.queue_times = Histogram()
        self._options = options
        self._policy = policies.create(options.policy)
        self._max_tokens = 0  # most tokens of a step in this epoch
        self._keeps_pages = False  # whether the epoch began with pages that were computed before it
        self._prefill_budget = PrefillBudget(0)
        self.prefill_allowed = (0, 0.0)
        self._drafter = Drafter()
        if options.drafts_always:
            self._drafter.min_rate = 0.0
        self._queue = WaitingQueue(options.tp, options.max_loras)
        self._quarantine = Quarantine()
        # whether the last step was of the requests that are no suspects
        self._turn_of_others = False
        self._number = 0

    def begin(self, hello: Hello, incarnations: Sequence[int], kept_pages: int = 0) -> None:
        """An epoch begins.

        - hello: limits of the engines
        - incarnations: of the engine processes, rank 0 first
        - kept_pages: pages that their prefix caches have already
        """
        self._keeps_pages = kept_pages > 0
        self._queue.begin(incarnations, self._options.prefix_block_size(hello.page_size))
        self._max_tokens = self._options.max_step_tokens or hello.step_tokens or DEFAULT_STEP_TOKENS
        step_tokens = self._options.mixed_step_tokens
        targets = self._options.targets
        self._prefill_budget = prefill_budget(
            step_tokens, self._max_tokens, hello.step_cost, targets
        )
        self.prefill_allowed = self._prefill_budget.within_itl_target()
        slots = min(hello.max_slots, self._options.max_running, self._max_tokens)
        self._slots.begin(slots, PageCredits(hello.page_size, hello.pages))
        self._drafter.begin(hello.max_drafts, hello.max_draft_rows, hello.draft_model)
        self._number = 0

    def on_epoch_lost(
        self, requests: Sequence[Request], in_flight: Sequence[Request], not_request_fault: bool
    ) -> Request | None:
        """The epoch is over. Returns a request that must fail because of it, or None.

        Requests in flight at two losses without a token in between become suspects (quarantine).
        All other requests return to the queue with the tokens that they have. After a first loss no
        request is a suspect.

        - requests: requests that had slots
        - in_flight: requests with a step in flight, which may have ended the epoch
        - not_request_fault: the loss has another cause, so no request becomes a suspect by it
        """
        suspects = [r for r in in_flight if r.phase == "lost" and not not_request_fault]
        culprit = self._quarantine.on_epoch_lost(suspects)
        for request in requests:
            # The request under test may have had a slot and no part in the last step.
            if request is not culprit and request.phase == "lost":
                self._queue.push(request)
        return culprit

    def enqueue(self, request: Request, crashes: int = -1) -> None:
        """Takes a request that is to get a slot.

        - crashes: -1: the request is no suspect. Else another group lost its engine to this request
          or to others, `crashes` times with this one alone: it waits in the quarantine
        """
        if crashes >= 0:
            self._quarantine.add(request, crashes)
        else:
            self._queue.push(request)

    def resume(self, request: Request, delivered: Delivered) -> None:
        """Continues `request`, which was never admitted here, after the output that another
        scheduler had delivered; in the queue it moves forward."""
        waits = request.phase == "waiting"
        if waits:
            self._queue.take_out(request)
        request.resume(delivered)
        if waits:
            self._queue.put_in(request)

    def drop(self, request: Request) -> None:
        """Ends a request in every container. If it has a slot, the next plan that is published
        releases the slot: at once, or when a step in flight has ended, or when a suspect has run
        alone."""
        phase = request.phase
        # before its release, which depends on whether it is over or preempted
        request.move("finished")
        if phase == "running":
            self._slots.release(request)
        elif phase == "waiting":
            self._queue.remove(request)
        elif phase == "quarantined":
            self._quarantine.remove(request)
        if phase in ("quarantined", "waiting_for_grammar"):
            self._queue.grammars.remove(request)
        self._queue.adapters.release(request)
        self._queue.on_finished(request, phase == "running")

    def grammars_to_compile(self, now: float) -> Iterator[CompileGrammar]:
        """The messages that ask engines for grammars, as far as they are due at `now` (seconds)."""
        return self._queue.grammars.take_due(now)

    def on_grammar_compiled(self, compiled: GrammarCompiled) -> list[Request]:
        """Takes a rank's answer to CompileGrammar. Requests that waited for the grammar go on; if
        it cannot be had, they are returned."""
        free = self._queue.grammars.on_grammar_compiled(compiled)
        if compiled.error:
            return free
        for request in free:
            if request.phase == "waiting_for_grammar":  # suspects wait in the quarantine
                self._queue.push(request)
        return []

    def adapters_to_load(self, epoch: int, now: float) -> Iterator[LoadAdapter]:
        """The messages that ask engines of `epoch` for adapters, as far as they are due at `now`
        (seconds)."""
        return self._queue.adapters.take_due(epoch, self._number, now)

    def on_adapter_loaded(self, loaded: AdapterLoaded) -> list[Request]:
        """Takes a rank's answer to LoadAdapter. Requests that waited for the adapter go on with the
        next plan; if it cannot be had, they are returned."""
        return self._queue.adapters.on_loaded(loaded)

    @property
    def waiting_for_adapter(self) -> int:
        """Number of requests that wait for their adapter."""
        return len(self._queue.adapters)

    @property
    def waiting_for_grammar(self) -> int:
        """Number of requests that wait for their grammar."""
        return len(self._queue.grammars)

    @property
    def waiting_for_prefix(self) -> int:
        """Number of requests that wait for the prompt of another request."""
        return self._queue.waiting_for_prefix

    @property
    def quarantined(self) -> int:
        """Number of requests that may have crashed an engine."""
        return len(self._quarantine)

    def crashes_alone(self, request: Request) -> int:
        """Number of engines that crashed while they ran `request` alone; -1 if it was in flight at
        no loss, or has had a token since."""
        return self._quarantine.crashes_alone(request)

    def clear(self, request: Request) -> None:
        """Clears `request`, which has produced a token, of the suspicion that it crashes
        engines."""
        self._quarantine.clear(request)

    def on_known_ids(self, request: Request) -> None:
        """The grammar forced ids beyond what the steps in flight compute; the request may jump
        forward."""
        if request.phase == "running":
            self._slots.forced_ahead[request.id] = request

    def take_number(self) -> int:
        """Returns the number of the next plan, and counts on."""
        self._number += 1
        return self._number - 1

    def plan(self, epoch: int, now: float) -> Plan | None:
        """Composes and writes the next step. None if `overlap_depth` steps are in flight, nothing
        is left to do, or a request under test has to run alone and a step is still in flight.

        The scheduler's state advances at once, as if the plan had been computed: composing takes
        admitted requests off the queue; writing fills and empties slots, and advances
        `Request.projected` of the rows. The pages that the plan may take stay reserved until the
        engine reports its page counts after this plan or a later one (Admitted or Result). So the
        caller publishes the plan that this returns.

        Unless `overlap_depth` steps are in flight, requests that no longer wait for a prompt, for
        masks or for an adapter have moved into the queue, even if None is returned.
        """
        if len(self._steps_in_flight) >= self._options.overlap_depth:
            return None
        slots, queue = self._slots, self._queue
        queue.requeue_unblocked(slots.running.values())
        for request in queue.adapters.take_ready():
            queue.push(request)
        mask_budget = queue.grammars.mask_budget
        while request := mask_budget.take_next(len(slots.running) + len(queue)):
            queue.push(request)
        composer = StepComposer(
            slots,
            queue,
            max_tokens=self._max_tokens,
            prefill_budget=self._prefill_budget,
            now=now,
            nothing_in_flight=not len(self._steps_in_flight),
            keeps_pages=self._keeps_pages,
            drafter=self._drafter,
        )
        if not self._compose(composer):
            return None
        if not composer.rows and not composer.preempted and not slots.releasing:
            return None
        return self._write(composer, epoch, now)

    def probe(self, epoch: int, now: float) -> Plan | None:
        """Returns an empty plan if a result is late, else None. A rank that missed earlier plans
        notices that by the probe, and asks for them; if a result was lost, the probe's result comes
        in its place, which ends the epoch. Otherwise the probe has no effect."""
        if not self._steps_in_flight.take_probe_due(now):
            return None
        number = self.take_number()
        self._steps_in_flight.add(number, [], now)
        self._slots.credits.reserve(number, 0)
        return Plan(epoch=epoch, number=number, releases=(), admits=(), slots=b"", counts=b"")

    def _compose(self, composer: StepComposer) -> bool:
        """Composes the step; False if the steps in flight must report first.

        Order: first requests that were admitted here before (lost with an epoch, or preempted),
        then suspects alternating with others, then new requests. So requests that never had a slot
        here (`admission` 0) do not delay suspects, even if they continue from another scheduler or
        group.
        """
        head = self._queue.head()
        if self._quarantine.under_test or (
            self._quarantine and (head is None or not head.admission)
        ):
            suspect = self._quarantine.next()
            if suspect is not None and not self._waits_for_engines(suspect):
                if len(self._steps_in_flight):
                    return False  # the suspect runs alone, with no other step in flight
                self._compose_under_test(suspect, composer)
                return True
        self._compose_all(composer)
        return True

    def _waits_for_engines(self, candidate: Request) -> bool:
        """Whether engines have still to compile the candidate's grammar or load its adapter, for
        which they are asked; other requests go on meanwhile."""
        if candidate.phase != "quarantined":
            return False
        there = self._queue.grammars.ensure_grammar(candidate)
        return not self._queue.adapters.ensure_adapter(candidate) or not there

    def _compose_under_test(self, candidate: Request, composer: StepComposer) -> None:
        """Composes a step of the candidate alone or of all other requests, alternately; the others
        do not wait for the candidate's prompt.

        When pages run short the candidate comes first, and requests that hold pages are preempted
        for it.
        """
        pages_short = any(request.deferrals for request in self._slots.running.values())
        self._turn_of_others = not (self._turn_of_others or pages_short)
        if candidate.deferrals:
            composer.preempt_for(candidate)
        if self._turn_of_others:
            composer.leave_out(candidate)
            self._compose_all(composer)
        if not composer.rows:
            composer.run_alone(candidate)

    def _compose_all(self, composer: StepComposer) -> None:
        """Composes a step of all running requests, by the policy."""
        if any(request.deferrals >= MAX_DEFERRALS for request in self._slots.running.values()):
            composer.preempt_one()
        running = self._slots.running.values()
        if out := self._queue.grammars.mask_budget.over_budget(running):
            composer.leave_out(*out)
        self._policy.compose(composer)

    def _write(self, composer: StepComposer, epoch: int, now: float) -> Plan:
        """Writes the plan: releases, admits, appends and rows. Preempts, gives out slots, and
        counts tokens, pages and mask units as used."""
        # Order matters: preempt, then collect releases (their slots become free), then find prefix
        # sources (they must still run), then admit.
        for request in composer.preempted:
            self._preempt(request)
        releases = self._slots.take_releases()
        prefix_sources = self._slots.prefix_source_slots(composer.admitted)
        admits = self._slots.admit(composer.admitted)
        for request in composer.admitted:
            if request.admission == 1:
                request.admitted_at = now
                self.queue_times.observe(now - request.arrived_at)
        # Without the rows of requests that were preempted later in this composition.
        rows = [(request, count) for request, count in composer.rows if request.phase == "running"]
        appends: tuple[AppendTokens, ...] = ()
        if self._slots.forced_ahead:
            jumps = [(request, count) for request, count in rows if composer.jumps(request, count)]
            self.counts["jumped_tokens"] += sum(count - 1 for _, count in jumps)
            appends = self._slots.extend(jumps)
        slots, counts = pack([r.slot for r, _ in rows]), pack([count for _, count in rows])
        number = self.take_number()
        # Projects the requests.
        planned_tokens = self._steps_in_flight.add(number, rows, now, composer.drafts)
        drafts, ends = _drafts_and_ends(
            [request for request, _ in rows], self._steps_in_flight.newest_drafts()
        )
        self.counts["planned_tokens"] += planned_tokens
        self._slots.credits.reserve(number, composer.pages.taken)
        self._queue.grammars.mask_budget.spend(rows, self._slots.running.values())
        self.counts["plans"] += 1
        return Plan(
            epoch=epoch,
            number=number,
            releases=releases,
            admits=admits,
            slots=slots,
            counts=counts,
            reset=self._slots.take_reset(number),
            appends=appends,
            cache_slots=prefix_sources,
            drafts=drafts,
            ends=ends,
        )

    def _preempt(self, request: Request) -> None:
        self._slots.release(request, count_pages=False)  # the composer has counted them
        request.deferrals = 0
        self._queue.push(request)
        self.counts["preemptions"] += 1


def _drafts_and_ends(requests: Sequence[Request], drafts: Mapping[int, int]) -> tuple[bytes, bytes]:
    """Plan.drafts and Plan.ends of the rows of `requests`, whose projection includes this plan;
    empty if there are no drafts.

    - drafts: by slot, see StepInFlight
    """
    if not drafts:
        return b"", b""
    return (
        pack([drafts.get(r.slot, NO_DRAFTS) for r in requests]),
        pack([r.projected if r.slot in drafts else 0 for r in requests]),
    )
