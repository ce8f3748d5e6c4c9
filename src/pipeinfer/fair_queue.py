"""A fair queue: waiting items are taken so that clients share by weight, and no item starves.

Self-clocked fair queueing (Golestani, 1994) in two levels: among hosts, and among the clients of a
host. Sans-IO.
"""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items of several clients, in fair order.

    - A client is a text. The part before the first "/" is its host; without "/", the whole text is.
    - While two hosts have items waiting, the weights taken from both are about the same. The same
      holds for two clients of one host.
    - Items that overtake an item of weight w have together a weight of at most w for each other
      client.
    - A new client has no advantage over a known one.
    """

    def __init__(self) -> None:
        # Not `_Flows[str]()`: that sets `__orig_class__`, which is no plain data for a snapshot.
        self._hosts: _Flows[str] = _Flows()
        self._clients: dict[str, _Flows[T]] = {}  # by host, of hosts with waiting items

    def __len__(self) -> int:
        return len(self._hosts)

    def put(self, client: str, weight: int, item: T) -> None:
        """Adds `item`.

        client: whose item it is.
        weight: its estimated cost, at least 1.
        """
        host = client.partition("/")[0]
        self._hosts.put(host, weight, host)  # a turn of the host; `take` picks the client
        self._clients.setdefault(host, _Flows()).put(client, weight, item)

    def take(self) -> T:
        """Removes and returns the next item. Raises IndexError if there is none."""
        host = self._hosts.take()
        clients = self._clients[host]
        item = clients.take()
        if not len(clients):
            del self._clients[host]
        return item


class _Flows(Generic[T]):
    """Items of several flows, ordered by tag.

    An item's tag is its weight plus the tag of its flow's last item. The clock is the tag that was
    taken last. A flow without waiting items starts at the clock, without credit or debt.
    """

    def __init__(self) -> None:
        self._clock = self._count = 0
        self._items: list[tuple[int, int, str, T]] = []  # a heap: tag, number, flow, item
        self._last: dict[str, tuple[int, int]] = {}  # by flow with items: last tag, num items

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
