"""Where a layer's weights live: which share of them, in which dtype, on which device.

Also the two vocabularies that all layers speak: `Source` (what a parameter is filled from) and
`Collectives` (how ranks add up and gather). Knows no model and no file format.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from pipeinfer.layers.partial_sum import Fusion, PartialSum


@dataclass(frozen=True)
class Shard:
    """Rank `rank` of `size` tensor-parallel ranks.

    whole_experts: of a mixture each rank has some experts, instead of a share of every one.
    """

    rank: int = 0
    size: int = 1
    whole_experts: bool = False

    def span(self, total: int) -> tuple[int, int]:
        """This rank's [start, stop) of `total` things, which must divide evenly."""
        if total % self.size:
            raise ValueError(f"{total} does not divide by {self.size} ranks")
        share = total // self.size
        return self.rank * share, (self.rank + 1) * share

    def expert_span(self, num_experts: int) -> tuple[int, int]:
        """This rank's experts, [start, stop): as many as another's, or one more or less."""
        if not self.whole_experts:
            return 0, num_experts
        return self.rank * num_experts // self.size, (self.rank + 1) * num_experts // self.size

    def kv_span(self, num_kv_heads: int) -> tuple[int, int]:
        """This rank's KV heads; where there are fewer heads than ranks they are replicated."""
        if num_kv_heads >= self.size:
            return self.span(num_kv_heads)
        if self.size % num_kv_heads:
            raise ValueError(f"{self.size} ranks do not divide by {num_kv_heads} KV heads")
        head = self.rank * num_kv_heads // self.size
        return head, head + 1


class Collectives(Protocol):
    """Collectives over the ranks of a shard; all ranks call them in the same order."""

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, same shape; may reuse the input."""
        ...

    def all_gather(self, partial: torch.Tensor) -> torch.Tensor:
        """[..., n] of every rank, concatenated in the order of ranks: [..., n * size]."""
        ...


@dataclass(frozen=True)
class Placement:
    """What every layer is built with. Without `collectives` only one rank alone can run.

    compiled: element-wise operations by torch.compile, where no kernel fuses them.
    fusion: makes the sums that go into the residual stream, if it takes them.
    defers_sums: whether a layer may hand on a sum that is still to be made (partial_sum.py).
    """

    shard: Shard
    dtype: torch.dtype
    device: torch.device
    collectives: Collectives | None = None
    compiled: bool = False
    fusion: Fusion | None = None
    defers_sums: bool = True

    def summed(self) -> Placement:
        """For layers whose sums must be made before they reach the residual stream."""
        return replace(self, fusion=None, defers_sums=False)

    def empty(self, *shape: int) -> torch.Tensor:
        """A parameter, not yet filled."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    @property
    def alone(self) -> bool:
        """One rank: nothing to add up or gather."""
        return self.shard.size == 1

    def reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum of `partial` over the ranks."""
        return partial if self.alone else self._collectives().all_reduce(partial)

    def later(self, partial: torch.Tensor) -> torch.Tensor | PartialSum:
        """Sum of `partial` [T, size] over the ranks, to be made by the norm if that can."""
        buffer = None if self.fusion is None else self.fusion.buffer(*partial.shape)
        if self.fusion is None or buffer is None:
            return self.reduce(partial)
        return PartialSum(buffer.copy_(partial), self.fusion)

    def gather(self, partial: torch.Tensor) -> torch.Tensor:
        """`partial` of all ranks side by side in the last dimension."""
        return partial if self.alone else self._collectives().all_gather(partial)

    def _collectives(self) -> Collectives:
        if self.collectives is None:
            raise RuntimeError(
                f"rank {self.shard.rank} of {self.shard.size} cannot run without collectives"
            )
        return self.collectives


@dataclass(frozen=True)
class Source:
    """Tensor `name` of the checkpoint, of shape `shape`, fills `target` with its `slices`.

    `target` is a view into a parameter of this rank; slices of fewer dimensions are broadcast.
    """

    name: str
    shape: tuple[int, ...]
    slices: tuple[slice, ...]
    target: torch.Tensor


def whole(shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The slices that are everything."""
    return tuple(slice(0, size) for size in shape)
