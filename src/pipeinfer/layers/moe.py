"""Mixture of experts: a router picks a few gated feed-forward blocks for each token.

Over several ranks either every expert is split, like a dense block, or each rank has some experts
whole; the sum over ranks is the same. Knows no model, not how a router chooses, and
not what an expert is. The work is ordered by expert, so that each computes its tokens at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pipeinfer.layers.experts import LocalExperts
from pipeinfer.layers.mlp import GatedMLP
from pipeinfer.layers.partial_sum import PartialSum
from pipeinfer.layers.placement import Placement, WeightSource
from pipeinfer.layers.rounded import ActivationQuantizer, Activations, unquantized
from pipeinfer.layers.routing import SigmoidLinear, TopKRouter
from pipeinfer.layers.skinny import small_m_gemm


class SharedExpert:
    """What every token goes to beside a mixture, split over the ranks as any dense block.

    gated: times the sigmoid of a product of its own, called as `name` and "_gate" on disk.
    """

    def __init__(self, name: str, mlp: GatedMLP, gated: bool, placement: Placement) -> None:
        self._name = name
        self._mlp = mlp
        self._gate = SigmoidLinear(1, mlp.hidden_size, placement) if gated else None

    def unreduced(self, x: torch.Tensor) -> torch.Tensor:
        """What this rank adds to the sum over ranks, [T, hidden]."""
        out = self._mlp.unreduced(x)
        return out if self._gate is None else out.mul_(self._gate(x))

    def pack(self) -> None:
        """To be called when the weights are final."""
        self._mlp.pack()
        if self._gate is not None:
            self._gate.pack()

    def sources(self, prefix: str) -> Iterator[WeightSource]:
        """`prefix` is the path of the mixture, with its dot."""
        yield from self._mlp.sources(f"{prefix}{self._name}.")
        if self._gate is not None:
            yield from self._gate.sources(f"{prefix}{self._name}_gate.")


class SparseMoeBlock:
    """[T, hidden] to [T, hidden]: the weighted sum of the experts that `router` chooses, plus what
    `shared` gives."""

    def __init__(
        self,
        router: TopKRouter,
        experts: LocalExperts,
        placement: Placement,
        shared: SharedExpert | None = None,
    ) -> None:
        self._router = router
        self._experts = experts
        self._placement = placement
        self._shared = shared
        defers = placement.single_rank and placement.defers_sums and shared is None
        self._summing = small_m_gemm(placement.device, placement.dtype) if defers else None

    @property
    def input_quantizer(self) -> ActivationQuantizer | None:
        """See Weight (matrix.py)."""
        return self._experts.input_quantizer

    def __call__(self, x: Activations) -> torch.Tensor | PartialSum:
        plain = unquantized(x)
        unsummed = None if self._summing is None else self._experts.unsummed
        if self._summing is not None and unsummed is not None:
            return PartialSum(unsummed(x, *self._router(plain)), self._summing)
        share = self._routed(x)
        if self._shared is not None:
            share += self._shared.unreduced(plain)
        return self._placement.reduce_deferred(share)

    def _routed(self, x: Activations) -> torch.Tensor:
        """What this rank's experts add to the sum, [T, hidden]."""
        weights, experts = self._router(unquantized(x))
        grouped = self._experts.fused
        if grouped is not None:
            return grouped(x, weights, experts)
        held, top_k = self._experts.shard, experts.shape[1]
        pairs = experts.flatten() - held.first  # pair i is token i // top_k
        if held.count < self._router.num_experts:
            pairs[(pairs < 0) | (pairs >= held.count)] = held.count  # another's: behind all others
        order = pairs.argsort(stable=True)
        counts = pairs.bincount(minlength=held.count + 1).tolist()[: held.count]
        order = order[: sum(counts)]
        outputs = self._experts(x[order // top_k], counts)
        by_pair = outputs.new_zeros(len(pairs), x.shape[1])
        by_pair[order] = outputs
        # Summed per token in the router's order: not a matter of which other tokens there are.
        return by_pair.view(*weights.shape, -1).mul_(weights[..., None]).sum(dim=1)

    def pack(self) -> None:
        """To be called when the weights are final."""
        self._router.pack()
        self._experts.pack()
        if self._shared is not None:
            self._shared.pack()

    def sources(self, prefix: str) -> Iterator[WeightSource]:
        """`prefix` is the path of this module, with its dot."""
        yield from self._router.sources(prefix)
        yield from self._experts.sources(prefix)
        if self._shared is not None:
            yield from self._shared.sources(prefix)
