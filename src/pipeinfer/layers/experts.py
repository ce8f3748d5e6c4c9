"""The experts of a mixture that one rank has, as matrices: which, what of each, and their product.

Knows no router: rows come ordered by expert. Source: arxiv.org/abs/2101.03961.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from pipeinfer.kernels.formats import SCALE_BLOCK
from pipeinfer.layers.mlp import silu_and_multiply
from pipeinfer.layers.moe_backends import Grouped, StackedExperts, backend_on
from pipeinfer.layers.placement import Placement, Shard, Source
from pipeinfer.layers.rounded import RowRounding
from pipeinfer.layers.stack import Stack


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
        self._backend = backend_on(placement)
        kept = self.gate_up.scale is not None and self.down.scale is not None
        whole = hidden_size % SCALE_BLOCK == 0 and share % SCALE_BLOCK == 0
        self.rounding = RowRounding(SCALE_BLOCK, keeps=True) if kept and whole else None

    @property
    def grouped(self) -> Grouped | None:
        return None if self._backend is None else self._backend(self._stacked()).summed

    @property
    def unsummed(self) -> Grouped | None:
        if self._backend is None or self.held.count < self._of:
            return None
        return self._backend(self._stacked()).unsummed

    def _stacked(self) -> StackedExperts:
        gate_up, down = ((one.weight, one.scale) for one in (self.gate_up, self.down))
        return StackedExperts(gate_up, down, self.held.first, self._of, rounding=self.rounding)

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
