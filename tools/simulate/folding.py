"""When requests of a group join its cohort, and when they are walked one by one again.

Knows seats, the cohort and the steps in flight; no planner and no page.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pipeinfer.scheduler.request import Request
from simulate.arrivals import NOBODY
from simulate.cohort import Cohort
from simulate.flying import Flight
from simulate.seats import Row, Running, Seat

WORTH = 4  # steps: a request that ends sooner is not folded
PAUSE = 16  # steps of decodes without folding after memory was short


class Folding:
    """Of one group whose scheduler keeps `depth` steps in flight; `enabled`: False folds nobody.

    last: when clients saw the latest step of decodes that landed.
    """

    def __init__(
        self, running: Running, in_flight: deque[Flight], page_size: int, depth: int, enabled: bool
    ) -> None:
        self.cohort = Cohort(page_size)
        self.last = 0.0
        self._running, self._in_flight = running, in_flight
        self._depth = depth
        self._from: float = 0 if enabled else float("inf")  # the step from which on it folds
        # What the planner sees in place of folded requests: one that needs a page, one that does
        # not. The same object stands for many.
        self._needy, self._content = _stand_in(0), _stand_in(1)

    def show(self) -> None:
        """Puts stand-ins for the cohort in front of those that the planner sees."""
        needy = self.cohort.pages
        many = len(self.cohort) - needy
        self._running.folded = [self._needy] * needy + [self._content] * many
        shown = many * self._content.projected
        self._running.unseen = self.cohort.contexts - shown

    def stands_in(self, request: Request) -> bool:
        return request is self._needy or request is self._content

    def launched(self, rows: Sequence[Row], decodes: bool) -> None:
        """A step with `rows` is on its way, and the cohort with it if it has `decodes`."""
        self._keep_runs(rows)
        if decodes:
            self.cohort.advance()
            if self.cohort.planned >= self._from:
                self._fold()

    def _keep_runs(self, rows: Sequence[Row]) -> None:
        """Notes whose run of decodes goes on."""
        step = self.cohort.planned
        for row in rows:
            seat = row.seat
            if not (row.decode and row.count == 1 and row.samples):
                seat.next = -1
                continue
            if seat.next != step:
                seat.since = step
            seat.next = step + 1

    def _fold(self) -> None:
        stay: list[Seat] = []
        for seat in self._running.hot:
            if not self._goes_on(seat):
                stay.append(seat)
                continue
            for flight in self._in_flight:
                if flight.rows.pop(seat, None) is not None:
                    flight.folded += 1
            self.cohort.join(seat)
        self._running.hot = stay

    def _goes_on(self, seat: Seat) -> bool:
        """True if it has been in every step of decodes for a while, all steps in flight included,
        so that nothing about it is still to come but tokens."""
        request, planned = seat.request, self.cohort.planned
        return (
            seat.next == planned
            and planned - seat.since > self._depth + 1
            and request.max_total - request.projected > WORTH
            and request.deferrals == 0
            and request.computed >= request.known
            and seat.computed == request.projected
            and seat.life.last == self.last
        )

    def unfold(self, seats: Sequence[Seat]) -> None:
        """They are walked again from now on, and so are their rows in flight."""
        if not seats:
            return
        flying = [flight for flight in self._in_flight if flight.decodes]
        for seat in seats:
            for flight, row in zip(flying, self.cohort.leave(seat), strict=True):
                flight.rows[seat] = row
                flight.folded -= 1
            seat.life.last = self.last
        hot = (*self._running.hot, *seats)
        self._running.hot = sorted(hot, key=lambda seat: seat.place)

    def unfold_everybody(self) -> list[Seat]:
        """Memory is short, so that the order of requests matters; none is folded for a while."""
        seats = self.cohort.everybody()
        self.unfold(seats)
        self._from = max(self._from, self.cohort.planned + PAUSE)
        return seats

    def unfold_into(self, rows: Sequence[Row]) -> list[Row]:
        """`rows` of the step that is about to be launched, and the cohort's, one by one, in the
        plan's order: decodes by admission, then the rest."""
        seats = self.unfold_everybody()
        for seat in seats:
            seat.request.take(1)
        every = [row for row in rows if row.decode] + [Row(seat, 1, True) for seat in seats]
        every.sort(key=lambda row: row.seat.place)
        return every + [row for row in rows if not row.decode]


def _stand_in(projected: int) -> Request:
    endless = 1 << 60
    return Request(NOBODY, 0, float("inf"), endless, slot=0, phase="running", projected=projected)
