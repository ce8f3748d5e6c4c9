"""The loop that turns requests into plans: who waits, who holds a slot, which steps are in flight.

Composes one step at a time by a policy, and writes it down as a plan. Knows no bus, no epochs, and
nothing of what becomes of a request's tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol

from pipeinfer.histogram import Histogram
from pipeinfer.messages import Admit, Extend, Hello, Plan, Prepare, Prepared, Release
from pipeinfer.packing import pack
from pipeinfer.scheduler import policies
from pipeinfer.scheduler.board import Beside, Board, Row
from pipeinfer.scheduler.credits import Allowance, Credits
from pipeinfer.scheduler.options import DEFAULT_STEP_TOKENS, SchedulerOptions
from pipeinfer.scheduler.probation import Probation
from pipeinfer.scheduler.queue import WaitingQueue
from pipeinfer.scheduler.request import Request
from pipeinfer.step_budget import MixedBudget, mixed_budget
from pipeinfer.step_cost import Prompt

AHEAD = 64  # prompts in the queue that are looked at one by one
DEFERRALS = 2  # of one request in a row, after which somebody else must give way


class Running(Protocol):
    """Requests that hold a slot."""

    def values(self) -> Collection[Request]:
        """In the order of their admission."""
        ...

    def __len__(self) -> int: ...


class SlotsToPlan(Protocol):
    """What a plan needs of the slots; see slots.py."""

    @property
    def running(self) -> Running: ...
    @property
    def ahead(self) -> dict[str, Request]: ...
    @property
    def credits(self) -> Credits: ...
    @property
    def released_pages(self) -> int: ...
    @property
    def free(self) -> int: ...
    @property
    def releasing(self) -> bool: ...

    def begin(self, count: int, credits: Credits) -> None: ...
    def context(self, rows: Iterable[Row]) -> int: ...
    def left(self, rows: Iterable[Row]) -> int: ...
    def release(self, request: Request, count_pages: bool = True) -> None: ...
    def publish(self) -> tuple[Release, ...]: ...
    def jumping(self) -> dict[str, Request]: ...
    def extend(self, rows: Iterable[Row]) -> tuple[Extend, ...]: ...
    def take_reset(self) -> bool: ...
    def shared_by(self, requests: Sequence[Request]) -> bytes: ...
    def admit(self, requests: Sequence[Request]) -> tuple[Admit, ...]: ...


class StepsInFlight(Protocol):
    """What a plan needs of those that were published before it; see flights.py."""

    def __len__(self) -> int: ...
    def launch(self, number: int, rows: list[Row], now: float) -> int: ...
    def late(self, now: float) -> bool: ...


class Planner:
    """Plans of one group. Raises ConfigurationError for an unknown policy.

    Gives out `slots` and launches `flights`; what engines say of either, their owner hears.
    `counts` go into the statistics, and `allowed`, what MixedBudget.allows says; so does
    `queue_times`, in seconds from a request's arrival to its first slot.
    """

    def __init__(
        self, options: SchedulerOptions, slots: SlotsToPlan, flights: StepsInFlight
    ) -> None:
        self._slots = slots
        self._flights = flights
        counted = "plans", "planned_tokens", "jumped_tokens", "preemptions"
        self.counts: dict[str, int] = dict.fromkeys(counted, 0)
        self.queue_times = Histogram()
        self._options = options
        self._policy = policies.create(options.policy)
        self._budget = 0  # tokens of a step, known when an epoch begins, as is the next
        self._mixed_budget = MixedBudget(0)
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
        self._mixed_budget = mixed_budget(asked, self._budget, shape.step_cost, targets)
        self.allowed = self._mixed_budget.allows()
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
        board = Board(
            running=list(slots.running.values()),
            queue=self._queue,
            pages=Allowance(slots.credits, slots.released_pages),
            free_slots=slots.free,
            budget=self._budget,
            nothing_in_flight=not len(self._flights),
            beside=Beside(
                partial(self._beside, now),
                partial(self._cheapest, now),
                slots.jumping() if slots.ahead else {},
            ),
        )
        if not self._compose(board):
            return None
        if not board.rows and not board.preempted and not slots.releasing:
            return None
        return self._written(board, epoch, now)

    def probe(self, epoch: int, now: float) -> Plan | None:
        """An empty plan where results are late. An engine that missed one sees a gap before it; if
        a result was lost, the gap is before that of the empty plan. Else nothing comes of it."""
        if not self._flights.late(now):
            return None
        number = self.take_number()
        self._flights.launch(number, [], now)
        self._slots.credits.plan(number, 0)
        return Plan(epoch=epoch, number=number, releases=(), admits=(), slots=b"", counts=b"")

    def _beside(self, now: float, decodes: list[Row], prompts: list[Request]) -> int:
        """Tokens of prompts that go with these decodes; `prompts` are half-computed."""
        waiting = _half_computed(prompts, now)
        if self._mixed_budget.looks_ahead:
            waiting += self._coming(now)
        context = self._slots.context(decodes)
        return self._mixed_budget.prompts(len(decodes), context, waiting)

    def _cheapest(self, now: float, decodes: list[Row], prompts: list[Request]) -> int:
        """The same, of those that cost least."""
        left = 0
        if len(self._queue) + self._queue.held <= self._slots.free:
            left = self._slots.left(decodes)
        waiting = _half_computed(prompts, now) + self._coming(now)
        context = self._slots.context(decodes)
        return self._mixed_budget.cheapest(len(decodes), context, waiting, left)

    def _coming(self, now: float) -> list[Prompt]:
        """The queue; of what is far behind only the mean length is known, and no age."""
        queue = self._queue
        near = queue.first(AHEAD)
        coming = [Prompt(r.queued, r.length - r.queued, now - r.since) for r in near]
        behind, tokens = len(queue) - len(near), queue.tokens - sum(r.queued for r in near)
        if behind > 0:
            mean, many = max(tokens // behind, 1), min(behind, AHEAD)
            coming += [Prompt(mean)] * many
            coming.append(Prompt(max(tokens - mean * many, 0)))
        return coming

    def _compose(self, board: Board) -> bool:
        """Fills the board; False if the steps in flight must report first."""
        head = self._queue.head()
        if self._probation.tried or (self._probation and (head is None or not head.admission)):
            suspect = self._probation.next()
            if suspect is not None and not self._prepares(suspect):
                if len(self._flights):
                    return False  # it runs alone, at depth 1
                self._try(suspect, board)
                return True
        self._share(board)
        return True

    def _prepares(self, suspect: Request) -> bool:
        """Whether engines still compile its grammar; the others go on meanwhile."""
        return suspect.phase == "suspected" and self._queue.preparation.lacks(suspect)

    def _try(self, suspect: Request, board: Board) -> None:
        """The suspect alone, in turn with those who run: they do not wait for its prompt.

        When pages run short it comes first, and those who hold them have to give way.
        """
        short = any(request.deferrals for request in self._slots.running.values())
        self._others = not (self._others or short)
        if suspect.deferrals:
            board.make_way(suspect)
        if self._others:
            board.leave_out(suspect)
            self._share(board)
        if not board.rows:
            board.run_alone(suspect)

    def _share(self, board: Board) -> None:
        """A step of all that run, as the policy likes it."""
        if any(request.deferrals >= DEFERRALS for request in self._slots.running.values()):
            board.relieve()
        running = self._slots.running.values()
        if out := self._queue.preparation.mask_budget.left_out(running):
            board.leave_out(*out)
        self._policy.compose(board)

    def _written(self, board: Board, epoch: int, now: float) -> Plan:
        """The plan: releases, then admits, then rows."""
        for request in board.preempted:
            self._preempt(request)
        releases = self._slots.publish()
        shares = self._slots.shared_by(board.admitted)
        admits = self._slots.admit(board.admitted)
        for request in board.admitted:
            if request.admission == 1:
                request.admitted = now
                self.queue_times.observe(now - request.since)
        rows = [(request, count) for request, count in board.rows if request.phase == "running"]
        extends: tuple[Extend, ...] = ()
        if self._slots.ahead:
            jumps = [(request, count) for request, count in rows if board.jumps(request, count)]
            self.counts["jumped_tokens"] += sum(count - 1 for _, count in jumps)
            extends = self._slots.extend(jumps)
        slots, counts = pack([r.slot for r, _ in rows]), pack([count for _, count in rows])
        number = self.take_number()
        self.counts["planned_tokens"] += self._flights.launch(number, rows, now)
        self._slots.credits.plan(number, board.pages.taken)
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
        self._slots.release(request, count_pages=False)  # the board has counted them
        request.deferrals = 0
        self._queue.push(request)
        self.counts["preemptions"] += 1


def _half_computed(prompts: Iterable[Request], now: float) -> list[Prompt]:
    """What is left of prompts that hold a slot."""
    return [Prompt(r.known - r.projected, r.projected, now - r.since) for r in prompts]
