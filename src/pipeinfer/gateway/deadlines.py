"""When live requests with a timeout have to be over.

Knows records and times in seconds; what becomes of a late one is the core's business.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from pipeinfer.gateway.ledger import Record

MOST_STALE = 64  # entries of requests that have ended, beside as many as there are live ones


class RequestDeadlines:
    """A heap of (deadline, id) over the live `records`, which it shares. An entry of one that ended
    goes when it comes up, or with many."""

    def __init__(self, records: dict[str, Record]) -> None:
        self._records = records
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        """Entries, with those of requests that ended."""
        return len(self._heap)

    def add(self, record: Record) -> None:
        """Requests without a timeout are not kept."""
        if record.timeout > 0:
            heapq.heappush(self._heap, (record.deadline, record.request_id))

    def expired(self, now: float) -> Iterator[Record]:
        """Live requests whose deadline has come, each once."""
        while self._heap and self._heap[0][0] <= now:
            deadline, request_id = heapq.heappop(self._heap)
            record = self._records.get(request_id)
            if record is not None and record.deadline == deadline:
                yield record
        if len(self._heap) > 2 * len(self._records) + MOST_STALE:  # mostly of ended requests
            timed = (record for record in self._records.values() if record.timeout > 0)
            self._heap = [(record.deadline, record.request_id) for record in timed]
            heapq.heapify(self._heap)
