"""Rows in e4m3 on their way into a product that wants them so, and the operations that end in them.

A weight that multiplies in FP8 rounds what it is given, unless whatever comes before has done so as
its last step. Knows no layer and no weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pipeinfer.kernels.formats import E4M3


@dataclass(frozen=True)
class RoundedRows:
    """e4m3 [T, n], and the float32 scales of its rows, [T, 1], or of parts of them, [T, parts].

    plain: the rows as they were, where somebody beside the weight reads them.
    """

    values: torch.Tensor
    scale: torch.Tensor
    plain: torch.Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """e4m3, which no plain rows have."""
        return self.values.dtype

    @property
    def shape(self) -> torch.Size:
        """[T, n]."""
        return self.values.shape


# A torch.Tensor [T, n]; or RoundedRows, of a RowRounding that the weight they are for has given.
Rows = Any


def plain_rows(x: Rows) -> torch.Tensor:
    """Rows as they were; those that are rounded have to have kept them."""
    return x.plain if x.dtype == E4M3 else x


class RowRounding:
    """How a weight wants its rows rounded. part: values that share a scale, 0: all of a row; keeps:
    norms and rows, as they were, too. Needs triton."""

    def __init__(self, part: int = 0, keeps: bool = False) -> None:
        from pipeinfer.kernels import activations, norm

        self._part, self._keeps = part, keeps
        self._norm = norm.rms_norm_quantized
        self._gated = activations.swiglu_quantize_groups
        self._rows = activations.quantize_groups

    def norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        residual: torch.Tensor | None,
        offset: float,
    ) -> RoundedRows:
        """RMSNorm of x [T, n], or of the sum of x [P, T, n], plus `residual`, which becomes that
        sum; `offset` is added to the weight."""
        plain = weight.new_empty(x.shape[-2:]) if self._keeps else None
        rounded = self._norm(x, weight, eps, residual, offset, self._part, plain)
        return RoundedRows(*rounded, plain)

    def gated(self, merged: torch.Tensor) -> RoundedRows:
        """SwiGLU of [T, 2 n], gate first."""
        return RoundedRows(*self._gated(merged, self._part))

    def rows(self, x: torch.Tensor) -> RoundedRows:
        """x [T, n] itself."""
        return RoundedRows(*self._rows(x, self._part), x if self._keeps else None)
