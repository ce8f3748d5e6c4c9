"""What a tokenizer remembers of unfinished requests: their work, and which group has it.

It is what a restarted scheduler is told. Knows no bus; entries end with Done or Abort, and the
gateways' limit on waiting requests bounds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from pipeinfer.messages import Work


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """One request. `certain`: False if an earlier tokenizer may have sent it to another group, of
    which nobody knows; `alone`: False if anything of it may be left in another group."""

    work: Work
    group: int
    group_certain: bool = True
    in_one_group: bool = True


class RoutedRequests:
    """Entries in the order in which their requests came."""

    def __init__(self, groups: Sequence[int]) -> None:
        self._groups = tuple(groups)
        self._entries: dict[str, RoutedRequest] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, entry: RoutedRequest) -> None:
        """Records an entry; a new attempt of a request counts as new."""
        self._entries.pop(entry.work.request_id, None)
        self._entries[entry.work.request_id] = entry

    def has(self, request_id: str, attempt: int) -> bool:
        """Whether this attempt of the request, or a later one, is here."""
        entry = self._entries.get(request_id)
        return entry is not None and entry.work.attempt >= attempt

    def remove(self, request_id: str) -> tuple[int, ...] | None:
        """Drops an entry; the groups that may have it, None if there is no entry."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return None
        return (entry.group,) if entry.in_one_group else self._groups

    def of_group(self, group: int) -> Iterator[Work]:
        """What that group's scheduler should have, or may have: output that nobody asks for is
        aborted, also where another group goes on with the same request."""
        return (e.work for e in self._entries.values() if e.group == group or not e.group_certain)

    def mark_leaving(self, group: int) -> list[Work]:
        """What that group is asked to hand over: from now on anything may be left of it there."""
        entries = [e for e in self._entries.values() if e.group == group]
        for entry in entries:
            self._entries[entry.work.request_id] = replace(entry, in_one_group=False)
        return [entry.work for entry in entries]

    def move(self, request_id: str, group: int, attempt: int) -> Work:
        """`group` goes on with an unfinished request, as this attempt; returns its work."""
        entry = self._entries[request_id]
        work = structs.replace(entry.work, attempt=attempt)
        self._entries[request_id] = replace(entry, work=work, group=group, in_one_group=False)
        return work

    def group_of_leader(self, entry: RoutedRequest) -> int | None:
        """The group that goes on with the leader of its requests; None if that is its own, or if
        there is no other request."""
        leader = self._entries.get(entry.work.leader, entry)
        return leader.group if leader.group != entry.group else None

    def get(self, request_id: str) -> RoutedRequest | None:
        """Its entry, if it is unfinished."""
        return self._entries.get(request_id)

    def of_gateway(self, gateway: int) -> Iterable[Work]:
        """What that gateway sent; entries may be dropped meanwhile."""
        return [e.work for e in self._entries.values() if e.work.gateway == gateway]
