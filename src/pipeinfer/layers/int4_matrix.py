"""A matrix that stays in four bits, on GPUs: its weights become plain in registers for few rows,
and in memory for many.

Knows no layer and no file.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from pipeinfer.checkpoint.quantization import Int4
from pipeinfer.layers.int4_values import RUN, Int4Values
from pipeinfer.layers.partial_sum import PartialSum
from pipeinfer.layers.placement import Placement, Source
from pipeinfer.layers.skinny import SkinnyProducts, skinny_products

FEW = 64  # rows; with more of them, arithmetic counts
COLUMNS = 32  # of a tile
MOST_SPLITS = 8


def int4_products(form: Int4, size: tuple[int, int], placement: Placement) -> SkinnyProducts | None:
    """Of any such form; None where a matrix must become plain: on this device, or of this size."""
    rows, columns = size
    if rows % COLUMNS or columns % RUN:
        return None
    return skinny_products(placement.device, placement.dtype)


class Int4Matrix:
    """A Weight (matrix.py). split: as Fp8Matrix's."""

    def __init__(
        self,
        values: Int4Values,
        bias: torch.Tensor | None,
        skinny: SkinnyProducts,
        split: bool,
    ) -> None:
        from pipeinfer.kernels import int4

        self.bias = bias
        self._values = values
        self._skinny = skinny
        self._split = split
        self._kernels = int4
        runs = 2 * values.numbers.shape[1] // RUN
        self._splits = next(n for n in (MOST_SPLITS, 4, 2, 1) if runs % n == 0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x, self.bias)

    def gated(self, x: torch.Tensor) -> torch.Tensor | None:
        return None

    def later(self, x: torch.Tensor) -> PartialSum | None:
        if not self._split or x.shape[0] > FEW:
            return None
        return PartialSum(self._few(x, self.bias), self._skinny)

    def into(
        self, out: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return out.copy_(self._product(x, bias))

    def _product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.shape[0] <= FEW:
            return self._few(x, bias).sum(0).to(x.dtype)
        values = self._values
        weight = self._kernels.decode(values.numbers, values.scale, values.zero, x.dtype)
        return functional.linear(x, weight, bias)

    def _few(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        values = self._values
        return self._kernels.few_rows(
            x, values.numbers, values.scale, values.zero, bias, self._splits
        )

    def pack(self) -> None:
        """They are as they stay."""

    def permute(self, rows: torch.Tensor) -> None:
        self._values.permute(rows.to(self._values.numbers.device))

    def sources(
        self, name: str, rows: slice, shape: tuple[int, int], slices: tuple[slice, slice]
    ) -> Iterator[Source]:
        return self._values.sources(name, rows, shape, slices)
