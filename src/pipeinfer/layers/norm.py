"""RMSNorm, alone, after a residual addition, and per head.

Squares are averaged in float32 in every dtype. Source: https://arxiv.org/abs/1910.07467.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from pipeinfer.layers.fused import fused_ops
from pipeinfer.layers.pending import Pending
from pipeinfer.layers.placement import Placement, Source, whole


def rms_normalize(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x divided by the root of its mean square over the last dimension, in x's dtype."""
    if x.dtype == torch.float32:
        return functional.rms_norm(x, (x.shape[-1],), None, eps)
    wide = x.to(torch.float32)
    return functional.rms_norm(wide, (x.shape[-1],), None, eps).to(x.dtype)


class RMSNorm:
    """Scales vectors [T, size] to a root mean square of one, times a weight."""

    def __init__(self, name: str, size: int, eps: float, placement: Placement) -> None:
        self._name = name
        self._eps = eps
        self._fused = fused_ops(placement.device, placement.dtype, placement.compiled)
        self.weight = placement.empty(size)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._fused is not None:
            return self._fused.rms_norm(x, self.weight, self._eps)
        return rms_normalize(x, self._eps).mul_(self.weight)

    def add(
        self, x: torch.Tensor | Pending, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of x + residual, x + residual); both arguments may be overwritten."""
        if isinstance(x, Pending):
            return x.add_norm(residual, self.weight, self._eps)
        if self._fused is not None:
            return self._fused.add_rms_norm(x, residual, self.weight, self._eps)
        residual.add_(x)
        return self(residual), residual

    def sources(self, prefix: str) -> Iterator[Source]:
        """`prefix` is the path of the parent module, with its dot."""
        shape = tuple(self.weight.shape)
        yield Source(f"{prefix}{self._name}.weight", shape, whole(shape), self.weight)


class HeadNorm:
    """QK norm: each head [T, heads + kv_heads, head_dim] by itself, queries first.

    The two weights are laid out per head, so that queries and keys are one operation.
    """

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, placement: Placement
    ) -> None:
        self.eps = eps
        self._num_heads = num_heads
        self.weight = placement.empty(num_heads + num_kv_heads, head_dim)

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        return rms_normalize(heads, self.eps).mul_(self.weight)

    @property
    def query_weight(self) -> torch.Tensor:
        """[head_dim], the same for all query heads."""
        return self.weight[0]

    @property
    def key_weight(self) -> torch.Tensor:
        """[head_dim], the same for all key heads."""
        return self.weight[-1]

    def sources(self, prefix: str) -> Iterator[Source]:
        """`prefix` is the path of the parent module, with its dot."""
        shape = (self.weight.shape[1],)
        queries, keys = self.weight[: self._num_heads], self.weight[self._num_heads :]
        yield Source(f"{prefix}q_norm.weight", shape, whole(shape), queries)
        yield Source(f"{prefix}k_norm.weight", shape, whole(shape), keys)
