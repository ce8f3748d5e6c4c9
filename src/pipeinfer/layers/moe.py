"""Mixture of experts: a router picks a few gated feed-forward blocks for each token.

Over several ranks either every expert is split, like a dense block, or each rank has some experts
whole; the sum over ranks is the same. Knows no model, and not how a router chooses. The work is
ordered by expert, so each expert that got tokens is two matrix products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from pipeinfer.layers.matrix import Matrix
from pipeinfer.layers.mlp import GatedMLP, silu_and_multiply
from pipeinfer.layers.partial_sum import PartialSum
from pipeinfer.layers.placement import Placement, Source
from pipeinfer.layers.routing import Router, Sigmoids

Grouped = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class SharedExpert:
    """What every token goes to beside a mixture, split over the ranks as any dense block.

    gated: times the sigmoid of a product of its own, called as `name` and "_gate" on disk.
    """

    def __init__(self, name: str, mlp: GatedMLP, gated: bool, placement: Placement) -> None:
        self._name = name
        self._mlp = mlp
        hidden_size = mlp.gate_up.matrix.weight.shape[1]
        self._gate = Sigmoids(1, hidden_size, placement) if gated else None

    def share(self, x: torch.Tensor) -> torch.Tensor:
        """What this rank adds to the sum over ranks, [T, hidden]."""
        out = self._mlp.share(x)
        return out if self._gate is None else out.mul_(self._gate(x))

    def pack(self) -> None:
        """To be called when the weights are final."""
        self._mlp.pack()
        if self._gate is not None:
            self._gate.pack()

    def sources(self, prefix: str) -> Iterator[Source]:
        """`prefix` is the path of the mixture, with its dot."""
        yield from self._mlp.sources(f"{prefix}{self._name}.")
        if self._gate is not None:
            yield from self._gate.sources(f"{prefix}{self._name}_gate.")


class SparseMLP:
    """[T, hidden] to [T, hidden]: the weighted sum of the experts that `router` chooses, plus what
    `shared` gives."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        router: Router,
        placement: Placement,
        shared: SharedExpert | None = None,
    ) -> None:
        num_experts = router.num_experts
        self._placement = placement
        self._intermediate = intermediate_size
        shard = placement.shard
        self.first, stop = shard.expert_span(num_experts)  # this rank's experts
        self._start, self._stop = 0, intermediate_size  # and what of each
        if not shard.whole_experts:
            self._start, self._stop = shard.span(intermediate_size)
        held, share = stop - self.first, self._stop - self._start
        self.router = router
        self._shared = shared
        stacked = placement.empty(held, 2 * share, hidden_size)
        self.gate_up = [Matrix(weight) for weight in stacked]
        rows = placement.empty(held, hidden_size, share)
        self.down = [Matrix(weight) for weight in rows]
        # On a GPU all experts are one kernel over the stacked weights, which are never packed.
        on_gpu = placement.device.type == "cuda"
        self._grouped = _grouped(stacked, rows, self.first, num_experts) if on_gpu else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor | PartialSum:
        share = self._share(x)
        if self._shared is not None:
            share += self._shared.share(x)
        return self._placement.later(share)

    def _share(self, x: torch.Tensor) -> torch.Tensor:
        """What this rank's experts add to the sum, [T, hidden]."""
        weights, experts = self.router(x)
        if self._grouped is not None:
            return self._grouped(x, weights, experts)
        held, top_k = len(self.down), experts.shape[1]
        pairs = experts.flatten() - self.first  # pair i is token i // top_k
        if held < self.router.num_experts:
            pairs[(pairs < 0) | (pairs >= held)] = held  # another rank's: behind all others
        order = pairs.argsort(stable=True)
        counts = pairs.bincount(minlength=held + 1).tolist()[:held]
        order = order[: sum(counts)]
        outputs = self._experts(x[order // top_k], counts)
        by_pair = outputs.new_zeros(len(pairs), x.shape[1])
        by_pair[order] = outputs
        # Summed per token in the router's order: not a matter of which other tokens there are.
        return by_pair.view(*weights.shape, -1).mul_(weights[..., None]).sum(dim=1)

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
        self.router.pack()
        if self._shared is not None:
            self._shared.pack()
        for matrix in (*self.gate_up, *self.down):
            matrix.pack()

    def sources(self, prefix: str) -> Iterator[Source]:
        """`prefix` is the path of this module, with its dot. On disk each expert is by itself."""
        yield from self.router.sources(f"{prefix}gate.")
        if self._shared is not None:
            yield from self._shared.sources(prefix)
        hidden = self.down[0].weight.shape[0]
        held = slice(self._start, self._stop)
        share = self._stop - self._start
        column = (self._intermediate, hidden)
        row = (hidden, self._intermediate)
        for expert in range(len(self.down)):
            name = f"{prefix}experts.{self.first + expert}."
            gate, up = self.gate_up[expert].weight.split(share)
            yield Source(f"{name}gate_proj.weight", column, (held, slice(0, hidden)), gate)
            yield Source(f"{name}up_proj.weight", column, (held, slice(0, hidden)), up)
            down = self.down[expert].weight
            yield Source(f"{name}down_proj.weight", row, (slice(0, hidden), held), down)


def _grouped(gate_up: torch.Tensor, down: torch.Tensor, first: int, of: int) -> Grouped:
    """(x, weights, experts) to the weighted sum, without a look at the choice on the host.

    The weights are those of experts `first` and following; there are `of` on all ranks.
    """
    from pipeinfer.kernels.moe import experts_mlp

    def run(x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        return experts_mlp(x, gate_up, down, weights, experts, first=first, of=of)

    return run
