"""The collectives of one tensor-parallel group, over torch.distributed.

All ranks call the same collectives in the same order; a rank that dies makes the others raise, one
that hangs makes them wait, which the scheduler's watchdog ends. Knows no layer and no model.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, MutableMapping
from datetime import timedelta
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from pipeinfer.bus.sockets import SocketFactory
from pipeinfer.distributed.custom_all_reduce import TRIED, CustomAllReduce
from pipeinfer.distributed.rendezvous import meet
from pipeinfer.topology import addresses

if TYPE_CHECKING:
    from pipeinfer.distributed.fused_all_reduce import AllReduceNorm

log = logging.getLogger(__name__)

# torch 2.13 calls it all_gather_single and warns of the name that 2.11 knows alone.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
Way = TypeVar("Way")  # of adding up
TRIED_ROWS = (1, 5, 160)
TOLERANCE = 0.05  # of the largest sum: what rounding each addition to bfloat16 may cost


class TorchCollectives:
    """Rank `rank` of `size`; gloo between CPUs, NCCL between GPUs.

    `custom`: what adds up the messages that it takes, in place of NCCL; `fusion`: what also adds
    the residual and norms. See `use_custom`.
    """

    def __init__(
        self, store: Store, rank: int, size: int, backend: str, timeout: float, ordinal: int = 0
    ) -> None:
        """Returns when all ranks are there; `timeout` in seconds, for that and every collective.
        `ordinal`: of this rank's GPU on its host."""
        self.rank = rank
        self.size = size
        self.custom: CustomAllReduce | None = None
        self.fusion: AllReduceNorm | None = None
        gpu = torch.device("cuda", ordinal) if backend == "nccl" else None
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

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """`values`, which become those of rank 0 in place."""
        dist.broadcast(values, 0)
        return values

    def smallest(self, value: int) -> int:
        """The smallest `value` of all ranks."""
        mine = torch.tensor([value], dtype=torch.int64, device=self._device)
        dist.all_reduce(mine, dist.ReduceOp.MIN)
        return int(mine.item())

    def use_custom(self, dtype: torch.dtype, hidden: int) -> bool:
        """Lets GPUs that map each other's memory add up messages of `dtype` by themselves, and
        norm vectors of `hidden` values with it where that comes next.

        All ranks must call it. False, with the reason in the log, where they cannot or where the
        sums are wrong: then NCCL adds up everything.
        """
        world = dist.group.WORLD
        assert world is not None

        def fused() -> AllReduceNorm:
            from pipeinfer.distributed.fused_all_reduce import mapped_all_reduce_norm

            fusion = mapped_all_reduce_norm(world, self._device, dtype)
            fusion.compile(hidden)
            return fusion

        without = "NCCL adds up all messages between ranks"
        self.custom = self._agreed(lambda: self._mapped(world, dtype), self._adds_up, without)
        if self.custom is not None:
            without = "sums over ranks are made and normed one after the other"
            self.fusion = self._agreed(fused, partial(self._norms, hidden), without)
        return self.custom is not None

    def _agreed(
        self, make: Callable[[], Way], right: Callable[[Way], bool], without: str
    ) -> Way | None:
        """What `make` gives, if every rank has it and finds it right; else the log says why not."""
        made, trouble = None, "another rank cannot do otherwise"
        try:
            made = make()
        except (RuntimeError, ImportError, AttributeError) as error:
            trouble = str(error).strip().splitlines()[0]
        if not self.smallest(made is not None):
            log.warning("%s: %s", without, trouble)
            return None
        assert made is not None
        if not self.smallest(right(made)):
            log.warning("%s: what came out otherwise differs from NCCL's", without)
            return None
        return made

    def _mapped(self, world: dist.ProcessGroup, dtype: torch.dtype) -> CustomAllReduce:
        here = torch.cuda.device_count()
        blocked = [
            peer
            for peer in range(here)
            if peer != self._device.index
            and not torch.cuda.can_device_access_peer(self._device.index, peer)
        ]
        if here < self.size or blocked:
            raise RuntimeError(f"{here} GPUs are visible, and no access to {blocked} of them")
        return CustomAllReduce(world, self._device, dtype)

    def _adds_up(self, custom: CustomAllReduce) -> bool:
        """Whether it gives NCCL's sums, up to rounding, for messages of each kind."""
        good = True
        for count in TRIED:
            torch.manual_seed(count + self.rank)
            mine = torch.randn(count, dtype=custom.dtype, device=self._device)
            expected = mine.clone().float()
            dist.all_reduce(expected)
            if custom.takes(mine):
                good &= _near(custom.add_up(mine), expected)
        return good

    def _norms(self, hidden: int, fusion: AllReduceNorm) -> bool:
        """The same of sums that are added to a residual and normed, in one shot and in two."""
        from pipeinfer.kernels.norm import all_reduce_norm_reference

        good = True
        make = partial(torch.randn, dtype=fusion.dtype, device=self._device)
        for rows, shots in product(TRIED_ROWS, (1, 2)):
            torch.manual_seed(rows)  # equal on all ranks
            residual, weight = make(rows, hidden), make(hidden)
            torch.manual_seed(rows + shots + self.rank)
            mine = make(rows, hidden)
            expected = all_reduce_norm_reference(self.collect(mine), residual, weight, 1e-6)
            buffer = fusion.buffer(rows, hidden)
            if buffer is not None:
                normed, total = fusion.add_norm(buffer.copy_(mine), residual, weight, 1e-6, shots)
                own = slice(self.rank, None, self.size) if shots == 2 else slice(None)
                good &= _near(normed, expected[0]) and _near(total[own], expected[1][own])
        return good

    def close(self) -> None:
        """Leaves the group; it must not be used afterwards."""
        self.custom = self.fusion = None
        dist.destroy_process_group()


def _near(got: torch.Tensor, expected: torch.Tensor) -> bool:
    error = (got.float() - expected.float()).abs()
    return not error.numel() or bool(error.max() <= TOLERANCE * expected.float().abs().max())


def without_multicast(environ: MutableMapping[str, str]) -> None:
    """Has NCCL and torch leave NVLink multicast (NVLS) alone, unless `environ` says otherwise.

    Nothing here needs it, and where the links of a host are not set up for it, ranks fail or hang.
    """
    environ.setdefault("NCCL_NVLS_ENABLE", "0")
    environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")


def join(
    address: str,
    rank: int,
    size: int,
    device: str,
    timeout: float,
    ordinal: int | None = None,
    wires: SocketFactory | None = None,
) -> TorchCollectives:
    """Meets the other ranks at `address`, that of rank 0, and forms the group; see `meet`.

    ordinal: of this rank's GPU on its host, by default `rank`. wires: see `meet`.
    """
    backend = "nccl" if device == "cuda" else "gloo"
    if backend == "nccl":
        without_multicast(os.environ)
    if backend == "gloo" and addresses.is_loopback(addresses.host(address)):
        # Else gloo asks for the address of this host's name, which need not lead anywhere.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    formed = threading.Event()
    try:
        store = meet(address, rank, size, timeout, wires, formed)
        return TorchCollectives(
            store, rank, size, backend, timeout, rank if ordinal is None else ordinal
        )
    finally:
        formed.set()
