"""Whether the ranks of a group decide alike: their digests of memory decisions, plan by plan.

Rank 0's come with its results, the others' some plans at a time; the first that differs is named.
Knows numbers only, no plan and no memory.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from pipeinfer.messages import Digests

SILENT = 4096  # plans of rank 0 for which a rank may say nothing


class Disagreement(Exception):
    """The ranks hold different memory: what they compute together from now on is worthless."""


class _Rank:
    """One rank above 0: digests not compared yet, of rank 0 and its own, from plan `number` on."""

    def __init__(self) -> None:
        self.number = 0
        self.first: deque[int] = deque()
        self.own: deque[int] = deque()


class Agreement:
    """Of one epoch of a group of `tp` ranks. `compared`: plans that all ranks decided alike."""

    def __init__(self, tp: int) -> None:
        self._ranks = {rank: _Rank() for rank in range(1, tp)}

    @property
    def compared(self) -> int:
        return min((rank.number for rank in self._ranks.values()), default=0)

    def begin(self) -> None:
        """A new epoch: all memories are empty."""
        self._ranks = {rank: _Rank() for rank in self._ranks}

    def result(self, digest: int) -> None:
        """Rank 0's digest of its next plan. Raises Disagreement."""
        for number, rank in self._ranks.items():
            rank.first.append(digest)
            self._compare(number, rank)
            if len(rank.first) > SILENT:
                raise Disagreement(f"rank {number} said nothing of {len(rank.first)} plans")

    def told(self, digests: Digests) -> None:
        """Those of another rank. Raises Disagreement."""
        rank = self._ranks.get(digests.rank)
        if rank is None:
            raise Disagreement(f"there is no rank {digests.rank} beside rank 0")
        expected = rank.number + len(rank.own)
        if digests.first != expected:
            raise Disagreement(
                f"rank {digests.rank} told of plan {digests.first}, {expected} was expected"
            )
        if len(digests.values) % 8:
            raise Disagreement(
                f"rank {digests.rank} told of plans in {len(digests.values)} bytes, 8 are one"
            )
        rank.own.extend(np.frombuffer(digests.values, dtype="<u8").tolist())
        self._compare(digests.rank, rank)

    @staticmethod
    def _compare(number: int, rank: _Rank) -> None:
        while rank.first and rank.own:
            if rank.first.popleft() != rank.own.popleft():
                raise Disagreement(
                    f"ranks 0 and {number} differ in their memory from plan {rank.number} on"
                )
            rank.number += 1
