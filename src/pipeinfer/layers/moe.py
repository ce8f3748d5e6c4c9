"""Mixture of experts: a router picks a few gated feed-forward blocks for each token.

Over several ranks either every expert is split, like a dense block, or each rank has some experts
whole; the sum over ranks is the same. A router is the same on all ranks, and a token's experts
depend on no other token. The work is ordered by expert, so that each computes its tokens at once.
Knows no model and not what an expert is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch

from pipeinfer.layers.experts import LocalExperts
from pipeinfer.layers.linear import GatedMLP
from pipeinfer.layers.placement import (
    IN_TORCH,
    ParameterMemory,
    PartialSum,
    Placement,
    WeightSource,
    full_slices,
)
from pipeinfer.layers.weight import (
    ActivationQuantizer,
    Activations,
    UnquantizedWeight,
    exact_gemm_for,
    small_m_gemm_for,
    unquantized,
)


class TopKRouter(Protocol):
    """Chooses each token's experts, and their weights."""

    num_experts: int

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, hidden] to weights, of any float dtype, and experts, int32 or int64, both
        [T, top_k]."""
        ...

    def pack(self, memory: ParameterMemory = IN_TORCH, /) -> None: ...

    def sources(self, prefix: str) -> Iterator[WeightSource]: ...


class SoftmaxRouter:
    """Chooses the most probable experts; weights are their probabilities.

    Source: arxiv.org/abs/2101.03961.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        normalize: bool,
        placement: Placement,
        name: str = "gate",
        bias: bool = False,
    ) -> None:
        """Router that is not filled yet.

        - normalize: the weights of a token's experts add up to one
        - name: on disk
        """
        self.num_experts = num_experts
        self._name = name
        exact = exact_gemm_for(placement)
        self.weight = UnquantizedWeight(
            placement.matrix(num_experts, hidden_size),
            placement.empty(num_experts) if bias else None,
            exact,
        )
        self._top_k = top_k
        self._normalize = normalize
        self._top_k_of = _softmax_top_k_on(placement.device)
        several = exact is None  # split-K parts add up in another order than a chain
        self._small_m = small_m_gemm_for(placement.device, placement.dtype) if several else None

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights in x's dtype."""
        return self._top_k_of(self._logits(x), self._top_k, self._normalize, x.dtype)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        """Returns logits [T, experts], or split-K parts [split_k, T, experts]."""
        if self._small_m is not None:
            partial = self._small_m.split_k_parts(x, self.weight.weight, self.weight.bias)
            if partial is not None:
                return partial
        return self.weight(x)

    def pack(self, memory: ParameterMemory = IN_TORCH) -> None:
        """Packs the weights; to be called when they are final."""
        self.weight.pack(memory)

    def sources(self, prefix: str) -> Iterator[WeightSource]:
        """`prefix` is the path of the mixture, with its dot."""
        for kind, values in (("weight", self.weight.weight), ("bias", self.weight.bias)):
            if values is not None:
                shape = tuple(values.shape)
                yield WeightSource(
                    f"{prefix}{self._name}.{kind}", shape, full_slices(shape), values
                )


SoftmaxTopK = Callable[[torch.Tensor, int, bool, torch.dtype], tuple[torch.Tensor, torch.Tensor]]


def _softmax_top_k_on(device: torch.device) -> SoftmaxTopK:
    """Returns the function from (logits [T, experts], top_k, normalize, dtype of weights) to
    weights and experts: one kernel on a GPU, which also adds up split-K parts [split_k, T,
    experts].
    """
    if device.type != "cuda":
        return _softmax_top_k
    from pipeinfer.kernels.moe import topk_softmax

    return topk_softmax


