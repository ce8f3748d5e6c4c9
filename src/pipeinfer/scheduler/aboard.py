"""What is in the engine: who holds its slots, which steps are in flight, and how far ranks agree.

What an engine says of its plans is taken in here; what follows for a request is the core's
business. Knows no epoch's beginning, no policy and no bus.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeinfer.messages import Admitted, Digests, Result
from pipeinfer.scheduler.agreement import Agreement
from pipeinfer.scheduler.flights import Flights, Impossible, Landed
from pipeinfer.scheduler.request import Request
from pipeinfer.scheduler.slots import Slots


class Aboard:
    """Of one group of `tp` ranks."""

    def __init__(self, tp: int) -> None:
        self.slots = Slots()
        self.flights = Flights()
        self._agreement = Agreement(tp)

    @property
    def agreed(self) -> int:
        """Plans that all ranks decided alike."""
        return self._agreement.compared

    def begin(self) -> None:
        """A new epoch: all memories are empty."""
        self._agreement.begin()

    def admitted(self, told: Admitted) -> None:
        """A plan was applied: its pages, and what the prefix cache held. Raises Impossible."""
        self._check_pages(told)
        credits = self.slots.credits
        # A hit shortens a prompt, so its later rows grow it further than their plans counted.
        pages = sum(credits.between(*further) for further in self.flights.matched(told))
        if pages:
            credits.plan(self.flights.newest, pages)
        self.slots.report(told)

    def land(self, result: Result) -> Iterator[Landed]:
        """A plan's result; see Flights.land. Raises Impossible, and Disagreement at its end."""
        self._check_pages(result)
        yield from self.flights.land(result)
        self.slots.report(result)
        self._agreement.result(result.digest)

    def _check_pages(self, report: Admitted | Result) -> None:
        pages = self.slots.credits.pages
        free, evictable, evicted = report.free, report.evictable, report.evicted
        most = 2 * pages * (report.number + 1)  # a plan may empty the cache, and then the pool
        there = free >= 0 and evictable >= 0 and free + evictable <= pages
        if not there or not 0 <= evicted <= most:
            raise Impossible(
                f"of {pages} pages plan {report.number} left {free} free and {evictable} "
                f"evictable, and {evicted} are evicted"
            )

    def told(self, digests: Digests) -> None:
        """Another rank's digests. Raises Disagreement."""
        self._agreement.told(digests)

    def lose(self) -> tuple[list[Request], list[Request]]:
        """The epoch is over: (requests that held slots, those that were in flight)."""
        return self.slots.lose(), self.flights.crash()
