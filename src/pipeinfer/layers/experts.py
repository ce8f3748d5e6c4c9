"""The experts of a mixture that one rank has, as matrices: which, what of each, and their product.

Knows no router: rows come ordered by expert. Source: arxiv.org/abs/2101.03961.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from pipeinfer.layers.matrix import Matrix
from pipeinfer.layers.mlp import silu_and_multiply
from pipeinfer.layers.placement import Placement, Shard, Source

Grouped = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


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

    grouped: the same by one kernel from (x [T, hidden], weights, chosen), where there is one.
    """

    held: Held

    @property
    def grouped(self) -> Grouped | None: ...

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
        count, share = self.held.count, self.held.share
        stacked = placement.empty(count, 2 * share, hidden_size)
        self.gate_up = [Matrix(weight) for weight in stacked]
        rows = placement.empty(count, hidden_size, share)
        self.down = [Matrix(weight) for weight in rows]
        # On a GPU all experts are one kernel over the stacked weights, which are never packed.
        on_gpu = placement.device.type == "cuda"
        self.grouped = _grouped(stacked, rows, self.held.first, num_experts) if on_gpu else None

    def __call__(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        return one_by_one(x, counts, [self._expert(index) for index in range(len(self.down))])

    def _expert(self, index: int) -> Callable[[torch.Tensor], torch.Tensor]:
        gate_up, down = self.gate_up[index], self.down[index]
        return lambda rows: down(silu_and_multiply(gate_up(rows)))

    def pack(self) -> None:
        """To be called when the weights are final."""
        for matrix in (*self.gate_up, *self.down):
            matrix.pack()

    def sources(self, prefix: str) -> Iterator[Source]:
        """`prefix` is the path of the mixture, with its dot. On disk each expert is by itself."""
        held = self.held
        hidden = self.down[0].weight.shape[0]
        part = slice(held.start, held.stop)
        column, row = (held.size, hidden), (hidden, held.size)
        for expert in range(len(self.down)):
            name = f"{prefix}experts.{held.first + expert}."
            gate, up = self.gate_up[expert].weight.split(held.share)
            yield Source(f"{name}gate_proj.weight", column, (part, slice(0, hidden)), gate)
            yield Source(f"{name}up_proj.weight", column, (part, slice(0, hidden)), up)
            down = self.down[expert].weight
            yield Source(f"{name}down_proj.weight", row, (slice(0, hidden), part), down)


def _grouped(gate_up: torch.Tensor, down: torch.Tensor, first: int, of: int) -> Grouped:
    """(x, weights, experts) to the weighted sum, without a look at the choice on the host.

    The weights are those of experts `first` and following; there are `of` on all ranks.
    """
    from pipeinfer.kernels.moe import experts_mlp

    def run(x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        return experts_mlp(x, gate_up, down, weights, experts, first=first, of=of)

    return run
