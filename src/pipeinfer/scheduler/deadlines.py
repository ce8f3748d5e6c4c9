"""When requests with a timeout have to be over.

Knows requests and times in seconds; what becomes of a late one is the core's business.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from pipeinfer.scheduler.request import Request

STALE = 64  # entries of requests that have ended, beside as many as there are live ones


class Deadlines:
    """A heap of (deadline, id), and the live requests by id: one that ended is let go at once, its
    entry when it comes up, or with many.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._live: dict[str, Request] = {}

    def add(self, request: Request) -> None:
        """Requests without a deadline are not kept."""
        if request.deadline < float("inf"):
            self._live[request.id] = request
            heapq.heappush(self._heap, (request.deadline, request.id))

    def forget(self, request: Request) -> None:
        """`request` is over, by whatever."""
        if self._live.get(request.id) is request:
            del self._live[request.id]
            if len(self._heap) > 2 * len(self._live) + STALE:
                self._heap = [(one.deadline, name) for name, one in self._live.items()]
                heapq.heapify(self._heap)

    def over(self, now: float) -> Iterator[Request]:
        """Live requests whose deadline has come, each once."""
        while self._heap and self._heap[0][0] <= now:
            deadline, name = heapq.heappop(self._heap)
            request = self._live.get(name)
            if request is not None and request.deadline == deadline:
                del self._live[name]
                yield request
