"""The experts of a mixture that one rank has, as matrices: which, what of each, and their product.

Knows no router: rows come ordered by expert. Source: arxiv.org/abs/2101.03961.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from pipeinfer.kernels.fp8 import SIDE
from pipeinfer.layers.mlp import silu_and_mul
from pipeinfer.layers.moe_backends import FusedExperts, StackedExperts, choose_backend
from pipeinfer.layers.placement import Placement, Shard, WeightSource
from pipeinfer.layers.rounded import ActivationQuantizer
from pipeinfer.layers.stack import PerExpertWeights


@dataclass(frozen=True)
class ExpertShard:
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
    def local_size(self) -> int:
        """Of the size of each."""
        return self.stop - self.start


def expert_shard(shard: Shard, num_experts: int, size: int) -> ExpertShard:
    """Some experts whole, or a share of each."""
    first, last = shard.expert_span(num_experts)
    start, stop = (0, size) if shard.expert_parallel else shard.span(size)
    return ExpertShard(first, last, start, stop, size)


class LocalExperts(Protocol):
    """x [pairs, hidden] ordered by expert, `counts` of each held, to outputs in the same order.

    grouped: the weighted sums by kernels from (x [T, hidden], weights, chosen), where there are
    such. unsummed: [top_k, T, hidden], what they are the sums of, where all experts are held.
    rounding: as a Weight's (matrix.py), for these two.
    """

    shard: ExpertShard

    @property
    def input_quantizer(self) -> ActivationQuantizer | None: ...

    @property
    def fused(self) -> FusedExperts | None: ...

    @property
    def unsummed(self) -> FusedExperts | None: ...

    def __call__(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor: ...

    def pack(self) -> None: ...

    def sources(self, prefix: str) -> Iterator[WeightSource]: ...


def sequential_experts(
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
        self.shard = expert_shard(placement.shard, num_experts, intermediate_size)
        self._hidden_size = hidden_size
        count, share = self.shard.count, self.shard.local_size
        each = [f"experts.{expert}" for expert in range(num_experts)]
        rows = [f"{expert}.{part}" for expert in each for part in ("gate_proj", "up_proj")]
        down = [f"{expert}.down_proj" for expert in each]
        self.gate_up = PerExpertWeights(placement, rows, (count, 2 * share, hidden_size))
        self.down = PerExpertWeights(placement, down, (count, hidden_size, share))
        self._num_experts = num_experts
        self._backend = choose_backend(placement)
        kept = self.gate_up.scale is not None and self.down.scale is not None
        whole = hidden_size % SIDE == 0 and share % SIDE == 0
        self.input_quantizer = (
            ActivationQuantizer(SIDE, keep_unquantized=True) if kept and whole else None
        )

    @property
    def fused(self) -> FusedExperts | None:
        return None if self._backend is None else self._backend(self._stacked()).summed

    @property
    def unsummed(self) -> FusedExperts | None:
        if self._backend is None or self.shard.count < self._num_experts:
            return None
        return self._backend(self._stacked()).unsummed

    def _stacked(self) -> StackedExperts:
        gate_up, down = ((one.stacked, one.scale) for one in (self.gate_up, self.down))
        return StackedExperts(
            gate_up, down, self.shard.first, self._num_experts, input_quantizer=self.input_quantizer
        )

    def __call__(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        return sequential_experts(
            x, counts, [self._expert(index) for index in range(self.shard.count)]
        )

    def _expert(self, index: int) -> Callable[[torch.Tensor], torch.Tensor]:
        gate_up, down = self.gate_up.weights[index], self.down.weights[index]
        return lambda rows: down(silu_and_mul(gate_up(rows)))

    def pack(self) -> None:
        """To be called when the weights are final."""
        self.gate_up.pack()
        self.down.pack()

    def sources(self, prefix: str) -> Iterator[WeightSource]:
        """`prefix` is the path of the mixture, with its dot. On disk each expert is by itself."""
        held, hidden = self.shard, self._hidden_size
        part, every = slice(held.start, held.stop), slice(0, hidden)
        column, row = (held.size, hidden), (hidden, held.size)
        gate, up = slice(0, held.local_size), slice(held.local_size, 2 * held.local_size)
        pairs = zip(self.gate_up.weights, self.down.weights, strict=True)
        for expert, (gate_up, down) in enumerate(pairs, held.first):
            name = f"{prefix}experts.{expert}."
            yield from gate_up.sources(f"{name}gate_proj", gate, column, (part, every))
            yield from gate_up.sources(f"{name}up_proj", up, column, (part, every))
            yield from down.sources(f"{name}down_proj", every, row, (every, part))
