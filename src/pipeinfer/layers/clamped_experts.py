"""The experts of gpt-oss: a SwiGLU with bounds and a slope of its own, and biases.

On disk all experts of a layer are one tensor, its matrices [in, out], the rows of gate and up one
after the other in turn; in MXFP4 its matrices are [out, in]. Once they are final, gate comes first.
Knows no router. Source: https://arxiv.org/abs/2508.10925.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from pipeinfer.checkpoint.quantization import Mxfp4
from pipeinfer.layers.experts import Grouped, held_by, one_by_one
from pipeinfer.layers.matrix import Matrix
from pipeinfer.layers.mxfp4_values import Mxfp4Values
from pipeinfer.layers.placement import Placement, Source
from pipeinfer.settings import ConfigurationError


class ClampedExperts:
    """Experts (experts.py): (up + 1) * gate * sigmoid(slope * gate), gate at most `limit`, up
    within it on both sides."""

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
        self._on_gpu = placement.device.type == "cuda"
        self.held = held_by(placement.shard, num_experts, intermediate_size)
        count, share = self.held.count, self.held.share
        self._rows = placement.empty(count, 2 * share, hidden_size)
        self._row_biases = placement.empty(count, 2 * share)
        self._down = placement.empty(count, hidden_size, share)
        self._biases = placement.empty(count, hidden_size)
        self._stored = self._in_blocks(placement)
        # Of an expert that is split over the ranks, one rank adds the bias to the sum.
        self._adds = placement.shard.whole_experts or placement.shard.rank == 0
        biases = self._biases if self._adds else [None] * count
        self._experts = [
            (Matrix(rows, row_bias), Matrix(down, bias))
            for rows, row_bias, down, bias in zip(
                self._rows, self._row_biases, self._down, biases, strict=True
            )
        ]

    def _in_blocks(self, placement: Placement) -> tuple[Mxfp4Values, Mxfp4Values] | None:
        """Room for them as they are stored, of gate and up, and of down; None if that is plain."""
        form = placement.format(["experts"])
        if form is None:
            return None
        if form != Mxfp4():
            raise ConfigurationError(
                "experts with bounds are stored plain or in mxfp4, not in another number format"
            )
        (count, wide, hidden), share = self._rows.shape, self.held.share
        rows = Mxfp4Values.empty((count, wide, hidden), placement)
        return rows, Mxfp4Values.empty((count, hidden, share), placement)

    @property
    def grouped(self) -> Grouped | None:
        """On a GPU all experts are one kernel over the stacked weights, which are never packed."""
        if not self._on_gpu:
            return None
        from pipeinfer.kernels.moe import experts_mlp

        return self._by(experts_mlp)

    @property
    def unsummed(self) -> Grouped | None:
        if not self._on_gpu or self.held.count < self._num_experts:
            return None
        from pipeinfer.kernels.moe import experts_by_pair

        run = self._by(experts_by_pair)
        return lambda x, weights, experts: run(x, weights, experts).transpose(0, 1)

    def _by(self, kernels: Callable[..., torch.Tensor]) -> Grouped:
        """(x, weights, experts) to what `kernels` make of them and this rank's matrices."""
        from pipeinfer.kernels.moe import Bounded

        bounded = Bounded(*self._swiglu, self._row_biases, self._biases if self._adds else None)
        values, of = (self._rows, self._down), self._num_experts

        def run(x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
            first = self.held.first
            return kernels(x, *values, weights, experts, first=first, of=of, bounded=bounded)

        return run

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
        if self._stored is not None:
            self._stored[0].decode(self._rows)
            self._stored[1].decode(self._down)
        del self._stored
        for rows in (*self._rows, *self._row_biases):
            rows.copy_(torch.cat((rows[::2], rows[1::2])))
        if self._on_gpu:
            return
        del self._rows, self._down
        for matrices in self._experts:
            for matrix in matrices:
                matrix.pack()

    def sources(self, prefix: str) -> Iterator[Source]:
        """`prefix` is the path of the mixture, with its dot."""
        held, hidden = self.held, self._biases.shape[1]
        experts, every = slice(held.first, held.last), slice(0, hidden)
        wide, both = 2 * held.size, slice(2 * held.start, 2 * held.stop)
        name, of = f"{prefix}experts.", self._num_experts
        part, slices = slice(held.start, held.stop), (experts, both)
        yield Source(f"{name}gate_up_proj_bias", (of, wide), slices, self._row_biases)
        yield Source(f"{name}down_proj_bias", (of, hidden), (experts, every), self._biases)
        if self._stored is not None:
            rows, down = self._stored
            at = (experts, both, every)
            yield from rows.sources(f"{name}gate_up_proj", (of, wide, hidden), at)
            at = (experts, every, part)
            yield from down.sources(f"{name}down_proj", (of, hidden, held.size), at)
            return
        turned = self._rows.transpose(1, 2)
        at = (experts, every, both)
        yield Source(f"{name}gate_up_proj", (of, hidden, wide), at, turned)
        turned = self._down.transpose(1, 2)
        at = (experts, part, every)
        yield Source(f"{name}down_proj", (of, held.size, hidden), at, turned)
