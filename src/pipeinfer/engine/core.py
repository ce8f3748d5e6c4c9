"""The engine's core: plans in, steps for the device and results for the scheduler out.

Keeps the order of plans and the epoch. Uses no socket, no clock, no model and no torch; decides
nothing about which requests run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

import msgspec
import numpy as np

from pipeinfer.core import (
    LOCAL,
    STEP_TOKENS,
    Compiled,
    Drain,
    GraphDue,
    Histogram,
    Leave,
    NewEpoch,
    PagesNote,
    PlanFilter,
    Send,
    SendFailed,
    StepDone,
    StepNote,
    Tick,
    step_note,
)
from pipeinfer.engine.step_builder import RequestTable, StepBuilder
from pipeinfer.memory.manager import MemoryManager, Rows
from pipeinfer.memory.page_directory import DIGEST_BYTES, PageChains
from pipeinfer.memory.pages import IntegrityError, ProtocolError
from pipeinfer.messages import (
    AdapterLoaded,
    Admitted,
    Asleep,
    BeginEpoch,
    CompileGrammar,
    Digests,
    Fault,
    GrammarCompiled,
    Hello,
    LoadAdapter,
    Message,
    MissedPlan,
    Plan,
    PromptLogprobs,
    Ready,
    Result,
    Sleep,
    State,
    num_ids,
)
from pipeinfer.params import StructuredOutputs
from pipeinfer.step import PromptLogprobChunk, Step
from pipeinfer.wire import (
    COUNT_OF_ONE,
    LOGPROBS_PER_MESSAGE,
    NO_DRAFTS,
    logprob_bytes,
    pack,
    unpack,
)


class Compute(Message, frozen=True):
    """Command to the device: compute `step` after all steps before it, then report the end by
    StepDone.

    Local only: the arrays never travel.
    """

    step: Step

    def note(self) -> StepNote:
        """Summary of the step for a recording, in place of the arrays."""
        return step_note(self.step)


class Compile(Message, frozen=True):
    """Command to the device: compile the grammar `spec`, then report Compiled(request_id).

    Attributes:
    - request_id: request that waits for the grammar
    - spec: the grammar
    - slow: as in CompileGrammar
    - released: slots whose grammars can be freed now; only sent while no step is in flight
    """

    request_id: str
    spec: StructuredOutputs
    slow: bool = False
    released: tuple[int, ...] = ()


class AdapterRead(Message, frozen=True):
    """Event from the device: LoadAdapter `number` of `epoch` was done.

    Attributes:
    - epoch, number: of the LoadAdapter
    - error: "": all later steps can use the adapter; else why it could not be loaded
    """

    epoch: int
    number: int
    error: str = ""


class Capture(Message, frozen=True):
    """Command to the device: capture the next deferred CUDA graph; later steps may use it."""


class InvalidatePages(Message, frozen=True):
    """Command to the device: remove `pages` from the page directory. Precedes the Compute of the
    same plan, if the plan has one.

    Local only: the arrays never travel.

    Attributes:
    - pages: int32 [n]
    """

    pages: np.ndarray

    def note(self) -> PagesNote:
        """Summary of the pages for a recording: how many there are."""
        return PagesNote(len(self.pages))


class FillPages(Message, frozen=True):
    """Command to the device: record `chains` in the page directory; a step that has ended has
    filled these pages.

    Local only: the arrays never travel.
    """

    chains: PageChains

    def note(self) -> PagesNote:
        """Summary of the pages for a recording: how many there are."""
        return PagesNote(len(self.chains))


class MarkPagesUnusable(Message, frozen=True):
    """Command to the device: make the page directory unusable until the next epoch begins it anew,
    because this engine has found an error of its own.
    """


class Suspend(Message, frozen=True):
    """Command to the device: when no step is in flight, give memory back as Sleep(level) asks for,
    then report Suspended. The device may sleep at a lower level already.

    Attributes:
    - level: of sleep, as in Sleep
    - refuses: as in Sleep; noted for the engine that replaces this one
    """

    level: int
    refuses: bool = False


class Suspended(Message, frozen=True):
    """Event from the device: memory was given back as Suspend(level) asks for. Sent without a
    Suspend when the process starts and the engine before it was asleep.

    Attributes:
    - level, refuses: of the Suspend
    - error: "" or why memory could not be given back
    """

    level: int
    error: str = ""
    refuses: bool = False


class Resume(Message, frozen=True):
    """Command to the device: take back all memory that was given back, at the same addresses and
    with pages of zeros, then report Resumed.
    """


class Resumed(Message, frozen=True):
    """Event from the device: steps can be computed again, or cannot because of `error`."""

    error: str = ""


class FindPages(Message, frozen=True):
    """Command to the device: an epoch begins; answer FoundPages with the content of the page
    directory.
    """


class FoundPages(Message, frozen=True):
    """Event from the device: pages that were computed before the epoch that begins, by this process
    or by an earlier one, and that are verified on all ranks. See PageChains.

    Attributes:
    - pages, depths, ids: int32 bytes
    - digests, parents, salts: 16 bytes of each page
    """

    pages: bytes
    depths: bytes
    digests: bytes
    parents: bytes
    salts: bytes
    ids: bytes

    @staticmethod
    def of(chains: PageChains) -> FoundPages:
        """Returns the message with the arrays of `chains`."""
        arrays = (chains.digests, chains.parents, chains.salts)
        digests, parents, salts = (array.tobytes() for array in arrays)
        pages, depths, ids = map(pack, (chains.pages, chains.depths, chains.ids))
        return FoundPages(pages, depths, digests, parents, salts, ids)

    def chains(self, page_size: int) -> PageChains:
        """Returns the arrays of the message."""
        digests, parents, salts = (
            np.frombuffer(raw, np.uint8).reshape(-1, DIGEST_BYTES)
            for raw in (self.digests, self.parents, self.salts)
        )
        ids = unpack(self.ids).reshape(-1, page_size)
        return PageChains(unpack(self.pages), unpack(self.depths), digests, parents, salts, ids)


class StepFailed(Message, frozen=True):
    """Event from the device: step `number` raised an error; the content of the device's memory is
    unknown.
    """

    epoch: int
    number: int
    reason: str


DIGESTS = 32  # plans whose digests a rank above 0 sends in one message

Span = Callable[[str, int], AbstractContextManager[None]]  # (phase, step number), for observers


def unobserved(phase: str, number: int) -> AbstractContextManager[None]:
    """The span of an engine without an observer: measures nothing."""
    return nullcontext()


class DeviceError(RuntimeError):
    """The process must end: a restarted engine computes everything again."""


@dataclass
class _Drafted:
    """A request in a slot whose draft tokens are verified.

    Attributes:
    - computed: tokens of the request that are computed, as far as steps have ended. Steps end in
      the order of their plans, so each step starts there
    """

    computed: int


@dataclass
class _InFlight:
    """A plan whose result is not sent yet.

    Attributes:
    - rows: of the plan
    - plan_rows: int64 [L], the row of the plan that each row of logits belongs to
    - logprob_sizes: see Step.logprob_sizes
    - prompt_logprob_chunks: prompt tokens whose log-probs are asked for
    - drafted: by row of the plan, the requests whose drafts are verified, or were in earlier steps
    - done: the device's result, once it has arrived
    """

    rows: Rows
    plan_rows: np.ndarray
    logprob_sizes: np.ndarray | None = None
    prompt_logprob_chunks: tuple[PromptLogprobChunk, ...] = ()
    drafted: dict[int, _Drafted] = field(default_factory=dict[int, _Drafted])
    done: StepDone | None = None


@dataclass
class _Epoch:
    """An epoch that this rank takes part in.

    Attributes:
    - number: of the epoch
    - plans: filter of plans that were applied
    - in_flight: plans without a result, oldest first
    - digests: of the latest plans, not sent yet
    - drafted: by slot, requests that have had drafts
    """

    number: int
    plans: PlanFilter = field(default_factory=PlanFilter)
    in_flight: deque[_InFlight] = field(default_factory=deque[_InFlight])
    digests: list[int] = field(default_factory=list[int])
    drafted: dict[int, _Drafted] = field(default_factory=dict[int, _Drafted])

    def take_drafted(self, rows: Rows) -> dict[int, _Drafted]:
        """Returns _InFlight.drafted of the plan that was just applied."""
        if rows.drafts is None:
            return {}
        for slot, computed in rows.first_drafts.items():
            self.drafted[slot] = _Drafted(computed)
        slots: list[int] = rows.slots.tolist()
        return {
            row: self.drafted[slots[row]]
            for row in np.flatnonzero(rows.drafts != NO_DRAFTS).tolist()
        }


class SleepState:
    """Whether this rank's device has given its memory back, and the transition under way.

    Attributes:
    - level: reached level of sleep; 0: not asleep yet
    - doing: "", "suspending" or "resuming"; one transition at a time
    - heard: the current scheduler has sent Sleep to this rank
    - refuses: whether new requests are refused while the rank sleeps
    """

    def __init__(self) -> None:
        self.level = 0
        self.doing: Literal["", "suspending", "resuming"] = ""
        self.heard = self.refuses = False

    @property
    def awake(self) -> bool:
        """Whether an epoch may begin."""
        return not self.level and not self.doing

    def suspend(self, level: int, refuses: bool) -> bool:
        """Whether the device must give memory back now; notes the transition as begun if so."""
        if self.doing or (level <= self.level and refuses == self.refuses):
            return False
        self.doing = "suspending"
        return True

    def suspended(self, level: int, refuses: bool) -> None:
        """The device has given its memory back."""
        self.doing, self.level, self.refuses = "", level, refuses

    def resume(self) -> bool:
        """Whether the device must take its memory back now; notes the transition as begun if so."""
        if self.doing:
            return False
        self.doing = "resuming"
        return True

    def resumed(self) -> None:
        """The device has its memory back."""
        self.doing, self.level = "", 0
        self.heard = self.refuses = False

    def in_hello(self, hello: Hello) -> Hello:
        """Returns `hello` with the state of sleep, for a scheduler that replaces the one which has
        put this rank to sleep.
        """
        if not self.level:
            return hello
        return msgspec.structs.replace(hello, sleep_level=self.level, refuses=self.refuses)


class EngineCore:
    """The core of one rank. `hello` introduces it to the stage `scheduler` and describes `memory`;
    ValueError if the two differ (`hello.pages` leaves out the dummy page, which holds no tokens).

    Every rank sends Hello, Ready, MissedPlan and Fault; only rank 0 sends Admitted and Result, the
    others Digests instead. The output does not depend on `span`, which is around the building of
    each step, nor on `shares`: whether attention reads common prefixes of decode rows once (cascade
    attention).
    """

    def __init__(
        self,
        hello: Hello,
        scheduler: str,
        memory: MemoryManager,
        span: Span = unobserved,
        shares: bool = False,
    ) -> None:
        described = (hello.pages, hello.page_size, hello.max_slots, hello.max_model_len)
        if described != memory.shape:
            raise ValueError(
                f"hello says {described} pages, page_size, max_slots, max_model_len; "
                f"the memory has {memory.shape}"
            )
        self.hello = hello
        self.scheduler = scheduler
        self.memory = memory
        self._span = span
        self._requests = RequestTable(hello.max_slots, keeps_token_ids=hello.max_drafts > 0)
        self._steps = StepBuilder(memory, self._requests, shares)
        self._epoch: _Epoch | None = (
            None  # None: waiting for a BeginEpoch that lists this incarnation
        )
        self._beginning: int | None = None  # an epoch that waits for FoundPages
        self._sleep = SleepState()
        self._reason = "waiting for the scheduler"
        self._draining = self._leaving = False
        self._unchecked = False  # plans came since memory was last checked in full
        self._step_tokens = Histogram(STEP_TOKENS)
        self._totals = dict.fromkeys(
            (
                "plans_total",
                "plans_dropped_total",
                "steps_total",
                "rows_total",
                "rows_deferred_total",
                "prompt_tokens_total",
                "cached_tokens_total",
                "computed_tokens_total",
                "sampled_tokens_total",
                "bad_rows_total",
                "refused_rows_total",
                "faults_total",
            ),
            0,
        )

    def handle(self, event: Message, now: float) -> list[Send]:
        """Handles what the scheduler publishes (BeginEpoch, CompileGrammar, LoadAdapter, Plan),
        what this process reports (StepDone, StepFailed, Compiled, AdapterRead, GraphDue) and the
        shell's events; returns the messages to send, also on LOCAL.
        """
        match event:
            case Plan():
                with self._span("plan", event.number):
                    return self._on_plan(event)
            case StepDone():
                return self._on_step_done(event)
            case CompileGrammar():
                return [Send(LOCAL, "", self._compile(event))]
            case Compiled():
                return [self._on_compiled(event)]
            case LoadAdapter():
                return self._load_adapter(event)
            case AdapterRead():
                return [self._on_adapter_read(event)]
            case GraphDue():
                return [Send(LOCAL, "", Capture())]
            case BeginEpoch():
                return self._begin(event)
            case Sleep():
                return self._fall_asleep(event)
            case Suspended() | Resumed():
                return self._on_sleep_done(event)
            case FoundPages():
                return self._on_found_pages(event)
            case Tick():
                return self._tick()
            case Drain():
                self._draining = True
                return []
            case Leave():
                self._leaving = True
                return self._leave_epoch()
            case NewEpoch():
                return self._new_epoch()
            case StepFailed():
                raise DeviceError(f"step {event.number} of epoch {event.epoch}: {event.reason}")
            case SendFailed():
                return []
            case _:
                raise TypeError(f"an engine takes no {type(event).__name__}")

    def state(self) -> tuple[State, str]:
        """The state (waiting, ready, asleep or draining) and the reason for it."""
        if self._draining or self._leaving:
            return "draining", ""
        if self._sleep.level:
            waking = self._sleep.doing == "resuming"
            return "asleep", "wakes up" if waking else f"level {self._sleep.level}"
        return ("ready", "") if self._epoch is not None else ("waiting", self._reason)

    def idle(self) -> bool:
        """Whether no step is in flight and no request is admitted that this process is to
        compute.
        """
        if self._epoch is None:
            return True
        busy = self._epoch.in_flight or (not self._leaving and self.memory.slots.active.any())
        return not busy

    def stats(self) -> dict[str, float]:
        """Numbers of pages and slots as of now; `pages_evicted` since the epoch began, totals since
        the process started.
        """
        memory = self.memory
        return {
            "pages_total": memory.allocator.num_pages,
            "pages_free": memory.num_free,
            "pages_evictable": memory.num_evictable,
            "pages_evicted": memory.num_evicted,
            "page_tokens": memory.page_size,
            "kv_fp8": int(self.hello.kv_dtype == "fp8_e4m3"),
            "slots_total": memory.slots.num_slots,
            "slots_used": int(np.count_nonzero(memory.slots.active)),
            "sleep_level": self._sleep.level,
            "sleep_refuses": int(self._sleep.refuses),
            "steps_in_flight": 0 if self._epoch is None else len(self._epoch.in_flight),
            **self._totals,
            **self._step_tokens.statistics("step_tokens"),
        }

    # ---------------------------------------------------------------------------------------- epoch

    def _begin(self, begin: BeginEpoch) -> list[Send]:
        if self._leaving:
            return []
        if self.hello.incarnation not in begin.incarnations:
            # Another rank's epoch, or a scheduler that asks which ranks exist: both end this rank's
            # epoch.
            self._stop(f"epoch {begin.epoch} began without this engine")
            self._sleep.heard = False
            return []
        if not self._sleep.awake:
            return [Send(LOCAL, "", Resume())] if self._sleep.resume() else []
        epoch = self._epoch
        if epoch is not None and begin.epoch == epoch.number and epoch.plans.expected > 0:
            plans = epoch.plans.expected
            return self._fault(f"epoch {begin.epoch} began again after {plans} plans")
        self._stop("")
        if self.memory.chains is None:
            return self._begin_with(begin.epoch, None)
        self._beginning = begin.epoch
        return [Send(LOCAL, "", FindPages())]

    def _fall_asleep(self, sleep: Sleep) -> list[Send]:
        """Ends the epoch and asks the device to sleep; the device ends steps in flight first."""
        if self._leaving or self.hello.incarnation not in sleep.incarnations:
            return []
        if self._epoch is not None or self._beginning is not None:
            self._stop("falls asleep")
        self._sleep.heard = True
        if self._sleep.suspend(sleep.level, sleep.refuses):
            level = max(sleep.level, self._sleep.level)
            return [Send(LOCAL, "", Suspend(level, sleep.refuses))]
        return self._asleep()

    def _on_sleep_done(self, event: Suspended | Resumed) -> list[Send]:
        if event.error:
            raise DeviceError(event.error)
        match event:
            case Suspended():
                self._sleep.suspended(event.level, event.refuses)
                return self._asleep()
            case Resumed():
                self._sleep.resumed()
                return []  # BeginEpoch comes again

    def _asleep(self) -> list[Send]:
        state, hello = self._sleep, self.hello
        if not state.level or state.doing or not state.heard:
            return []
        asleep = Asleep(state.level, hello.rank, hello.incarnation, state.refuses)
        return [self._to_scheduler(asleep)]

    def _on_found_pages(self, found: FoundPages) -> list[Send]:
        if self._beginning is None:
            return []  # the epoch was called off meanwhile
        return self._begin_with(self._beginning, found.chains(self.memory.page_size))

    def _begin_with(self, number: int, found: PageChains | None) -> list[Send]:
        self._beginning = None
        self.memory.reset(found)
        self._requests.drop_all_grammars()
        self._epoch = _Epoch(number)
        return self._ready(self._epoch)

    def _ready(self, epoch: _Epoch) -> list[Send]:
        hello, steps = self.hello, self._totals["steps_total"]
        return [
            self._to_scheduler(
                Ready(
                    epoch=epoch.number,
                    rank=hello.rank,
                    incarnation=hello.incarnation,
                    steps=steps,
                    kept_pages=self.memory.num_evictable,
                )
            )
        ]

    def _tick(self) -> list[Send]:
        if self._epoch is None:
            if self._leaving or self._sleep.heard:
                return []
            return [self._to_scheduler(self._sleep.in_hello(self.hello))]
        if self._epoch.digests and not self._epoch.in_flight:
            return self._send_digests(self._epoch)  # nothing may follow for long
        if self._unchecked and self.idle():
            # The whole walk takes too long while requests run, and nothing when none do.
            self._unchecked = False
            try:
                self.memory.check_integrity()
            except IntegrityError as error:
                return self._fault(f"found when idle: {error}", mark_unusable=True)
        return []

    def _stop(self, reason: str) -> None:
        """Leaves the epoch. Steps on the device go on; their StepDone is dropped because its epoch
        is over, and what they write is ordered before all that a later epoch computes.
        """
        self._epoch = self._beginning = None
        self._reason = reason

    def _fault(self, reason: str, orderly: bool = False, mark_unusable: bool = False) -> list[Send]:
        """Leaves the epoch, and sends Fault.

        - orderly: the fault was asked for and is no error
        - mark_unusable: the content of the pages is unknown, so the page directory must not be used
        """
        message = self._fault_message(reason, orderly)
        self._stop(reason)
        if mark_unusable and self.memory.chains is not None:
            return [Send(LOCAL, "", MarkPagesUnusable()), message]
        return [message]

    def _fault_message(self, reason: str, orderly: bool) -> Send:
        assert self._epoch is not None
        self._totals["faults_total"] += 1
        fault = Fault(
            epoch=self._epoch.number, rank=self.hello.rank, reason=reason, orderly=orderly
        )
        return self._to_scheduler(fault)

    def _new_epoch(self) -> list[Send]:
        if self._epoch is None:
            return []
        reason = "a new epoch was asked for"
        if self.hello.tp == 1:
            return self._fault(reason, orderly=True)
        # The other ranks compute every plan that comes before the next BeginEpoch, so this one
        # must.
        return [self._fault_message(reason, orderly=True)]

    def _leave_epoch(self) -> list[Send]:
        """Leaves the epoch if the stage is to leave and all results are sent: its successor
        computes the next plans.
        """
        if not self._leaving or self._epoch is None or self._epoch.in_flight:
            return []
        return self._fault("it hands over to another process", orderly=True)

    def _compile(self, message: CompileGrammar) -> Compile:
        """Makes the command for the device. Freed grammars normally travel with the next step's
        delta; if no step is in flight, the Compile command carries them.
        """
        quiet = self._epoch is None or not self._epoch.in_flight
        released = self._requests.take_dropped_grammars() if quiet else ()
        return Compile(
            request_id=message.request_id, spec=message.spec, slow=message.slow, released=released
        )

    def _on_compiled(self, compiled: Compiled) -> Send:
        hello = self.hello
        return self._to_scheduler(
            GrammarCompiled(
                rank=hello.rank,
                incarnation=hello.incarnation,
                request_id=compiled.request_id,
                error=compiled.error,
            )
        )

    def _load_adapter(self, load: LoadAdapter) -> list[Send]:
        """Loads the adapter only if all plans before `next_plan` were applied, because their rows
        may need the adapter that lies in the slot now; else reports the gap, and the scheduler
        repeats the message.
        """
        epoch = self._epoch
        if epoch is None or load.epoch != epoch.number or load.next_plan <= epoch.plans.expected:
            return [Send(LOCAL, "", load)]
        return self._missed(epoch)

    def _on_adapter_read(self, read: AdapterRead) -> Send:
        hello = self.hello
        return self._to_scheduler(
            AdapterLoaded(
                rank=hello.rank,
                incarnation=hello.incarnation,
                epoch=read.epoch,
                number=read.number,
                error=read.error,
            )
        )

    # ----------------------------------------------------------------------------------------- plan

    def _on_plan(self, plan: Plan) -> list[Send]:
        epoch = self._epoch
        if epoch is None or plan.epoch != epoch.number or self._leaving:
            self._totals["plans_dropped_total"] += 1
            return []
        order = epoch.plans.take(plan.number)
        if order != "next":
            return self._missed(epoch) if order == "gap" else []
        self._unchecked = True
        try:
            rows = self.memory.apply(plan)
        except (ProtocolError, IntegrityError) as error:
            return self._fault(f"plan {plan.number}: {error}", mark_unusable=True)
        if plan.releases:
            self._requests.drop_grammars(release.slot for release in plan.releases)
        for admit in plan.admits:
            self._requests.put(admit)
        for extend in plan.appends:
            ids = unpack(extend.ids)
            first = int(self.memory.slots.num_known[extend.slot]) - len(ids)
            self._requests.extend(extend.slot, first, ids)
        computed = self._count(plan, rows)
        step, plan_rows = self._steps.build(plan.epoch, rows)
        drafted = epoch.take_drafted(rows)
        epoch.in_flight.append(
            _InFlight(rows, plan_rows, step.logprob_sizes(), step.prompt_logprob_chunks, drafted)
        )
        sends = self._add_digest(epoch, rows) if self.hello.rank else self._admitted(epoch, rows)
        if len(rows.invalidated):
            sends.append(Send(LOCAL, "", InvalidatePages(rows.invalidated)))
        if len(step.slots):
            self._totals["steps_total"] += 1
            self._step_tokens.observe(computed)
            sends.append(Send(LOCAL, "", Compute(step)))
            return sends
        # Nothing to compute; the result still waits for the results of the plans before.
        epoch.in_flight[-1].done = StepDone(plan.epoch, plan.number, b"", b"")
        return sends + self._finished(epoch)

    def _missed(self, epoch: _Epoch) -> list[Send]:
        """Reports the gap. Other ranks may have applied the plan, and wait for this rank in a
        collective.
        """
        missed = MissedPlan(epoch.number, self.hello.rank, epoch.plans.expected)
        return [self._to_scheduler(missed)]

    def _count(self, plan: Plan, rows: Rows) -> int:
        """Adds to the totals; returns the tokens that the plan computes, of prompts and outputs."""
        totals = self._totals
        totals["plans_total"] += 1
        totals["rows_total"] += len(rows.slots)
        if rows.same_as_previous:  # decodes and nothing else
            totals["computed_tokens_total"] += len(rows.slots)
            return len(rows.slots)
        computed = int(rows.counts.sum())
        totals["rows_deferred_total"] += int(np.count_nonzero(rows.deferred))
        totals["computed_tokens_total"] += computed
        for admit, cached in zip(plan.admits, rows.cached.tolist(), strict=True):
            known = num_ids(admit.token_ids)
            if known == admit.prompt_len:  # else it was preempted: not a client's prompt
                totals["prompt_tokens_total"] += known
                totals["cached_tokens_total"] += cached
        return computed

    def _admitted(self, epoch: _Epoch, rows: Rows) -> list[Send]:
        if not len(rows.admitted):
            return []
        message = Admitted(
            epoch=epoch.number,
            number=rows.number,
            slots=pack(rows.admitted),
            cached=pack(rows.cached),
            free=rows.free,
            evictable=rows.evictable,
            evicted=rows.evicted,
        )
        return [self._to_scheduler(message)]

    def _add_digest(self, epoch: _Epoch, rows: Rows) -> list[Send]:
        epoch.digests.append(rows.digest)
        return self._send_digests(epoch) if len(epoch.digests) >= DIGESTS else []

    def _send_digests(self, epoch: _Epoch) -> list[Send]:
        values = np.array(epoch.digests, dtype="<u8").tobytes()
        first = epoch.plans.expected - len(epoch.digests)
        epoch.digests.clear()
        return [
            self._to_scheduler(
                Digests(epoch=epoch.number, rank=self.hello.rank, first=first, values=values)
            )
        ]

    # --------------------------------------------------------------------------------------- result

    def _on_step_done(self, done: StepDone) -> list[Send]:
        epoch = self._epoch
        if epoch is None or done.epoch != epoch.number:
            return []
        waiting = next((one for one in epoch.in_flight if one.done is None), None)
        if waiting is None or waiting.rows.number != done.number:
            expected = "none" if waiting is None else str(waiting.rows.number)
            reason = f"step {done.number} ended where {expected} was expected"
            return self._fault(reason, mark_unusable=True)
        counts, ids = unpack(done.num_sampled), num_ids(done.token_ids)
        if (len(counts), ids) != (len(waiting.plan_rows), int(counts.sum())):
            return self._fault(
                f"step {done.number} sampled {ids} ids and said it of {len(counts)} rows, "
                f"where {len(waiting.plan_rows)} sample",
                mark_unusable=True,
            )
        if any(not 0 <= row < len(counts) or counts[row] for row in done.refused):
            reason = f"step {done.number} refused rows that sampled, or that it has not"
            return self._fault(reason, mark_unusable=True)
        trouble = _logprobs_error(waiting, counts, done)
        if trouble:
            return self._fault(f"step {done.number} {trouble}", mark_unusable=True)
        self._totals["sampled_tokens_total"] += ids
        self._totals["bad_rows_total"] += len(done.bad) // 4  # int32 slots
        self._totals["refused_rows_total"] += len(done.refused)
        waiting.done = done
        if waiting.drafted:
            waiting.rows = _as_accepted(waiting, counts)
        return self._filled(waiting, counts, done) + self._finished(epoch) + self._leave_epoch()

    def _filled(self, ended: _InFlight, counts: np.ndarray, done: StepDone) -> list[Send]:
        """Returns FillPages for pages that the ended step has filled, if any. counts: int32 [L],
        ids of each row of logits.
        """
        chains, fills = self.memory.chains, ended.rows.fills
        if chains is None or fills is None:
            return []
        if done.bad or done.refused:  # steps under way go on with ids that only the device has
            rows = [*unpack(done.bad).tolist(), *done.refused]
            chains.mark_unusable(fills, ended.plan_rows[rows])
        if ended.rows.same_as_previous and done.num_sampled == COUNT_OF_ONE * len(counts):
            sampled = unpack(done.token_ids)  # ids of every row, in the plan's order: nearly always
        else:
            sampled = _first_ids(ended, counts, done)
        found = chains.filled(fills, sampled, _ids_of_drafted(ended, counts, done))
        return [] if found is None else [Send(LOCAL, "", FillPages(found))]

    def _finished(self, epoch: _Epoch) -> list[Send]:
        """Takes the results that are due, in plan order."""
        sends: list[Send] = []
        while epoch.in_flight and (done := epoch.in_flight[0].done) is not None:
            in_flight = epoch.in_flight.popleft()
            if in_flight.drafted and not len(in_flight.plan_rows):  # perhaps nothing was computed
                in_flight.rows = _as_accepted(in_flight, unpack(done.num_sampled))
            if self.hello.rank == 0:
                sends += map(
                    self._to_scheduler, _prompt_logprobs(in_flight.prompt_logprob_chunks, done)
                )
                sends.append(self._to_scheduler(_result(in_flight, done)))
        return sends

    def _to_scheduler(self, message: Message) -> Send:
        return Send("result", self.scheduler, message)


def _as_accepted(ended: _InFlight, counts: np.ndarray) -> Rows:
    """Returns the rows of a step that has ended, with starts and counts as they were on the device.
    counts: int32 [L], ids of each row of logits.
    """
    rows = ended.rows
    given = np.bincount(ended.plan_rows, weights=counts, minlength=len(rows.slots))
    starts, tokens = rows.starts.copy(), rows.counts.copy()
    for row, request in ended.drafted.items():
        starts[row], tokens[row] = request.computed, int(given[row])
        request.computed += int(given[row])
    return replace(rows, starts=starts, counts=tokens)


def _ids_of_drafted(
    ended: _InFlight, counts: np.ndarray, done: StepDone
) -> dict[int, tuple[int, np.ndarray]]:
    """Returns the argument `drafted` of ChainTracker.filled: {row of the plan: (first position,
    ids)}.
    """
    if not ended.drafted:
        return {}
    ids, rows = unpack(done.token_ids), np.repeat(ended.plan_rows, counts)
    found: dict[int, tuple[int, np.ndarray]] = {}
    for row in ended.drafted:
        if len(given := ids[rows == row]):
            found[row] = int(ended.rows.starts[row]), given
    return found


def _first_ids(ended: _InFlight, counts: np.ndarray, done: StepDone) -> np.ndarray:
    """Returns int32, for each row of the plan the first id that it sampled, or -1. Further ids of a
    row are computed as known ids by later steps. counts: int32 [L], ids of each row of logits.
    """
    sampled = np.full(len(ended.rows.slots), -1, dtype=np.int32)
    first = np.cumsum(counts) - counts
    some = counts > 0
    sampled[ended.plan_rows[some]] = unpack(done.token_ids)[first[some]]
    return sampled


def _result(in_flight: _InFlight, done: StepDone) -> Result:
    """Makes the Result, with the rows of the plan in the plan's order."""
    rows, plan_rows = in_flight.rows, in_flight.plan_rows
    produced, token_ids = done.num_sampled, done.token_ids
    logprobs = done.logprobs
    if not rows.same_as_previous:  # else every row samples, in the plan's order
        counts = unpack(done.num_sampled)
        produced = pack(np.bincount(plan_rows, weights=counts, minlength=len(rows.slots)))
        order = np.argsort(np.repeat(plan_rows, counts), kind="stable")
        token_ids = pack(unpack(done.token_ids)[order])
        if in_flight.logprob_sizes is not None:
            logprobs = _in_order(counts * in_flight.logprob_sizes, plan_rows, logprobs)
    bad = pack(rows.slots[plan_rows[unpack(done.bad)]]) if done.bad else b""
    return Result(
        epoch=done.epoch,
        number=done.number,
        slots=pack(rows.slots),
        starts=pack(rows.starts),
        counts=pack(rows.counts),
        produced=produced,
        token_ids=token_ids,
        deferred=pack(rows.slots[rows.deferred]),
        free=rows.free,
        evictable=rows.evictable,
        digest=rows.digest,
        bad=bad,
        evicted=rows.evicted,
        logprobs=logprobs,
        refused={int(rows.slots[plan_rows[row]]): why for row, why in done.refused.items()},
        mask_units={int(rows.slots[plan_rows[row]]): n for row, n in done.mask_units.items()},
    )


