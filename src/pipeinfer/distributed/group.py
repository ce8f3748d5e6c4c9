"""The collectives of one tensor-parallel group, over torch.distributed.

All ranks call the same collectives in the same order; a rank that dies makes the others raise, one
that hangs makes them wait, which the scheduler's watchdog ends. Knows no layer and no model.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from pipeinfer.bus import addresses
from pipeinfer.distributed.rendezvous import meet

# torch 2.13 calls it all_gather_single and warns of the name that 2.11 knows alone.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TorchGroup:
    """Rank `rank` of `size`; gloo between CPUs, NCCL between GPUs."""

    def __init__(self, store: Store, rank: int, size: int, backend: str, timeout: float) -> None:
        """Returns when all ranks are there; `timeout` in seconds, for that and every collective."""
        self.rank, self.size = rank, size
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout),
            device_id=torch.device("cuda", rank) if backend == "nccl" else None,
        )
        self._device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in place."""
        dist.all_reduce(partial)
        return partial

    def all_gather(self, partial: torch.Tensor) -> torch.Tensor:
        """[..., n] of every rank, side by side in the order of ranks: [..., n * size]."""
        parts = self.collect(partial)
        return parts.movedim(0, -2).reshape(*partial.shape[:-1], -1)

    def collect(self, partial: torch.Tensor) -> torch.Tensor:
        """[size, ...]: `partial` of every rank, in the order of ranks."""
        flat = partial.contiguous().view(-1)
        parts = flat.new_empty(self.size * len(flat))
        _gather_into(parts, flat)
        return parts.view(self.size, *partial.shape)

    def smallest(self, value: int) -> int:
        """The smallest `value` of all ranks."""
        mine = torch.tensor([value], dtype=torch.int64, device=self._device)
        dist.all_reduce(mine, dist.ReduceOp.MIN)
        return int(mine.item())

    def close(self) -> None:
        """Leaves the group; it must not be used afterwards."""
        dist.destroy_process_group()


def join(address: str, rank: int, size: int, device: str, timeout: float) -> TorchGroup:
    """Meets the other ranks at `address`, that of rank 0, and forms the group; see `meet`."""
    backend = "nccl" if device == "cuda" else "gloo"
    if backend == "gloo" and addresses.is_loopback(addresses.host(address)):
        # Else gloo asks for the address of this host's name, which need not lead anywhere.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return TorchGroup(meet(address, rank, size, timeout), rank, size, backend, timeout)
