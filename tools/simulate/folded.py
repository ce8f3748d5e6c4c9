"""One group, fast: the server's own planner, policy, queue and prefix cache, with decodes folded.

Equal to stepwise.py, which it is tested against, but without messages, page numbers, and a walk
over requests that merely decode. Messages take no time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pipeinfer.messages import GroupStatus
from pipeinfer.scheduler.lengths import TooLong, max_total
from pipeinfer.scheduler.options import DEFAULT_STEP_TOKENS
from pipeinfer.scheduler.planner import DEFERRALS, Planner
from simulate.arrivals import Arrival
from simulate.deployment import Deployment
from simulate.device import GROUPS, Device
from simulate.flying import Flight, Flights
from simulate.folding import Folding
from simulate.pages import PageCounts
from simulate.seats import Life, Row, Seat, Seats
from simulate.step_model import StepModel
from simulate.tally import Tally

# With nothing to admit and no prompt half-computed, a step of these is decode_all() and no more.
PLAIN = frozenset({"mixed", "prefill-first"})
# These never ask how long a decode goes on, so that one may stand for another. Of a policy of
# somebody's own it is not known.
ALIKE = PLAIN | {"decode-first"}


class FoldedGroup:
    """See cluster.Group. The same `seed` scatters the steps of group `index` alike."""

    def __init__(
        self, index: int, deployment: Deployment, model: StepModel, tally: Tally, seed: int = 0
    ) -> None:
        options, self._shape = deployment.options, deployment.hello
        self.ended: list[str] = []
        self._index, self._tally = index, tally
        self._device = Device(model, seed * GROUPS + index)
        self._counts = tally.groups[index]
        self._lives: dict[str, Life] = {}
        self._arrivals = 0
        self._tokens = 0  # of all that have not ended, outputs to come included
        self._in_flight: deque[Flight] = deque()
        self._admitted: deque[tuple[Flight, list[tuple[Seat, int]]]] = deque()
        self._seats = Seats(self._lives)
        self._flights = Flights(self._in_flight)
        self._planner = Planner(options, self._seats, self._flights)
        self._planner.begin(self._shape, (0,))
        self._memory = PageCounts(deployment.kv_pages, deployment.page_size, deployment.cache)
        self._depth = options.overlap_depth
        self._budget = options.max_step_tokens or DEFAULT_STEP_TOKENS
        self._plain = options.policy in PLAIN
        self._folding = Folding(
            self._seats.running,
            self._in_flight,
            deployment.page_size,
            self._depth,
            enabled=options.policy in ALIKE,
        )
        self._cohort = self._folding.cohort

    @property
    def next_at(self) -> float:
        return self._in_flight[0].ends if self._in_flight else float("inf")

    def told(self) -> GroupStatus:
        memory = self._memory
        # What a waiting request has left is all of it, however often it was preempted.
        left = self._tokens - self._seats.tokens + self._cohort.left
        left += sum([seat.request.left for seat in self._seats.running.hot])
        return GroupStatus(
            group=self._index,
            incarnation=0,
            standing="serves",
            epoch=1,
            requests=len(self._lives),
            tokens=left,
            capacity=memory.total * memory.page_size,
            evicted=memory.evicted * memory.page_size,
        )

    def submit(self, arrival: Arrival, now: float) -> None:
        self._arrivals += 1
        request = arrival.request(self._arrivals)
        try:
            request.max_total = max_total(request, self._shape)
        except TooLong:
            self._counts.refused += 1
            self.ended.append(arrival.id)
            return
        life = self._lives[arrival.id] = Life(arrival, request)
        self._tokens += life.tokens
        self._planner.enqueue(request)
        self._pump(now)

    def run_until(self, until: float) -> None:
        flights = self._in_flight
        while flights and flights[0].ends <= until:
            if not self._seats.running.hot and self._glides():
                self._glide(until)
                continue
            flight = flights.popleft()
            self._land(flight)
            self._pump(flight.ends)

    def _glides(self) -> bool:
        """With nobody but the cohort: whether it is alone in the next step and all under way."""
        seats, cohort = self._seats, self._cohort
        return (
            self._plain
            and not seats.releases
            and cohort.planned < cohort.leave_at
            and not self._admits(len(cohort))
            and not any(flight.rows or not flight.folded for flight in self._in_flight)
        )

    def _admits(self, running: int) -> bool:
        """Whether of those that do not run one may be admitted, or let into the queue."""
        more = len(self._lives) > running
        return more and (self._seats.free > 0 or self._planner.held > 0)

    def _glide(self, until: float) -> None:
        """Steps in which nothing can happen but decodes of the cohort: what _land and _publish do,
        and no more. Ends before a member leaves, when memory may be short, or at `until`."""
        flights, cohort, memory, planner = (
            self._in_flight,
            self._cohort,
            self._memory,
            self._planner,
        )
        credits, many, device, gap = (
            self._seats.credits,
            len(cohort),
            self._device,
            self._tally.gap,
        )
        steps = 0
        while flights[0].ends <= until and cohort.planned < cohort.leave_at:
            flight = flights.popleft()
            now = flight.ends
            credits.report(flight.number, flight.free, flight.evictable)
            gap(flight.seen - self._folding.last, many)
            cohort.landed += 1
            self._folding.last = flight.seen
            pages = cohort.pages
            if max(pages, 1) > credits.available:
                self._pump(now)
                break
            number = planner.take_number()
            credits.plan(number, pages)
            if pages:
                memory.take(pages)
            ends = device.run(now, many, cohort.contexts + many, 0, 0)
            free, evictable = memory.free, memory.cache.evictable
            seen = device.seen_at
            flights.append(Flight(number, {}, True, many, ends, seen, free, evictable))
            cohort.advance()
            steps += 1
        self._count(steps, steps * many, 0)

    # ------------------------------------------------------------------------------------- results

    def _land(self, flight: Flight) -> None:
        now = flight.seen
        self._seats.credits.report(flight.number, flight.free, flight.evictable)
        finished = [row for row in flight.rows.values() if self._land_row(row, now)]
        if flight.decodes:
            if flight.folded:
                self._tally.gap(now - self._folding.last, flight.folded)
            self._cohort.landed += 1
            self._folding.last = now
        # In the order of the plan's rows: decodes first.
        finished.sort(key=lambda row: (not row.decode, row.seat.place))
        for row in finished:
            self._finish(row.seat, now)

    def _land_row(self, row: Row, now: float) -> bool:
        """True if its request ends with it; see Flights.land and Request.accept."""
        seat, request = row.seat, row.seat.request
        request.steps_in_flight -= 1
        if request.phase == "over" or request.admission != seat.admission:
            return False
        if request.phase == "running":
            request.confirm(row.end)
            request.deferrals = request.deferrals + 1 if row.deferred else 0
        if not row.samples:
            return False
        life = seat.life
        if request.outputs:
            self._tally.gap(now - life.last)
        else:
            self._tally.started(self._index, life.arrival, now, max(request.cached, 0))
        life.last = now
        request.outputs.append(0)
        return request.length >= request.max_total

    def _finish(self, seat: Seat, now: float) -> None:
        request, arrival = seat.request, seat.life.arrival
        self._tally.ended(self._index, arrival, len(request.outputs), now)
        self._tokens -= self._lives.pop(request.id).tokens
        self.ended.append(request.id)
        self._planner.drop(request)

    # --------------------------------------------------------------------------------------- plans

    def _pump(self, now: float) -> None:
        """As SchedulerCore does: plans while it may, and hears at once of what was admitted."""
        while True:
            while len(self._in_flight) < self._depth and self._publish(now):
                pass
            if not self._admitted:
                return
            flight, hits = self._admitted.popleft()
            self._seats.credits.report(flight.number, flight.free, flight.evictable)
            for seat, cached in hits:
                request = seat.request
                if request.phase == "running" and request.admission == seat.admission:
                    request.hit = cached
                    request.cached = cached if request.cached < 0 else request.cached
                    request.rebase(cached)

    def _publish(self, now: float) -> bool:
        """Plans one step; False if there is nothing to do."""
        self._folding.unfold(self._cohort.due())
        decodes, prompts = self._decodes()
        if decodes is None:
            self._folding.unfold_everybody()
        elif self._plain and not prompts:
            return self._publish_decodes(decodes, now)
        return self._publish_planned(now)

    def _decodes(self) -> tuple[list[Seat] | None, bool]:
        """Those of the next step that are not folded, None if the planner must see everybody; and
        whether there may be prompts in it."""
        slots, cohort = self._seats, self._cohort
        decodes: list[Seat] = []
        prompts = self._admits(len(slots.running))
        pages, size = cohort.pages, self._memory.page_size
        for seat in slots.running.hot:
            request = seat.request
            projected = request.projected
            if request.deferrals >= DEFERRALS:
                return None, prompts
            if projected < request.known:
                prompts = True
            elif projected + 1 < request.max_total:
                decodes.append(seat)
                pages += projected % size == 0
        available = slots.credits.available + slots.released_pages
        if max(pages, 1) > available or len(cohort) + len(decodes) > self._budget:
            return None, prompts
        return decodes, prompts

    def _publish_decodes(self, decodes: list[Seat], now: float) -> bool:
        """What the planner would do, with less ado."""
        slots = self._seats
        if not decodes and not len(self._cohort) and not slots.releasing:
            return False
        size = self._memory.page_size
        pages = self._cohort.pages - slots.released_pages
        rows: list[Row] = []
        for seat in decodes:
            pages += seat.request.projected % size == 0
            seat.request.take(1)
            rows.append(Row(seat, 1, True))
        number = self._planner.take_number()
        slots.credits.plan(number, pages)
        slots.publish()
        self._carry_out(number, (), rows, len(self._cohort) > 0, now)
        return True

    def _publish_planned(self, now: float) -> bool:
        """One plan of the real planner."""
        running = self._seats.running
        self._folding.show()
        plan = self._planner.plan(0, now)
        if plan is None:
            return False
        rows: list[Row] = []
        planned = self._flights.rows
        # Stand-ins come first, all of them or none: decodes come before what else there is.
        folded = bool(planned) and self._folding.stands_in(planned[0][0])
        for request, count in planned[len(self._cohort) if folded else 0 :]:
            seat = running.seats[request.id]
            rows.append(Row(seat, count, request.projected >= request.known))
            request.take(count)
        seats = self._seats
        self._carry_out(plan.number, seats.admitted, rows, folded, now, seats.lending)
        self._counts.preemptions = self._planner.counts["preemptions"]
        return True

    def _carry_out(
        self,
        number: int,
        admits: Sequence[Seat],
        rows: list[Row],
        folded: bool,
        now: float,
        lending: Sequence[Seat] = (),
    ) -> None:
        """The engine's part: pages, then the device. `folded`: the cohort is in the step."""
        memory, cohort = self._memory, self._cohort
        memory.begin(self._seats.published, lending, number)
        hits = [(seat, memory.admit(seat, number)) for seat in admits]
        pages = memory.needed(rows) + (cohort.pages if folded else 0)
        if not memory.fits(pages):
            if folded:
                rows = self._folding.unfold_into(rows)
                folded = False
                memory.needed(rows)
            pages = memory.defer(rows)
        if pages:
            memory.take(pages)
        memory.advance(rows)
        flight = self._launch(number, rows, folded, now)
        self._in_flight.append(flight)
        if hits:
            self._admitted.append((flight, hits))
        self._folding.launched(rows, flight.decodes)

    def _launch(self, number: int, rows: list[Row], folded: bool, now: float) -> Flight:
        cohort = self._cohort
        many = len(cohort) if folded else 0
        singles, contexts = many, cohort.contexts + many if folded else 0
        tokens = pairs = 0
        decodes = folded
        for row in rows:
            decodes = decodes or row.decode
            if row.count == 1:
                singles += 1
                contexts += row.start + 1
            elif row.count:
                tokens += row.count
                pairs += row.count * row.start + row.count * (row.count + 1) // 2
        ends = self._device.run(now, singles, contexts, tokens, pairs)
        self._count(singles + tokens > 0, singles, tokens)
        free, evictable = self._memory.free, self._memory.cache.evictable
        by_seat = {row.seat: row for row in rows}
        seen = self._device.seen_at
        return Flight(number, by_seat, decodes, many, ends, seen, free, evictable)

    def _count(self, steps: int, decodes: int, tokens: int) -> None:
        counts = self._counts
        counts.steps += steps
        counts.decode += decodes
        counts.prefill += tokens
        counts.busy = self._device.busy
        counts.evicted = self._memory.evicted