def _in_order(sizes: np.ndarray, plan_rows: np.ndarray, raw: bytes) -> bytes:
    """Reorders `raw`, which has `sizes` [L] bytes for each row of logits, into the plan's order."""
    ends: list[int] = np.cumsum(sizes).tolist()
    parts = [raw[begin:end] for begin, end in pairwise([0, *ends])]
    order: list[int] = np.argsort(plan_rows, kind="stable").tolist()
    return b"".join([parts[row] for row in order])


def _logprobs_error(in_flight: _InFlight, counts: np.ndarray, done: StepDone) -> str:
    """Returns the error in the sizes of a step's log-probs; "" if there is none."""
    sizes = in_flight.logprob_sizes
    expected = 0 if sizes is None else int(counts @ sizes)
    parts = [
        len(chunk.ids) * logprob_bytes(chunk.num_alternatives)
        for chunk in in_flight.prompt_logprob_chunks
    ]
    if (expected, parts) == (len(done.logprobs), [len(raw) for raw in done.prompt_logprobs]):
        return ""
    return f"brought {len(done.logprobs)} bytes of log-probs, where {expected} were expected"


def _prompt_logprobs(
    chunks: tuple[PromptLogprobChunk, ...], done: StepDone
) -> Iterator[PromptLogprobs]:
    """Yields the log-probs of prompt tokens in messages of at most LOGPROBS_PER_MESSAGE tokens."""
    for chunk, raw in zip(chunks, done.prompt_logprobs, strict=True):
        for begin in range(0, len(chunk.ids), LOGPROBS_PER_MESSAGE):
            width = logprob_bytes(chunk.num_alternatives)
            yield PromptLogprobs(
                epoch=done.epoch,
                number=done.number,
                slot=chunk.slot,
                first=chunk.first + begin,
                logprobs=raw[begin * width : (begin + LOGPROBS_PER_MESSAGE) * width],
            )
