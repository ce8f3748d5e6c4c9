"""The requests that are not over: by id, numbered as they came, each watched for its deadline.

Knows requests and times in seconds; what becomes of one that is late is the core's business.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeinfer.messages import Work
from pipeinfer.scheduler.deadlines import Deadlines
from pipeinfer.scheduler.request import Request, from_work


class Live:
    """Of one scheduler. `arrivals`: of requests, so far."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self.arrivals = 0
        self._deadlines = Deadlines()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __getitem__(self, request_id: str) -> Request:
        return self._requests[request_id]

    def get(self, request_id: str) -> Request | None:
        """The request, if it is live."""
        return self._requests.get(request_id)

    def arrived(self, work: Work, now: float, since: float) -> Request:
        """The next request, which is not live yet; times as for `from_work`."""
        self.arrivals += 1
        return from_work(work, self.arrivals, now, since)

    def add(self, request: Request) -> None:
        """It is live from now on."""
        self._requests[request.id] = request
        self._deadlines.add(request)

    def forget(self, request: Request) -> None:
        """It is over, by whatever; one that is refused as it comes never was here."""
        self._requests.pop(request.id, None)
        self._deadlines.forget(request)

    def late(self, now: float) -> Iterator[Request]:
        """Those whose deadline has come, each once."""
        return self._deadlines.over(now)
