"""What is in the engine: who holds its slots, which steps are in flight, and how far ranks agree.

What an engine says of its plans is taken in here; what follows for a request is the core's
business. Knows no epoch's beginning, no policy and no bus.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeinfer.messages import Admitted, Digests, Result
from pipeinfer.scheduler.agreement import Agreement
from pipeinfer.scheduler.flights import Flights, Landed
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
        """A plan was applied: its pages, and what the prefix cache held."""
        self.slots.report(told)
        self.flights.matched(told)

    def land(self, result: Result) -> Iterator[Landed]:
        """A plan's result; see Flights.land. Raises OutOfOrder, and Disagreement at its end."""
        self.slots.report(result)
        yield from self.flights.land(result)
        self._agreement.result(result.digest)

    def told(self, digests: Digests) -> None:
        """Another rank's digests. Raises Disagreement."""
        self._agreement.told(digests)

    def lose(self) -> tuple[list[Request], list[Request]]:
        """The epoch is over: (requests that held slots, those that were in flight)."""
        return self.slots.lose(), self.flights.crash()
