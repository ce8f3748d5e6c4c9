"""Rows in e4m3 on their way into a product that wants them so, and the operations that end in them.

A weight that multiplies in FP8 rounds what it is given, unless whatever comes before has done so as
its last step. Knows no layer and no weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pipeinfer.kernels.e4m3 import E4M3


@dataclass(frozen=True)
class QuantizedActivations:
    """e4m3 [T, n], and the float32 scales of its rows, [T, 1], or of parts of them, [T, parts].

    plain: the rows as they were, where somebody beside the weight reads them.
    """

    values: torch.Tensor
    scale: torch.Tensor
    unquantized: torch.Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """e4m3, which no plain rows have."""
        return self.values.dtype

    @property
    def shape(self) -> torch.Size:
        """[T, n]."""
        return self.values.shape


# A torch.Tensor [T, n]; or RoundedRows, of a RowRounding that the weight they are for has given.
Activations = Any


def unquantized(x: Activations) -> torch.Tensor:
    """Rows as they were; those that are rounded have to have kept them."""
    return x.unquantized if x.dtype == E4M3 else x


class ActivationQuantizer:
    """How a weight wants its rows rounded. part: values that share a scale, 0: all of a row; keeps:
    norms and rows, as they were, too. Needs triton."""

    def __init__(self, group_size: int = 0, keep_unquantized: bool = False) -> None:
        from pipeinfer.kernels import norm, rounding

        self._part, self._keeps = group_size, keep_unquantized
        self._norm = norm.rounded_norm
        self._gated = rounding.round_gated
        self._rows = rounding.round_parts

    def norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        residual: torch.Tensor | None,
        offset: float,
    ) -> QuantizedActivations:
        """RMSNorm of x [T, n], or of the sum of x [P, T, n], plus `residual`, which becomes that
        sum; `offset` is added to the weight."""
        plain = weight.new_empty(x.shape[-2:]) if self._keeps else None
        rounded = self._norm(x, weight, eps, residual, offset, self._part, plain)
        return QuantizedActivations(*rounded, plain)

    def swiglu(self, merged: torch.Tensor) -> QuantizedActivations:
        """SwiGLU of [T, 2 n], gate first."""
        return QuantizedActivations(*self._gated(merged, self._part))

    def quantize(self, x: torch.Tensor) -> QuantizedActivations:
        """x [T, n] itself."""
        return QuantizedActivations(*self._rows(x, self._part), x if self._keeps else None)
