"""Routers of mixtures: which experts a token goes to, and what each of them counts.

A router is the same on all ranks, and a token's choice depends on nobody else's. Knows no expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch

from pipeinfer.layers.matrix import Matrix
from pipeinfer.layers.placement import Placement, Source, whole
from pipeinfer.layers.skinny import skinny_products


class Router(Protocol):
    """x [T, hidden] to weights of any float dtype and experts int32 or 64, both [T, top_k]."""

    num_experts: int

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...

    def pack(self) -> None: ...

    def sources(self, prefix: str) -> Iterator[Source]: ...


class SoftmaxRouter:
    """The best by their probability, which is their weight.

    normalize: the weights of a token's experts add up to one. name: on disk. Source:
    arxiv.org/abs/2101.03961.
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
        self.num_experts = num_experts
        self._name = name
        self.matrix = Matrix(
            placement.empty(num_experts, hidden_size),
            placement.empty(num_experts) if bias else None,
        )
        self._top_k = top_k
        self._normalize = normalize
        self._choose = _choice_on(placement.device)
        self._narrow = skinny_products(placement.device, placement.dtype)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights in x's dtype."""
        return self._choose(self._scores(x), self._top_k, self._normalize, x.dtype)

    def _scores(self, x: torch.Tensor) -> torch.Tensor:
        """[T, experts], or [P, T, experts], to be summed over P."""
        if self._narrow is not None:
            partial = self._narrow.narrow(x, self.matrix.weight, self.matrix.bias)
            if partial is not None:
                return partial
        return self.matrix(x)

    def pack(self) -> None:
        """To be called when the weights are final."""
        self.matrix.pack()

    def sources(self, prefix: str) -> Iterator[Source]:
        """`prefix` is the path of the mixture, with its dot."""
        for kind, values in (("weight", self.matrix.weight), ("bias", self.matrix.bias)):
            if values is not None:
                shape = tuple(values.shape)
                yield Source(f"{prefix}{self._name}.{kind}", shape, whole(shape), values)


Choice = Callable[[torch.Tensor, int, bool, torch.dtype], tuple[torch.Tensor, torch.Tensor]]


def _choice_on(device: torch.device) -> Choice:
    """(scores [T, experts], top_k, normalize, dtype of weights) to weights and experts: by one
    kernel on a GPU, which also sums scores [P, T, experts]."""
    if device.type != "cuda":
        return _by_torch
    from pipeinfer.kernels.moe_routing import topk_softmax

    return topk_softmax


def _by_torch(
    scores: torch.Tensor, top_k: int, normalize: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    weights, experts = scores.softmax(dim=-1, dtype=torch.float32).topk(top_k, dim=-1)
    if normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(dtype), experts


class Sigmoids:
    """x [T, hidden] to the sigmoids of `size` products, [T, size]."""

    def __init__(self, size: int, hidden_size: int, placement: Placement) -> None:
        # The last row is nothing. Sigmoid takes whole vectors of values that lie side by side, and
        # the rest in another way: what a token gets would depend on how many tokens there are.
        weight = placement.empty(size + 1, hidden_size)
        weight[size:].zero_()
        self._matrix = Matrix(weight)
        self._size = size

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._matrix(x)[:, : self._size].sigmoid()

    def pack(self) -> None:
        """To be called when the weights are final."""
        self._matrix.pack()

    def sources(self, prefix: str) -> Iterator[Source]:
        """`prefix` is the path of this module, with its dot."""
        weight = self._matrix.weight[: self._size]
        shape = tuple(weight.shape)
        yield Source(f"{prefix}weight", shape, whole(shape), weight)


class GroupedChoice(NamedTuple):
    """`top_k` experts out of the best `top_groups` of `groups` runs of experts.

    normalize: their weights add up to `scale`, else each is its score times that.
    """

    top_k: int
    groups: int
    top_groups: int
    normalize: bool
    scale: float


class SigmoidRouter:
    """The best by the sigmoid of their score plus a bias, which the weights do without.

    All in float32, as is what it is made of. Source: https://arxiv.org/abs/2412.19437, section 2.1.
    """

    def __init__(
        self, hidden_size: int, num_experts: int, choice: GroupedChoice, placement: Placement
    ) -> None:
        self.num_experts = num_experts
        self._choice = choice
        exact = replace(placement, dtype=torch.float32)
        self._scores = Sigmoids(num_experts, hidden_size, exact)
        self._bias = exact.empty(num_experts)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights in float32."""
        choice = self._choice
        scores = self._scores(x.to(torch.float32))
        experts = self._of_best_groups(scores + self._bias).topk(choice.top_k, dim=-1).indices
        weights = scores.gather(1, experts)
        if choice.normalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * choice.scale, experts

    def _of_best_groups(self, biased: torch.Tensor) -> torch.Tensor:
        """[T, num_experts], where those of other groups cannot be chosen. A group is as good as its
        two best."""
        _, groups, top_groups, *_ = self._choice
        if top_groups == groups:
            return biased
        grouped = biased.unflatten(-1, (groups, -1))
        best = grouped.topk(2, dim=-1).values.sum(dim=-1).topk(top_groups, dim=-1).indices
        others = torch.ones(grouped.shape[:2], dtype=torch.bool, device=biased.device)
        others = others.scatter_(1, best, False)
        return grouped.masked_fill(others[..., None], float("-inf")).flatten(1)

    def pack(self) -> None:
        """To be called when the weights are final."""
        self._scores.pack()

    def sources(self, prefix: str) -> Iterator[Source]:
        """`prefix` is the path of the mixture, with its dot."""
        yield from self._scores.sources(f"{prefix}gate.")
        shape = tuple(self._bias.shape)
        yield Source(f"{prefix}gate.e_score_correction_bias", shape, whole(shape), self._bias)
