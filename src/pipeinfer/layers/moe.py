"""Mixture of experts: a router picks a few gated feed-forward blocks for each token.

Every expert is split over all ranks, like a dense block. Knows no model. The work is ordered by
expert, so each expert that got tokens is two matrix products. Source: arxiv.org/abs/2101.03961.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from pipeinfer.layers.matrix import Matrix
from pipeinfer.layers.mlp import silu_and_multiply
from pipeinfer.layers.placement import Placement, Source, whole

Grouped = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class SparseMLP:
    """[T, hidden] to [T, hidden]; `normalize` makes the chosen experts' weights add up to one."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        normalize: bool,
        placement: Placement,
    ) -> None:
        self._placement = placement
        self._intermediate = intermediate_size
        self._start, self._stop = placement.shard.span(intermediate_size)
        self._top_k = top_k
        self._normalize = normalize
        share = self._stop - self._start
        self.num_experts = num_experts
        self.router = Matrix(placement.empty(num_experts, hidden_size))
        stacked = placement.empty(num_experts, 2 * share, hidden_size)
        self.gate_up = [Matrix(weight) for weight in stacked]
        rows = placement.empty(num_experts, hidden_size, share)
        self.down = [Matrix(weight) for weight in rows]
        # On a GPU all experts are one kernel over the stacked weights, which are never packed.
        self._grouped = _grouped(stacked, rows) if placement.device.type == "cuda" else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weights, experts = self._route(x)
        if self._grouped is not None:
            return self._placement.reduce(self._grouped(x, weights, experts))
        pairs = experts.flatten()  # pair i is token i // top_k
        order = pairs.argsort(stable=True)
        counts = pairs.bincount(minlength=self.num_experts).tolist()
        outputs = self._experts(x[order // self._top_k], counts)
        by_pair = torch.empty_like(outputs)
        by_pair[order] = outputs
        # Summed per token in the router's order: not a matter of which other tokens there are.
        by_pair = by_pair.view(*weights.shape, -1).mul_(weights[..., None])
        return self._placement.reduce(by_pair.sum(dim=1))

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights in x's dtype and experts int64, both [T, top_k]."""
        scores = self.router(x).softmax(dim=-1, dtype=torch.float32)
        weights, experts = scores.topk(self._top_k, dim=-1)
        if self._normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), experts

    def _experts(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """x [pairs, hidden] ordered by expert; the outputs in the same order."""
        outputs = [
            down(silu_and_multiply(gate_up(rows)))
            for rows, gate_up, down in zip(x.split(counts), self.gate_up, self.down, strict=True)
            if rows.shape[0]
        ]
        return torch.cat(outputs) if outputs else x

    def pack(self) -> None:
        """To be called when the weights are final."""
        for matrix in (self.router, *self.gate_up, *self.down):
            matrix.pack()

    def sources(self, prefix: str) -> Iterator[Source]:
        """`prefix` is the path of this module, with its dot. On disk each expert is by itself."""
        shape = experts, hidden = tuple(self.router.weight.shape)
        yield Source(f"{prefix}gate.weight", shape, whole(shape), self.router.weight)
        held = slice(self._start, self._stop)
        share = self._stop - self._start
        column = (self._intermediate, hidden)
        row = (hidden, self._intermediate)
        for expert in range(experts):
            name = f"{prefix}experts.{expert}."
            gate, up = self.gate_up[expert].weight.split(share)
            yield Source(f"{name}gate_proj.weight", column, (held, slice(0, hidden)), gate)
            yield Source(f"{name}up_proj.weight", column, (held, slice(0, hidden)), up)
            down = self.down[expert].weight
            yield Source(f"{name}down_proj.weight", row, (slice(0, hidden), held), down)


def _grouped(gate_up: torch.Tensor, down: torch.Tensor) -> Grouped:
    """(x, weights, experts) to the weighted sum, without a look at the choice on the host."""
    from pipeinfer.kernels.moe import experts_mlp

    def run(x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        return experts_mlp(x, gate_up, down, weights, experts)

    return run
