"""Requests that wait for a slot, in the order of admission.

Knows no engine. Priority first (lower is earlier, as in vLLM), then arrival; a preempted request
keeps its arrival and so returns to the head of its priority. Every operation is O(log n).
"""

from __future__ import annotations

import heapq

from pipeinfer.scheduler.request import Request


class WaitingQueue:
    """A heap with lazy deletion: a request that is `done` is skipped when it comes up."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Request]] = []
        self._gone = 0

    def push(self, request: Request) -> None:
        request.queued = True
        heapq.heappush(self._heap, (request.work.priority, request.arrival, request))

    def head(self) -> Request | None:
        """The next request, still in the queue; None if there is none."""
        while self._heap and self._heap[0][2].done:
            heapq.heappop(self._heap)
            self._gone -= 1
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Request:
        """Removes and returns the head; IndexError if there is none."""
        request = self.head()
        if request is None:
            raise IndexError("pop from an empty queue")
        heapq.heappop(self._heap)
        request.queued = False
        return request

    def forget(self, request: Request) -> None:
        """`request` was marked done; if it waits here it leaves when it comes up, or with many."""
        if not request.queued:
            return
        self._gone += 1
        if self._gone > 64 and self._gone > len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if not entry[2].done]
            heapq.heapify(self._heap)
            self._gone = 0

    def __len__(self) -> int:
        return len(self._heap) - self._gone
