"""Ranks of a tensor-parallel group that are threads of one process, for tests."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

PATIENCE = 60.0  # seconds that a rank waits for the others


class ThreadGroup:
    """exchanged: values that rank 0 has sent in gathers."""

    def __init__(self, size: int) -> None:
        self.size, self.exchanged = size, 0
        self.parts: list[torch.Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=PATIENCE)

    def run(self, work) -> list:
        """[work(collectives) for each rank], at the same time."""
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(work, [ThreadCollectives(self, r) for r in range(self.size)]))


class ThreadCollectives:
    """Those of one rank, whichever thread calls them; see collectives.py."""

    fusion = None

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self._group, self.rank, self.size = group, rank, group.size

    def all_gather_stacked(self, partial: torch.Tensor) -> torch.Tensor:
        group = self._group
        group.parts[self.rank] = partial
        group.barrier.wait()
        everybody = torch.stack(group.parts)
        group.barrier.wait()
        if self.rank == 0:
            group.exchanged += partial.numel()
        return everybody

    def all_gather(self, partial: torch.Tensor) -> torch.Tensor:
        return torch.cat(list(self.all_gather_stacked(partial)), dim=-1)

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        return self.all_gather_stacked(partial).sum(0)

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        return values.copy_(self.all_gather_stacked(values)[0])

    def all_gather_host(self, values: np.ndarray) -> np.ndarray:
        return self.all_gather_stacked(torch.from_numpy(values)).numpy()

    def all_reduce_min(self, value: int) -> int:
        return int(self.all_gather_stacked(torch.tensor(value)).min())
