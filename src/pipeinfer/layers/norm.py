"""RMSNorm, alone, after a residual addition, and per head.

Squares are averaged in float32 in every dtype. Source: https://arxiv.org/abs/1910.07467.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from pipeinfer.layers.elementwise import FusedOps, NormOps, fused_ops
from pipeinfer.layers.placement import PartialSum, Placement, WeightSource, full_slices
from pipeinfer.layers.weight import ActivationQuantizer, Activations, QuantizedActivations


def rms_normalize(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x divided by the root of its mean square over the last dimension, in x's dtype."""
    if x.dtype == torch.float32:
        return functional.rms_norm(x, (x.shape[-1],), None, eps)
    wide = x.to(torch.float32)
    return functional.rms_norm(wide, (x.shape[-1],), None, eps).to(x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm of x times its weight; rounded to x's dtype before and after that product."""
    return rms_normalize(x, eps).mul_(weight)


def gemma_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm of x times one plus its weight; all in float32, rounded to x's dtype once.

    One plus a weight in bfloat16 would lose most of a small weight's bits.
    """
    factor = weight.to(torch.float32) + 1.0
    return rms_normalize(x.to(torch.float32), eps).mul_(factor).to(x.dtype)


@dataclass(frozen=True)
class NormKind:
    """What a norm does with its weight.

    Attributes:
        by_torch: (x, weight, eps) to the norm, operation by operation.
        fused: which of a device's fused kernels it is.
        weight_offset: what kernels that norm within something larger add to the weight.
    """

    by_torch: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    fused: Callable[[FusedOps], NormOps]
    weight_offset: float


RMS_NORM = NormKind(rms_norm, lambda ops: ops.norm, 0.0)
GEMMA_RMS_NORM = NormKind(gemma_rms_norm, lambda ops: ops.gemma_norm, 1.0)


class RMSNorm:
    """Scales vectors [T, size] to a root mean square of one, times a weight."""

    def __init__(
        self, name: str, size: int, eps: float, placement: Placement, kind: NormKind = RMS_NORM
    ) -> None:
        self._name = name
        self._eps = eps
        self._by_torch = kind.by_torch
        self._offset = kind.weight_offset
        fused = fused_ops(placement.device, placement.dtype, placement.compiled)
        self.fused = None if fused is None else kind.fused(fused)
        self.weight = placement.empty(size)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.fused is not None:
            return self.fused.norm(x, self.weight, self._eps)
        return self._by_torch(x, self.weight, self._eps)

    def add_norm(
        self,
        x: torch.Tensor | PartialSum | None,
        residual: torch.Tensor,
        input_quantizer: ActivationQuantizer | None = None,
    ) -> tuple[Activations, torch.Tensor]:
        """(norm of x + residual, x + residual).

        Args:
            x: [T, size], which may be overwritten; a PartialSum, for RMS_NORM alone; None: zero.
            residual: [T, size], which may be overwritten.
            input_quantizer: of the weight that multiplies the norm.
        """
        if input_quantizer is not None:
            parts, sums = (x.partial, x.is_split_k) if isinstance(x, PartialSum) else (x, True)
            if sums:
                return self._quantized(parts, residual, input_quantizer), residual
        if x is None:
            return self(residual), residual
        if isinstance(x, PartialSum):
            return x.add_norm(residual, self.weight, self._eps)
        if self.fused is not None:
            return self.fused.add_norm(x, residual, self.weight, self._eps)
        residual.add_(x)
        return self(residual), residual

    def _quantized(
        self, x: torch.Tensor | None, residual: torch.Tensor, input_quantizer: ActivationQuantizer
    ) -> QuantizedActivations:
        if x is None:
            return input_quantizer.norm(residual, self.weight, self._eps, None, self._offset)
        return input_quantizer.norm(x, self.weight, self._eps, residual, self._offset)

    def sources(self, prefix: str) -> Iterator[WeightSource]:
        """`prefix` is the path of the parent module, with its dot."""
        shape = tuple(self.weight.shape)
        yield WeightSource(f"{prefix}{self._name}.weight", shape, full_slices(shape), self.weight)


class HeadNorm:
    """QK norm: each head [T, heads + kv_heads, head_dim] by itself, queries first.

    The two weights are laid out per head, so that queries and keys are one operation.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        placement: Placement,
        kind: NormKind = RMS_NORM,
    ) -> None:
        self.eps = eps
        self.weight_offset = kind.weight_offset
        self._by_torch = kind.by_torch
        self._num_heads = num_heads
        self.weight = placement.empty(num_heads + num_kv_heads, head_dim)

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        return self._by_torch(heads, self.weight, self.eps)

    @property
    def query_weight(self) -> torch.Tensor:
        """[head_dim], the same for all query heads."""
        return self.weight[0]

    @property
    def key_weight(self) -> torch.Tensor:
        """[head_dim], the same for all key heads."""
        return self.weight[-1]

    def sources(self, prefix: str) -> Iterator[WeightSource]:
        """`prefix` is the path of the parent module, with its dot."""
        shape = (self.weight.shape[1],)
        queries, keys = self.weight[: self._num_heads], self.weight[self._num_heads :]
        yield WeightSource(f"{prefix}q_norm.weight", shape, full_slices(shape), queries)
        yield WeightSource(f"{prefix}k_norm.weight", shape, full_slices(shape), keys)
