"""Many groups behind the server's own router, in virtual time.

Between two arrivals groups do not know of each other, so each runs by itself until the next one.
Knows no scheduler, no memory and no model; see group.py.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from pipeinfer.liveness import HEARTBEAT_SECONDS
from pipeinfer.tokenizer.routing import GroupMonitor, GroupRouter
from simulate.arrivals import Arrival
from simulate.group import Group

FOREVER = float("inf")


class Cluster:
    """`groups` behind `router`, which hears of them as often as in a server."""

    def __init__(self, groups: Sequence[Group], router: GroupRouter) -> None:
        self._groups, self._router = groups, router
        self._watch = GroupMonitor()
        self._due: list[tuple[float, int]] = []  # a group stands here while something is under way
        self._active: set[int] = set(range(len(groups)))  # ran since they were last told of
        self._beat_at = 0.0

    def run(self, arrivals: Iterable[Arrival]) -> None:
        """All `arrivals`, which come in the order of their times, to their ends."""
        for arrival in arrivals:
            while self._beat_at <= arrival.at:
                self._advance(self._beat_at)
                self._beat()
            self._advance(arrival.at)
            chosen = self._router.choose(arrival.id, arrival.prompt, arrival.output, "")
            idle = self._groups[chosen].next_at == FOREVER
            self._groups[chosen].submit(arrival, arrival.at)
            self._collect(chosen)
            if idle:
                self._wait_for(chosen)
        self._advance(FOREVER)

    def _advance(self, until: float) -> None:
        due = self._due
        while due and due[0][0] <= until:
            index = heapq.heappop(due)[1]
            self._groups[index].run_until(until)
            self._collect(index)
            self._wait_for(index)

    def _wait_for(self, index: int) -> None:
        at = self._groups[index].next_at
        if at < FOREVER:
            heapq.heappush(self._due, (at, index))

    def _collect(self, index: int) -> None:
        self._active.add(index)
        ended = self._groups[index].ended
        for request_id in ended:
            self._router.on_ended(request_id)
        ended.clear()

    def _beat(self) -> None:
        """Says what is new of all groups that did something since the last time."""
        for index in sorted(self._active):
            report = self._watch.on_status(self._groups[index].told(), self._beat_at)
            if report is not None:
                self._router.on_report(index, report)
        self._active.clear()
        self._beat_at += HEARTBEAT_SECONDS
