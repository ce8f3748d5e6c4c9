"""The loop that turns requests into plans: who waits, who holds a slot, which steps are in flight.

Composes one step at a time by a policy, and writes it down as a plan. Knows no bus, no epochs, and
nothing of what becomes of a request's tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeinfer.messages import Extend, Hello, Plan, Prepare, Prepared
from pipeinfer.packing import pack
from pipeinfer.scheduler import policies
from pipeinfer.scheduler.composer import StepComposer
from pipeinfer.scheduler.credits import Credits
from pipeinfer.scheduler.flights import Flights
from pipeinfer.scheduler.options import DEFAULT_STEP_TOKENS, SchedulerOptions
from pipeinfer.scheduler.probation import Probation
from pipeinfer.scheduler.queue import WaitingQueue
from pipeinfer.scheduler.request import Request
from pipeinfer.scheduler.slots import Slots
from pipeinfer.step_budget import PrefillBudget, prefill_budget

DEFERRALS = 2  # of one request in a row, after which somebody else must give way


class Planner:
    """Plans of one group. Raises ConfigurationError for an unknown policy.

    Gives out `slots` and launches `flights`; what engines say of either, their owner hears.
    `counts` go into the statistics, and `allowed`, what PrefillBudget.allows says.
    """

    def __init__(self, options: SchedulerOptions, slots: Slots, flights: Flights) -> None:
        self._slots = slots
        self._flights = flights
        counted = "plans", "planned_tokens", "jumped_tokens", "preemptions"
        self.counts: dict[str, int] = dict.fromkeys(counted, 0)
        self._options = options
        self._policy = policies.create(options.policy)
        self._budget = 0  # tokens of a step, known when an epoch begins, as is the next
        self._prefill_budget = PrefillBudget(0)
        self.allowed = (0, 0.0)
        self._queue = WaitingQueue(options.tp)
        self._probation = Probation()
        self._others = False  # whether the last step was one of those who are no suspects
        self._number = 0

    def begin(self, shape: Hello, incarnations: Sequence[int]) -> None:
        """An epoch begins, on engines of this `shape`, of which these are the processes."""
        self._queue.begin(incarnations, self._options.grain(shape.page_size))
        self._budget = self._options.max_step_tokens or shape.step_tokens or DEFAULT_STEP_TOKENS
        asked = self._options.mixed_step_tokens
        targets = self._options.targets
        self._prefill_budget = prefill_budget(asked, self._budget, shape.step_cost, targets)
        self.allowed = self._prefill_budget.allows()
        slots = min(shape.max_slots, self._options.max_running, self._budget)
        self._slots.begin(slots, Credits(shape.page_size, shape.pages))
        self._number = 0

    def lose(
        self, lost: Sequence[Request], flying: Sequence[Request], blameless: bool
    ) -> Request | None:
        """The epoch is over: all `lost` had slots, and of those the ones that were `flying` are
        suspects, unless they are `blameless`. Returns a request that must fail because of it.

        Every other one goes back to the queue with the tokens it has; suspects wait apart.
        """
        suspects = [r for r in flying if r.phase == "lost" and not blameless]
        guilty = self._probation.accuse(suspects)
        for request in lost:
            # The one that was being tried may have had a slot and no part in the last step.
            if request is not guilty and request.phase == "lost":
                self._queue.push(request)
        return guilty

    def enqueue(self, request: Request, crashes: int = -1) -> None:
        """It waits for a slot from now on; apart, if it may have crashed an engine elsewhere."""
        if crashes >= 0:
            self._probation.suspect(request, crashes)
        else:
            self._queue.push(request)

    def drop(self, request: Request) -> None:
        """It is over, wherever it was; its slot is released with the next plan."""
        phase = request.phase
        request.move("over")
        if phase == "running":
            self._slots.release(request)
        elif phase == "waiting":
            self._queue.forget(request)
        elif phase == "suspected":
            self._probation.forget(request)
        if phase in ("suspected", "preparing"):
            self._queue.preparation.forget(request)
        self._queue.over(request, phase == "running")

    def prepare(self, now: float) -> Iterator[Prepare]:
        """Grammars that engines are to be asked for now."""
        return self._queue.preparation.due(now)

    def prepared(self, told: Prepared) -> list[Request]:
        """What a rank says of a grammar. Those that waited for it go on; if it cannot be had, they
        are returned."""
        free = self._queue.preparation.answered(told)
        if told.error:
            return free
        for request in free:
            if request.phase == "preparing":  # suspects wait apart
                self._queue.push(request)
        return []

    @property
    def preparing(self) -> int:
        """Requests that wait for their grammar."""
        return len(self._queue.preparation)

    @property
    def held(self) -> int:
        """Requests that wait for the prompt of another."""
        return self._queue.held

    @property
    def suspects(self) -> int:
        """Requests that may have crashed an engine."""
        return len(self._probation)

    def crashes(self, request: Request) -> int:
        """Of engines that ran `request` alone; -1 if it is no suspect."""
        return self._probation.crashes(request)

    def cleared(self, request: Request) -> None:
        """`request` produced a token: it crashes no engine."""
        self._probation.cleared(request)

    def went_ahead(self, request: Request) -> None:
        """More of its ids are known than steps in flight compute."""
        if request.phase == "running":
            self._slots.ahead[request.id] = request

    def take_number(self) -> int:
        """The number of the next plan, for whoever writes it down."""
        self._number += 1
        return self._number - 1

    def plan(self, epoch: int, now: float) -> Plan | None:
        """The next step; None if enough are in flight or nothing is left to do."""
        if len(self._flights) >= self._options.overlap_depth:
            return None
        slots, queue = self._slots, self._queue
        queue.free(slots.running.values())
        budget = queue.preparation.mask_budget
        while request := budget.next(len(slots.running) + len(queue)):
            queue.push(request)
        step = StepComposer(
            slots,
            queue,
            max_tokens=self._budget,
            prefill_budget=self._prefill_budget,
            now=now,
            nothing_in_flight=not len(self._flights),
        )
        if not self._compose(step):
            return None
        if not step.rows and not step.preempted and not slots.releasing:
            return None
        return self._written(step, epoch, now)

    def probe(self, epoch: int, now: float) -> Plan | None:
        """An empty plan where results are late. An engine that missed one sees a gap before it; if
        a result was lost, the gap is before that of the empty plan. Else nothing comes of it."""
        if not self._flights.late(now):
            return None
        number = self.take_number()
        self._flights.launch(number, [], now)
        self._slots.credits.plan(number, 0)
        return Plan(epoch=epoch, number=number, releases=(), admits=(), slots=b"", counts=b"")

    def _compose(self, step: StepComposer) -> bool:
        """Composes the step; False if the steps in flight must report first."""
        head = self._queue.head()
        if self._probation.tried or (self._probation and (head is None or not head.admission)):
            suspect = self._probation.next()
            if suspect is not None and not self._prepares(suspect):
                if len(self._flights):
                    return False  # it runs alone, at depth 1
                self._try(suspect, step)
                return True
        self._share(step)
        return True

    def _prepares(self, suspect: Request) -> bool:
        """Whether engines still compile its grammar; the others go on meanwhile."""
        return suspect.phase == "suspected" and self._queue.preparation.lacks(suspect)

    def _try(self, suspect: Request, step: StepComposer) -> None:
        """The suspect alone, in turn with those who run: they do not wait for its prompt.

        When pages run short it comes first, and those who hold them have to give way.
        """
        short = any(request.deferrals for request in self._slots.running.values())
        self._others = not (self._others or short)
        if suspect.deferrals:
            step.make_way(suspect)
        if self._others:
            step.leave_out(suspect)
            self._share(step)
        if not step.rows:
            step.run_alone(suspect)

    def _share(self, step: StepComposer) -> None:
        """A step of all that run, as the policy likes it."""
        if any(request.deferrals >= DEFERRALS for request in self._slots.running.values()):
            step.relieve()
        running = self._slots.running.values()
        if out := self._queue.preparation.mask_budget.left_out(running):
            step.leave_out(*out)
        self._policy.compose(step)

    def _written(self, step: StepComposer, epoch: int, now: float) -> Plan:
        """The plan: releases, then admits, then rows."""
        for request in step.preempted:
            self._preempt(request)
        releases = self._slots.publish()
        shares = self._slots.shared_by(step.admitted)
        admits = self._slots.admit(step.admitted)
        rows = [(request, count) for request, count in step.rows if request.phase == "running"]
        extends: tuple[Extend, ...] = ()
        if self._slots.ahead:
            jumps = [(request, count) for request, count in rows if step.jumps(request, count)]
            self.counts["jumped_tokens"] += sum(count - 1 for _, count in jumps)
            extends = self._slots.extend(jumps)
        slots, counts = pack([r.slot for r, _ in rows]), pack([count for _, count in rows])
        number = self.take_number()
        self.counts["planned_tokens"] += self._flights.launch(number, rows, now)
        self._slots.credits.plan(number, step.pages.taken)
        self._queue.preparation.mask_budget.spend(rows, self._slots.running.values())
        self.counts["plans"] += 1
        return Plan(
            epoch=epoch,
            number=number,
            releases=releases,
            admits=admits,
            slots=slots,
            counts=counts,
            reset=self._slots.take_reset(),
            extends=extends,
            shares=shares,
        )

    def _preempt(self, request: Request) -> None:
        self._slots.release(request, count_pages=False)  # the composer has counted them
        request.deferrals = 0
        self._queue.push(request)
        self.counts["preemptions"] += 1
