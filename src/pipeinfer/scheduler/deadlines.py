"""When requests with a timeout have to be over.

Knows requests and times in seconds; what becomes of a late one is the core's business.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from pipeinfer.scheduler.request import Request


class Deadlines:
    """A heap with lazy deletion: requests that are done are skipped when they come up."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []

    def add(self, request: Request) -> None:
        """Requests without a deadline are not kept."""
        if request.deadline < float("inf"):
            heapq.heappush(self._heap, (request.deadline, request.arrival, request))

    def over(self, now: float) -> Iterator[Request]:
        """Live requests whose deadline has come, each once."""
        while self._heap and self._heap[0][0] <= now:
            request = heapq.heappop(self._heap)[2]
            if not request.done:
                yield request
