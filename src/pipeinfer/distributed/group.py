"""The collectives of one tensor-parallel group, over torch.distributed.

All ranks call the same collectives in the same order; a rank that dies makes the others raise, one
that hangs makes them wait, which the scheduler's watchdog ends. Knows no layer and no model.
"""

from __future__ import annotations

import logging
import os
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from pipeinfer.bus import addresses
from pipeinfer.bus.wires import Wires
from pipeinfer.distributed.custom_all_reduce import TRIED, CustomAllReduce
from pipeinfer.distributed.rendezvous import meet

log = logging.getLogger(__name__)

# torch 2.13 calls it all_gather_single and warns of the name that 2.11 knows alone.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
TOLERANCE = 0.05  # of the largest sum: what rounding each addition to bfloat16 may cost


class TorchGroup:
    """Rank `rank` of `size`; gloo between CPUs, NCCL between GPUs.

    `custom`: what adds up the messages that it takes, in place of NCCL; see `use_custom`.
    """

    def __init__(
        self, store: Store, rank: int, size: int, backend: str, timeout: float, place: int = 0
    ) -> None:
        """Returns when all ranks are there; `timeout` in seconds, for that and every collective.
        `place`: of this rank's GPU on its host."""
        self.rank, self.size = rank, size
        self.custom: CustomAllReduce | None = None
        gpu = torch.device("cuda", place) if backend == "nccl" else None
        if gpu is not None:
            torch.cuda.set_device(gpu)
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout),
            device_id=gpu,
        )
        self._device = gpu or torch.device("cpu")

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, same shape; the argument may be overwritten."""
        if self.custom is not None and self.custom.takes(partial):
            return self.custom.add_up(partial)
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

    def use_custom(self, dtype: torch.dtype) -> bool:
        """Lets GPUs that map each other's memory add up small messages of `dtype` by themselves.

        All ranks must call it. False, with the reason in the log, where they cannot or where the
        sums are wrong: then NCCL adds up everything.
        """
        custom, trouble = None, ""
        try:
            custom = self._mapped(dtype)
        except (RuntimeError, ImportError, AttributeError) as error:
            trouble = str(error).strip().splitlines()[0]
        if not self.smallest(custom is not None):
            self._without(trouble or "another rank cannot map the memory of this one")
            return False
        assert custom is not None
        if not self.smallest(self._adds_up(custom)):
            self._without("its sums differ from NCCL's")
            return False
        self.custom = custom
        return True

    def _without(self, why: str) -> None:
        log.warning("NCCL adds up all messages between ranks: %s", why)

    def _mapped(self, dtype: torch.dtype) -> CustomAllReduce:
        here = torch.cuda.device_count()
        blocked = [
            peer
            for peer in range(here)
            if peer != self._device.index
            and not torch.cuda.can_device_access_peer(self._device.index, peer)
        ]
        if here < self.size or blocked:
            raise RuntimeError(f"{here} GPUs are visible, and no access to {blocked} of them")
        assert dist.group.WORLD is not None
        return CustomAllReduce(dist.group.WORLD, self._device, dtype)

    def _adds_up(self, custom: CustomAllReduce) -> bool:
        """Whether it gives NCCL's sums, up to rounding, for messages of each kind."""
        good = True
        for count in TRIED:
            torch.manual_seed(count + self.rank)
            mine = torch.randn(count, dtype=custom.dtype, device=self._device)
            expected = mine.clone().float()
            dist.all_reduce(expected)
            if custom.takes(mine):
                error = (custom.add_up(mine).float() - expected).abs().max()
                good &= bool(error <= TOLERANCE * expected.abs().max())
        return good

    def close(self) -> None:
        """Leaves the group; it must not be used afterwards."""
        self.custom = None
        dist.destroy_process_group()


def join(
    address: str, rank: int, size: int, device: str, timeout: float, place: int | None = None,
    wires: Wires | None = None,
) -> TorchGroup:  # fmt: skip
    """Meets the other ranks at `address`, that of rank 0, and forms the group; see `meet`.

    place: of this rank's GPU on its host, by default `rank`. wires: see `meet`.
    """
    backend = "nccl" if device == "cuda" else "gloo"
    if backend == "gloo" and addresses.is_loopback(addresses.host(address)):
        # Else gloo asks for the address of this host's name, which need not lead anywhere.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    formed = threading.Event()
    try:
        store = meet(address, rank, size, timeout, wires, formed)
        return TorchGroup(store, rank, size, backend, timeout, rank if place is None else place)
    finally:
        formed.set()
