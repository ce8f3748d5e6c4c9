"""Requests that belong together, as the choices of one prompt do: one computes it, the others wait.

Knows requests, and how far each has come; no pages and no order among those that may run. What is
held holds no slot and nobody up: whoever is behind it in the queue goes before it.
"""

from __future__ import annotations

from collections.abc import Iterable

from pipeinfer.scheduler.request import Request


class Families:
    """Of live requests, by the leader that their works name. Who leads need not be that one: it is
    the first that wants to run, and when it ends without having come through its prompt the next.
    """

    def __init__(self) -> None:
        self._leads: dict[str, Request] = {}
        self._held: dict[str, list[Request]] = {}

    def __len__(self) -> int:
        """How many are held."""
        return sum(map(len, self._held.values()))

    def hold(self, request: Request) -> bool:
        """Whether `request`, which wants to run, has to wait for the prompt of another; then it is
        held. Else `behind` says in whose pages it will find its prompt, if in anybody's."""
        name, request.behind = request.work.leader, None
        if not name:
            return False
        lead = self._leads.setdefault(name, request)
        if lead is request:
            return False
        if lead.lends:
            request.behind = lead
            return False
        request.move("held")
        self._held.setdefault(name, []).append(request)
        return True

    def ready(self, running: Iterable[Request]) -> list[Request]:
        """Those that need not wait any more, because of one that runs."""
        if not self._held:
            return []
        lending = {r.work.leader: r for r in running if r.work.leader in self._held and r.lends}
        return [one for name, behind in lending.items() for one in self._all(name, behind)]

    def gone(self, request: Request, lent: bool) -> list[Request]:
        """`request` is over; `lent`: it had a slot. Returns those that need not wait any more: all
        if its prompt stays in the prefix cache, else the next one, which then leads."""
        name = request.work.leader
        if not name:
            return []
        held = self._held.get(name, [])
        if self._leads.get(name) is not request:
            if request in held:
                self._take(name, request)
            return []
        del self._leads[name]
        if lent and request.sampled and not request.spoiled:
            return self._all(name, None)
        if not held:
            return []
        self._leads[name] = held[0]
        return [self._take(name, held[0])]

    def _take(self, name: str, request: Request) -> Request:
        self._held[name].remove(request)
        if not self._held[name]:
            del self._held[name]
        return request

    def _all(self, name: str, behind: Request | None) -> list[Request]:
        free = self._held.pop(name, [])
        for request in free:
            request.behind = behind
        return free
