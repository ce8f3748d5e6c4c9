"""Who is next where several clients wait for one thing: fair by client, and nobody waits for ever.

Self-clocked fair queueing (Golestani, 1994), once among hosts and once among the clients of a host.
Sans-IO. Knows nothing of what is waited for.
"""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items in the order in which they are to be taken.

    A client is a text; what stands before its first "/", if there is one, is its host. While two
    hosts wait, what is taken of both weighs about the same, and so it is for two clients of a host.
    An item of weight w is overtaken by no more of any other client than w. A name that comes for
    the first time has no advantage over one that is known.
    """

    def __init__(self) -> None:
        self._hosts: _Flows[str] = _Flows()  # called so, it is plain data: a snapshot takes it
        self._clients: dict[str, _Flows[T]] = {}  # of each host that waits

    def __len__(self) -> int:
        return len(self._hosts)

    def put(self, client: str, weight: int, item: T) -> None:
        """`item` waits. `weight`: about what it will cost, at least 1."""
        host = client.partition("/")[0]
        self._hosts.put(host, weight, host)  # a turn; which of its items has it is decided then
        self._clients.setdefault(host, _Flows()).put(client, weight, item)

    def take(self) -> T:
        """The next item, which waits no more. IndexError where there is none."""
        host = self._hosts.take()
        clients = self._clients[host]
        item = clients.take()
        if not len(clients):
            del self._clients[host]
        return item


class _Flows(Generic[T]):
    """Items by tag: what their flow had before, and their own weight. The clock is the last tag
    that was taken; who did not wait begins there, without credit or debt."""

    def __init__(self) -> None:
        self._clock = self._count = 0
        self._items: list[tuple[int, int, str, T]] = []  # a heap: tag, number, flow, item
        self._last: dict[str, tuple[int, int]] = {}  # of each flow that waits: last tag, items

    def __len__(self) -> int:
        return len(self._items)

    def put(self, flow: str, weight: int, item: T) -> None:
        last, waiting = self._last.get(flow, (self._clock, 0))
        tag = last + weight
        self._last[flow] = tag, waiting + 1
        self._count += 1
        heapq.heappush(self._items, (tag, self._count, flow, item))

    def take(self) -> T:
        self._clock, _, flow, item = heapq.heappop(self._items)
        last, waiting = self._last.pop(flow)
        if waiting > 1:
            self._last[flow] = last, waiting - 1
        return item
