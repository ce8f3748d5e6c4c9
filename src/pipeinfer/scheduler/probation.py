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
        if self.tried is not None and self.tried in requests and not self.tried.done:
            self.tried.lone_crashes += 1
            if self.tried.lone_crashes >= LONE_CRASHES:
                guilty = self.tried
                requests = [r for r in requests if r is not guilty]
        elif self.tried is not None and not self.tried.done:
            self._suspects.appendleft(self.tried)  # it had no step in flight: not its doing
        self.tried = None
        known = set(map(id, self._suspects))
        self._suspects.extend(r for r in requests if id(r) not in known)
        return guilty

    def suspect(self, request: Request, crashes: int) -> None:
        """Another group lost its engine to it, or to others; `crashes` with it alone."""
        request.lone_crashes = crashes
        self._suspects.append(request)

    def crashes(self, request: Request) -> int:
        """Of engines that ran `request` alone; -1 if it is no suspect."""
        suspected = request is self.tried or any(request is one for one in self._suspects)
        return request.lone_crashes if suspected else -1

    def next(self) -> Request | None:
        """The request to run alone now; None if nobody is suspected."""
        while self.tried is None or self.tried.done:
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
        if self._suspects:
            self._suspects = deque(one for one in self._suspects if one is not request)

    def __len__(self) -> int:
        return len(self._suspects) + (self.tried is not None)
