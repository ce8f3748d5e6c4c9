"""Steps of one group whose results are under way.

Stands in for scheduler/flights.py where the planner uses it. Knows no policy and no page.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from pipeinfer.scheduler.request import Request
from simulate.seats import Row, Seat


@dataclass(slots=True, eq=False)
class Flight:
    """A step whose result is under way; it ends at `ends`, clients see it at `seen`. decodes: it is
    a step of decodes, `folded` of them the cohort's. free, evictable: pages after its plan."""

    number: int
    rows: dict[Seat, Row]
    decodes: bool
    folded: int
    ends: float
    seen: float
    free: int
    evictable: int


class Flights:
    """See planner.StepsInFlight: as many as are in flight; `rows` of the latest plan."""

    def __init__(self, flights: deque[Flight]) -> None:
        self.rows: list[tuple[Request, int]] = []
        self._flights = flights

    def __len__(self) -> int:
        return len(self._flights)

    def launch(self, number: int, rows: list[tuple[Request, int]], now: float) -> int:
        self.rows = rows
        return 0

    def late(self, now: float) -> bool:
        """Never: nothing that a simulated engine reports is lost."""
        return False