def _softmax_top_k(
    scores: torch.Tensor, top_k: int, normalize: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    weights, experts = scores.softmax(dim=-1, dtype=torch.float32).topk(top_k, dim=-1)
    if normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(dtype), experts


class SigmoidLinear:
    """A linear layer and a sigmoid: x [T, hidden] to [T, size]."""

    def __init__(self, size: int, hidden_size: int, placement: Placement) -> None:
        # The last row is padding. Sigmoid computes whole vectors of adjacent values in one way, and
        # the remaining values in another: the result of a token would depend on the number of
        # tokens.
        weight = placement.matrix(size + 1, hidden_size)
        if not placement.memory.final:
            weight[size:].zero_()
        self._weight = UnquantizedWeight(weight, None, exact_gemm_for(placement))
        self._size = size

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._weight(x)[:, : self._size].sigmoid()

    def pack(self, memory: ParameterMemory = IN_TORCH) -> None:
        """Packs the weights; to be called when they are final."""
        self._weight.pack(memory)

    def sources(self, prefix: str) -> Iterator[WeightSource]:
        """`prefix` is the path of this module, with its dot."""
        weight = self._weight.weight[: self._size]
        shape = tuple(weight.shape)
        yield WeightSource(f"{prefix}weight", shape, full_slices(shape), weight)


class GroupedTopK(NamedTuple):
    """How grouped top-k chooses.

    Attributes:
    - top_k: experts of a token
    - groups: of neighbouring experts, of equal size
    - top_groups: the groups, by the sum of their two best scores, that experts are taken from
    - normalize: the weights of a token's experts add up to `scale`
    - scale: factor of all weights
    """

    top_k: int
    groups: int
    top_groups: int
    normalize: bool
    scale: float


class SigmoidRouter:
    """Chooses the best experts by the sigmoid of their logit plus a bias; weights are without it.

    Parameters and weights are float32. Source: https://arxiv.org/abs/2412.19437, section 2.1.
    """

    def __init__(
        self, hidden_size: int, num_experts: int, grouped: GroupedTopK, placement: Placement
    ) -> None:
        self.num_experts = num_experts
        self._grouped = grouped
        exact = replace(placement, dtype=torch.float32)
        self._scores = SigmoidLinear(num_experts, hidden_size, exact)
        self._bias = exact.empty(num_experts)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns weights, in float32, and experts."""
        choice = self._grouped
        scores = self._scores(x.to(torch.float32))
        experts = self._in_best_groups(scores + self._bias).topk(choice.top_k, dim=-1).indices
        weights = scores.gather(1, experts)
        if choice.normalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * choice.scale, experts

    def _in_best_groups(self, biased: torch.Tensor) -> torch.Tensor:
        """Returns [T, num_experts], with scores of experts outside of the best groups at -inf."""
        _, groups, top_groups, *_ = self._grouped
        if top_groups == groups:
            return biased
        grouped = biased.unflatten(-1, (groups, -1))
        best = grouped.topk(2, dim=-1).values.sum(dim=-1).topk(top_groups, dim=-1).indices
        others = torch.ones(grouped.shape[:2], dtype=torch.bool, device=biased.device)
        others = others.scatter_(1, best, False)
        return grouped.masked_fill(others[..., None], float("-inf")).flatten(1)

    def pack(self, memory: ParameterMemory = IN_TORCH) -> None:
        """Packs the weights; to be called when they are final."""
        self._scores.pack(memory)

    def sources(self, prefix: str) -> Iterator[WeightSource]:
        """`prefix` is the path of the mixture, with its dot."""
        yield from self._scores.sources(f"{prefix}gate.")
        shape = tuple(self._bias.shape)
        yield WeightSource(
            f"{prefix}gate.e_score_correction_bias", shape, full_slices(shape), self._bias
        )


class SharedExpert:
    """The dense block that every token goes to beside a mixture, split over the ranks as any."""

    def __init__(self, name: str, mlp: GatedMLP, gated: bool, placement: Placement) -> None:
        """Shared expert. gated: its output is multiplied with a sigmoid gate, on disk `name` and
        "_gate".
        """
        self._name = name
        self._mlp = mlp
        self._gate = SigmoidLinear(1, mlp.hidden_size, placement) if gated else None

    def unreduced(self, x: torch.Tensor) -> torch.Tensor:
        """Returns this rank's share of the sum over ranks, [T, hidden]."""
        out = self._mlp.unreduced(x)
        return out if self._gate is None else out.mul_(self._gate(x))

    def pack(self, memory: ParameterMemory = IN_TORCH) -> None:
        """Packs the weights; to be called when they are final."""
        self._mlp.pack(memory)
        if self._gate is not None:
            self._gate.pack(memory)

    def sources(self, prefix: str) -> Iterator[WeightSource]:
        """`prefix` is the path of the mixture, with its dot."""
        yield from self._mlp.sources(f"{prefix}{self._name}.")
        if self._gate is not None:
            yield from self._gate.sources(f"{prefix}{self._name}_gate.")


class SparseMoeBlock:
    """A mixture of experts, [T, hidden] to [T, hidden]: the weighted sum of the experts that a
    router chooses, plus the shared expert's output.
    """

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
        self._summing = small_m_gemm_for(placement.device, placement.dtype) if defers else None

    @property
    def input_quantizer(self) -> ActivationQuantizer | None:
        """Quantizer of the input, see Weight (weight.py)."""
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
        """Returns the share of this rank's experts of the sum, [T, hidden]."""
        weights, experts = self._router(unquantized(x))
        grouped = self._experts.fused
        if grouped is not None:
            return grouped(x, weights, experts)
        shard, top_k = self._experts.shard, experts.shape[1]
        pairs = experts.flatten() - shard.first  # pair i is token i // top_k
        if shard.count < self._router.num_experts:
            pairs[(pairs < 0) | (pairs >= shard.count)] = shard.count  # another rank's: last
        order = pairs.argsort(stable=True)
        counts = pairs.bincount(minlength=shard.count + 1).tolist()[: shard.count]
        order = order[: sum(counts)]
        outputs = self._experts(x[order // top_k], counts)
        by_pair = outputs.new_zeros(len(pairs), x.shape[1])
        by_pair[order] = outputs
        # Summed per token in the router's order: not a matter of which other tokens there are.
        return by_pair.view(*weights.shape, -1).mul_(weights[..., None]).sum(dim=1)

    def pack(self, memory: ParameterMemory = IN_TORCH) -> None:
        """Packs the weights; to be called when they are final."""
        self._router.pack(memory)
        self._experts.pack(memory)
        if self._shared is not None:
            self._shared.pack(memory)

    def sources(self, prefix: str) -> Iterator[WeightSource]:
        """`prefix` is the path of this module, with its dot."""
        yield from self._router.sources(prefix)
        yield from self._experts.sources(prefix)
        if self._shared is not None:
            yield from self._shared.sources(prefix)
