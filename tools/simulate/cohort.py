"""The decodes of a group that merely go on: one token a step each, so they are counted, not walked.

A request joins after an unbroken run of decodes and leaves before the step in which it cannot go
on. Between the two, all that it is follows from two counts of steps. Knows no plan and no policy.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from simulate.seats import Row, Seat


@dataclass(slots=True, eq=False)
class Member:
    """A folded seat: its request's numbers when `planned` and `landed` steps of decodes were."""

    seat: Seat
    planned: int
    landed: int
    projected: int
    computed: int


class Cohort:
    """`planned`, `landed`: steps with decodes so far, by the scheduler's plans and by results.
    contexts: sum of the members' tokens once all that is planned is computed.
    """

    def __init__(self, page_size: int) -> None:
        self.planned = self.landed = 0
        self.contexts = self._wanted = 0
        self._size = page_size
        self._members: dict[Seat, Member] = {}
        # A member takes a page in the steps whose number is, modulo the page size, its place here.
        self._takers = [0] * page_size
        self._leaving: list[tuple[int, int, int, Member]] = []
        # (step that it must not be in, step of joining, place, member); stale after an early leave

    def __len__(self) -> int:
        return len(self._members)

    @property
    def pages(self) -> int:
        """Pages that the next step of decodes takes for the members."""
        return self._takers[self.planned % self._size]

    @property
    def leave_at(self) -> float:
        """The step of decodes that the next member must not be in."""
        return self._leaving[0][0] if self._leaving else float("inf")

    @property
    def left(self) -> int:
        """Output tokens that the members still lack."""
        return self._wanted - len(self._members) * self.landed

    def join(self, seat: Seat) -> None:
        """Its rows in flight are the cohort's from now on."""
        request = seat.request
        place = (self.planned - request.projected) % self._size
        member = Member(seat, self.planned, self.landed, request.projected, request.computed)
        self._members[seat] = member
        self._takers[place] += 1
        self.contexts += request.projected
        self._wanted += seat.life.lacks + self.landed
        # Out before its last token is planned: that it ends is seen when that one lands.
        last = self.planned + request.max_total - 2 - request.projected
        heapq.heappush(self._leaving, (last, self.planned, seat.place, member))

    def due(self) -> list[Seat]:
        """Members that must leave before the next step."""
        seats: list[Seat] = []
        while self._leaving and self._leaving[0][0] <= self.planned:
            member = heapq.heappop(self._leaving)[3]
            if self._members.get(member.seat) is member:
                seats.append(member.seat)
        return seats

    def everybody(self) -> list[Seat]:
        return list(self._members)

    def leave(self, seat: Seat) -> list[Row]:
        """Brings seat and request up to date; returns its rows in flight, oldest first."""
        member = self._members.pop(seat)
        request = seat.request
        steps, landed = self.planned - member.planned, self.landed - member.landed
        self._takers[(member.planned - member.projected) % self._size] -= 1
        request.computed = member.computed + landed
        request.projected = member.projected + steps
        self.contexts -= request.projected
        self._wanted -= seat.life.lacks + member.landed
        request.outputs.extend([0] * landed)
        request.steps_in_flight = request.projected - request.computed
        request.counts_in_flight[:] = [1] * request.steps_in_flight
        seat.computed = request.projected
        seat.held = -(-seat.computed // self._size)
        seat.since, seat.next = self.planned, -1
        starts = range(request.computed, request.projected)
        return [Row(seat, 1, True, start, 0, False, True) for start in starts]

    def advance(self) -> None:
        """One more step of decodes is planned, all members in it."""
        self.planned += 1
        self.contexts += len(self._members)
