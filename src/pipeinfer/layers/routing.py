"""Routers of mixtures: which experts a token goes to, and what each of them counts.

A router is the same on all ranks, and a token's choice depends on nobody else's. Knows no expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from pipeinfer.layers.matrix import Matrix
from pipeinfer.layers.placement import Placement, Source, whole


class Router(Protocol):
    """x [T, hidden] to weights of any float dtype and experts int64, both [T, top_k]."""

    num_experts: int

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...

    def pack(self) -> None: ...

    def sources(self, prefix: str) -> Iterator[Source]: ...


class SoftmaxRouter:
    """The best by their probability, which is their weight.

    normalize: the weights of a token's experts add up to one. Source: arxiv.org/abs/2101.03961.
    """

    def __init__(
        self, hidden_size: int, num_experts: int, top_k: int, normalize: bool, placement: Placement
    ) -> None:
        self.num_experts = num_experts
        self.matrix = Matrix(placement.empty(num_experts, hidden_size))
        self._top_k = top_k
        self._normalize = normalize

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights in x's dtype."""
        scores = self.matrix(x).softmax(dim=-1, dtype=torch.float32)
        weights, experts = scores.topk(self._top_k, dim=-1)
        if self._normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), experts

    def pack(self) -> None:
        """To be called when the weights are final."""
        self.matrix.pack()

    def sources(self, prefix: str) -> Iterator[Source]:
        """`prefix` is the path of this module, with its dot."""
        shape = tuple(self.matrix.weight.shape)
        yield Source(f"{prefix}weight", shape, whole(shape), self.matrix.weight)
