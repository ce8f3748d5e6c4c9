"""What is kept of a matrix in eight bits: whole numbers, and a scale for each row.

Knows no product.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from pipeinfer.checkpoint.quantization import Int8
from pipeinfer.layers.placement import Placement, QuantizingTarget, WeightSource

INT8_MAX = 127  # of the whole numbers of a row, in magnitude
MIN_ROW_MAX = 1e-12  # stands for the magnitude of a row of zeros


@dataclass(frozen=True)
class Int8Tensor:
    """Values (decoded.py). weight: int8 [rows, columns]; scale: [rows], in the model's dtype."""

    weight: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def empty(cls, size: tuple[int, ...], form: Int8, placement: Placement) -> Int8Tensor:
        """Not yet filled; `size` is rows and columns, before which a stack may have others."""
        weight = torch.empty(size, dtype=torch.int8, device=placement.device)
        return cls(weight, placement.empty(*size[:-1]))

    def __getitem__(self, index: int) -> Int8Tensor:
        """One of a stack."""
        return Int8Tensor(self.weight[index], self.scale[index])

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        return self.weight.to(dtype).mul_(self.scale.to(dtype)[..., None])

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids`, int64 [T], in the model's dtype: [T, columns]."""
        return self.weight[ids].to(self.scale.dtype).mul_(self.scale[ids][:, None])

    def permute(self, rows: torch.Tensor) -> None:
        for part in (self.weight, self.scale):
            part[: len(rows)] = part[rows]

    def sources(
        self, name: str, rows: slice, shape: tuple[int, int], slices: tuple[slice, slice]
    ) -> Iterator[WeightSource]:
        how = partial(quantize_rows, scales=self.scale.dtype)
        target = QuantizingTarget(self.weight[rows], self.scale[rows], how)
        yield WeightSource(f"{name}.weight", shape, slices, target)


def quantize_rows(values: torch.Tensor, scales: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(whole numbers [n, columns], their scales [n] in the dtype `scales`) of plain rows; the
    largest of a row becomes LARGEST."""
    wide = values.to(torch.float32)
    # Numbers are rounded by the scale as it is kept, so that its own rounding costs nothing.
    scale = (wide.abs().amax(-1).clamp_(min=MIN_ROW_MAX) / INT8_MAX).to(scales)
    rounded = (wide / scale.to(torch.float32)[:, None]).round_()
    return rounded.clamp_(-INT8_MAX, INT8_MAX), scale
