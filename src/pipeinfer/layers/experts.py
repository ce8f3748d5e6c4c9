"""The experts of a mixture that one rank has, as matrices: which, what of each, and their product.

Knows no router: rows come ordered by expert. Source: arxiv.org/abs/2101.03961.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from pipeinfer.kernels.e4m3 import E4M3
from pipeinfer.kernels.fp8 import SIDE
from pipeinfer.layers.mlp import silu_and_multiply
from pipeinfer.layers.placement import Placement, Shard, Source
from pipeinfer.layers.rounded import RowRounding, Rows
from pipeinfer.layers.stack import Stack

if TYPE_CHECKING:
    from pipeinfer.kernels.moe import Bounded
    from pipeinfer.kernels.moe_e4m3 import Scaled

Grouped = Callable[[Rows, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Held:
    """A rank's part: experts first .. last - 1, and start .. stop - 1 of each one's `size`."""

    first: int
    last: int
    start: int
    stop: int
    size: int

    @property
    def count(self) -> int:
        """Experts."""
        return self.last - self.first

    @property
    def share(self) -> int:
        """Of the size of each."""
        return self.stop - self.start


def held_by(shard: Shard, num_experts: int, size: int) -> Held:
    """Some experts whole, or a share of each."""
    first, last = shard.expert_span(num_experts)
    start, stop = (0, size) if shard.whole_experts else shard.span(size)
    return Held(first, last, start, stop, size)


class Experts(Protocol):
    """x [pairs, hidden] ordered by expert, `counts` of each held, to outputs in the same order.

    grouped: the weighted sums by kernels from (x [T, hidden], weights, chosen), where there are
    such. unsummed: [top_k, T, hidden], what they are the sums of, where all experts are held.
    rounding: as a Weight's (matrix.py), for these two.
    """

    held: Held

    @property
    def rounding(self) -> RowRounding | None: ...

    @property
    def grouped(self) -> Grouped | None: ...

    @property
    def unsummed(self) -> Grouped | None: ...

    def __call__(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor: ...

    def pack(self) -> None: ...

    def sources(self, prefix: str) -> Iterator[Source]: ...


def one_by_one(
    x: torch.Tensor, counts: list[int], experts: list[Callable[[torch.Tensor], torch.Tensor]]
) -> torch.Tensor:
    """Each expert that got rows computes them."""
    parts = zip(x.split(counts), experts, strict=True)
    outputs = [expert(rows) for rows, expert in parts if rows.shape[0]]
    return torch.cat(outputs) if outputs else x


@dataclass(frozen=True)
class Stacked:
    """Experts `first` and following of `of` on all ranks, on a GPU: kernels compute them, without a
    look at the choice on the host, over stacked matrices, which are never packed.

    gate_up, down: a weight and its scale, and bounded, as kernels/moe.py takes them.
    """

    gate_up: tuple[torch.Tensor, torch.Tensor | None]
    down: tuple[torch.Tensor, torch.Tensor | None]
    first: int
    of: int
    bounded: Bounded | None = None

    def summed(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """As Experts' `grouped`."""
        from pipeinfer.kernels.moe import experts_mlp

        return experts_mlp(*self._given(x, weights, experts))

    def unsummed(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        """As Experts' `unsummed`."""
        from pipeinfer.kernels.moe import experts_by_pair

        return experts_by_pair(*self._given(x, weights, experts)).transpose(0, 1)

    def _given(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
    ) -> tuple[Any, ...]:
        (gate_up, gate_up_scale), (down, down_scale) = self.gate_up, self.down
        where = None, self.first, self.of
        return x, gate_up, down, weights, experts, *where, gate_up_scale, down_scale, self.bounded


@dataclass(frozen=True)
class RoundedStack:
    """The same in FP8, where rows are rounded to that, too. Sizes are whole blocks of 128."""

    gate_up: Scaled
    down: Scaled
    first: int
    of: int
    rounding: RowRounding

    def summed(self, x: Rows, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """As Experts' `grouped`."""
        from pipeinfer.kernels.moe import sums

        by_pair, held = self._by_pair(x, weights, experts), len(self.down[0])
        return sums(by_pair, experts.contiguous(), self.first if held < self.of else None, held)

    def unsummed(self, x: Rows, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """As Experts' `unsummed`."""
        return self._by_pair(x, weights, experts).transpose(0, 1)

    def _by_pair(self, x: Rows, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        from pipeinfer.kernels.moe_e4m3 import rounded_by_pair

        rows = x if x.dtype == E4M3 else self.rounding.rows(x)
        taken, span = (rows.values, rows.scale), (self.first, self.of)
        return rounded_by_pair(taken, self.gate_up, self.down, weights, experts, span)


class GatedExperts:
    """SwiGLU blocks without biases."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, num_experts: int, placement: Placement
    ) -> None:
        self.held = held_by(placement.shard, num_experts, intermediate_size)
        self._hidden_size = hidden_size
        count, share = self.held.count, self.held.share
        each = [f"experts.{expert}" for expert in range(num_experts)]
        rows = [f"{expert}.{part}" for expert in each for part in ("gate_proj", "up_proj")]
        down = [f"{expert}.down_proj" for expert in each]
        self.gate_up = Stack(placement, rows, (count, 2 * share, hidden_size))
        self.down = Stack(placement, down, (count, hidden_size, share))
        self._of = num_experts
        self._on_gpu = placement.device.type == "cuda"
        kept = self.gate_up.scale is not None and self.down.scale is not None
        whole = hidden_size % SIDE == 0 and share % SIDE == 0
        self.rounding = RowRounding(SIDE, keeps=True) if kept and whole else None

    @property
    def grouped(self) -> Grouped | None:
        return self._stacked().summed if self._on_gpu else None

    @property
    def unsummed(self) -> Grouped | None:
        if not self._on_gpu or self.held.count < self._of:
            return None
        return self._stacked().unsummed

    def _stacked(self) -> Stacked | RoundedStack:
        gate_up, down = ((one.weight, one.scale) for one in (self.gate_up, self.down))
        where = self.held.first, self._of
        if self.rounding is None:
            return Stacked(gate_up, down, *where)
        return RoundedStack(cast("Scaled", gate_up), cast("Scaled", down), *where, self.rounding)

    def __call__(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        return one_by_one(x, counts, [self._expert(index) for index in range(self.held.count)])

    def _expert(self, index: int) -> Callable[[torch.Tensor], torch.Tensor]:
        gate_up, down = self.gate_up.matrices[index], self.down.matrices[index]
        return lambda rows: down(silu_and_multiply(gate_up(rows)))

    def pack(self) -> None:
        """To be called when the weights are final."""
        self.gate_up.pack()
        self.down.pack()

    def sources(self, prefix: str) -> Iterator[Source]:
        """`prefix` is the path of the mixture, with its dot. On disk each expert is by itself."""
        held, hidden = self.held, self._hidden_size
        part, every = slice(held.start, held.stop), slice(0, hidden)
        column, row = (held.size, hidden), (hidden, held.size)
        gate, up = slice(0, held.share), slice(held.share, 2 * held.share)
        pairs = zip(self.gate_up.matrices, self.down.matrices, strict=True)
        for expert, (gate_up, down) in enumerate(pairs, held.first):
            name = f"{prefix}experts.{expert}."
            yield from gate_up.sources(f"{name}gate_proj", gate, column, (part, every))
            yield from gate_up.sources(f"{name}up_proj", up, column, (part, every))
            yield from down.sources(f"{name}down_proj", every, row, (every, part))
