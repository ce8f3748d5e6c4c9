"""The experts of gpt-oss: a SwiGLU with bounds and a slope of its own, and biases.

On disk all experts of a layer are one tensor, the rows of gate and up one after the other in turn.
Once they are final, gate comes first. Knows no router. Source: https://arxiv.org/abs/2508.10925.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from pipeinfer.layers.experts import held_by, one_by_one
from pipeinfer.layers.matrix import Matrix
from pipeinfer.layers.merged_stack import MergedStack, one_after_the_other
from pipeinfer.layers.moe_backends import Grouped, StackedExperts, backend_on
from pipeinfer.layers.placement import Placement, Source


class ClampedExperts:
    """Experts (experts.py): (up + 1) * gate * sigmoid(slope * gate), gate at most `limit`, up
    within it on both sides. One by one only where their matrices are plain."""

    rounding = None

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        swiglu: tuple[float, float],
        placement: Placement,
    ) -> None:
        self._swiglu = swiglu
        self._num_experts = num_experts
        self._backend = backend_on(placement)
        self.held = held_by(placement.shard, num_experts, intermediate_size)
        count, share, form = self.held.count, self.held.share, placement.format(["experts"])
        self.gate_up = MergedStack(form, (count, 2 * share, hidden_size), placement, halves=True)
        self._row_biases = placement.empty(count, 2 * share)
        self.down = MergedStack(form, (count, hidden_size, share), placement)
        self._biases = placement.empty(count, hidden_size)
        # Of an expert that is split over the ranks, one rank adds the bias to the sum.
        self._adds = placement.shard.whole_experts or placement.shard.rank == 0
        self._experts = self._matrices()

    def _matrices(self) -> list[tuple[Matrix, Matrix]]:
        """Gate and up, and down of each expert; none where they are not plain."""
        rows, down = self.gate_up.plain, self.down.plain
        if rows is None or down is None:
            return []
        biases = self._biases if self._adds else [None] * self.held.count
        return [
            (Matrix(one, row_bias), Matrix(other, bias))
            for one, row_bias, other, bias in zip(rows, self._row_biases, down, biases, strict=True)
        ]

    @property
    def grouped(self) -> Grouped | None:
        return None if self._backend is None else self._backend(self._stacked()).summed

    @property
    def unsummed(self) -> Grouped | None:
        if self._backend is None or self.held.count < self._num_experts:
            return None
        return self._backend(self._stacked()).unsummed

    def _stacked(self) -> StackedExperts:
        from pipeinfer.kernels.moe import ClampedSwiglu

        bounded = ClampedSwiglu(
            *self._swiglu, self._row_biases, self._biases if self._adds else None
        )
        gate_up, down = self.gate_up.packed, self.down.packed
        return StackedExperts(gate_up, down, self.held.first, self._num_experts, bounded)

    def __call__(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        return one_by_one(x, counts, [self._expert(*matrices) for matrices in self._experts])

    def _expert(self, gate_up: Matrix, down: Matrix) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda rows: down(self._activate(gate_up(rows)))

    def _activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        slope, limit = self._swiglu
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
        return up.add_(1.0).mul_(gate.mul(slope).sigmoid_().mul_(gate))

    def pack(self) -> None:
        """To be called once, when the weights are final."""
        self.gate_up.pack()
        self.down.pack()
        one_after_the_other(self._row_biases)
        if self._backend is not None:
            return
        del self.gate_up, self.down
        for matrices in self._experts:
            for matrix in matrices:
                matrix.pack()

    def sources(self, prefix: str) -> Iterator[Source]:
        """`prefix` is the path of the mixture, with its dot."""
        held, hidden, of = self.held, self._biases.shape[1], self._num_experts
        experts, every = slice(held.first, held.last), slice(0, hidden)
        wide, both = 2 * held.size, slice(2 * held.start, 2 * held.stop)
        name, part = f"{prefix}experts.", slice(held.start, held.stop)
        at = experts, both
        yield Source(f"{name}gate_up_proj_bias", (of, wide), at, self._row_biases)
        at = experts, every
        yield Source(f"{name}down_proj_bias", (of, hidden), at, self._biases)
        at = experts, both, every
        yield from self.gate_up.sources(f"{name}gate_up_proj", (of, wide, hidden), at)
        at = experts, every, part
        yield from self.down.sources(f"{name}down_proj", (of, hidden, held.size), at)
