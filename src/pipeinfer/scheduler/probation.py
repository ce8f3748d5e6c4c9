"""Suspects after a lost engine: requests whose step gave no result, tried one at a time.

Knows no engine. The rest is resumed first; then each suspect runs alone until it has produced a
token, which clears it. One that is alone in too many crashes is the cause and fails by itself.
"""

from __future__ import annotations

from collections import deque

from pipeinfer.scheduler.request import Request

LONE_CRASHES = 3  # not the first: an engine may be killed from outside while a suspect runs


class Probation:
    """The suspects of one group, and the one that is being tried."""

    def __init__(self) -> None:
        self._suspects: deque[Request] = deque()
        self.tried: Request | None = None

    def accuse(self, requests: list[Request]) -> Request | None:
        """The engine was lost while `requests` were in flight; returns one that must fail."""
        guilty = None
        tried, self.tried = self.tried, None
        if tried in requests:
            tried.lone_crashes += 1
            if tried.lone_crashes >= LONE_CRASHES:
                guilty = tried
                requests = [r for r in requests if r is not guilty]
        elif tried is not None and tried.phase != "over":
            if tried.phase == "lost":
                tried.move("suspected")
            self._suspects.appendleft(tried)  # it had no step in flight: not its doing
        for request in requests:
            request.move("suspected")
        self._suspects += requests
        return guilty

    def suspect(self, request: Request, crashes: int) -> None:
        """Another group lost its engine to it, or to others; `crashes` with it alone."""
        request.move("suspected")
        request.lone_crashes = crashes
        self._suspects.append(request)

    def crashes(self, request: Request) -> int:
        """Of engines that ran `request` alone; -1 if it is no suspect."""
        suspected = request is self.tried or request.phase == "suspected"
        return request.lone_crashes if suspected else -1

    def next(self) -> Request | None:
        """The request to run alone now; None if nobody is suspected."""
        while self.tried is None or self.tried.phase == "over":
            if not self._suspects:
                self.tried = None
                return None
            self.tried = self._suspects.popleft()
        return self.tried

    def cleared(self, request: Request) -> None:
        """`request` produced a token."""
        if request is self.tried:
            request.lone_crashes = 0
            self.tried = None

    def forget(self, request: Request) -> None:
        """`request` is over: nobody asks any more whether it was to blame."""
        self._suspects = deque(one for one in self._suspects if one is not request)

    def __len__(self) -> int:
        return len(self._suspects) + (self.tried is not None)
