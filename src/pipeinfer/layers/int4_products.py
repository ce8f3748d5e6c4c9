"""Products with a matrix that stays in four bits, on GPUs: for few rows its weights become plain in
registers, for many in memory.

Knows no layer and no file.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from pipeinfer.checkpoint.quantization import Int4
from pipeinfer.layers.int4_values import RUN, Int4Values
from pipeinfer.layers.partial_sum import PartialSum
from pipeinfer.layers.placement import Placement
from pipeinfer.layers.skinny import SkinnyProducts, skinny_products

FEW = 64  # rows; with more of them, arithmetic counts
COLUMNS = 32  # of a tile
MOST_SPLITS = 8


def int4_products(form: Int4, size: tuple[int, int], placement: Placement) -> Int4Products | None:
    """Of any such form; None where a matrix must become plain: on this device, or of this size."""
    rows, columns = size
    skinny = skinny_products(placement.device, placement.dtype)
    if rows % COLUMNS or columns % RUN or skinny is None:
        return None
    return Int4Products(skinny, columns)


class Int4Products:
    """Products (kept.py), with a matrix of so many columns."""

    rounding = None

    def __init__(self, skinny: SkinnyProducts, columns: int) -> None:
        from pipeinfer.kernels import int4

        self._skinny = skinny
        self._kernels = int4
        self._splits = next(n for n in (MOST_SPLITS, 4, 2, 1) if columns // RUN % n == 0)

    def product(
        self, x: torch.Tensor, values: Int4Values, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if x.shape[0] <= FEW:
            return self._few(x, values, bias).sum(0).to(x.dtype)
        weight = self._kernels.decode(values.numbers, values.scale, values.zero, x.dtype)
        return functional.linear(x, weight, bias)

    def later(
        self, x: torch.Tensor, values: Int4Values, bias: torch.Tensor | None
    ) -> PartialSum | None:
        if x.shape[0] > FEW:
            return None
        return PartialSum(self._few(x, values, bias), self._skinny, splits=True)

    def _few(self, x: torch.Tensor, values: Int4Values, bias: torch.Tensor | None) -> torch.Tensor:
        return self._kernels.few_rows(
            x, values.numbers, values.scale, values.zero, bias, self._splits
        )
