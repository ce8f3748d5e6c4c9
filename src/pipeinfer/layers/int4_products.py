"""Products with a matrix that stays in four bits, on GPUs: for few rows its weights become plain in
registers, for many in memory.

Knows no layer and no file.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from pipeinfer.checkpoint.quantization import Int4
from pipeinfer.kernels.int4_layout import RUN
from pipeinfer.kernels.int4_tiles import COLUMNS, Cut, Kind, cut
from pipeinfer.layers.int4_values import Int4Values
from pipeinfer.layers.partial_sum import PartialSum
from pipeinfer.layers.placement import Placement
from pipeinfer.layers.skinny import SkinnyProducts, skinny_products

GROUPS = (16, 32, 64)  # columns, beside whole runs


def int4_products(form: Int4, size: tuple[int, int], placement: Placement) -> Int4Products | None:
    """Of any such form; None where a matrix must become plain: on this device, or of this size."""
    rows, columns = size
    skinny = skinny_products(placement.device, placement.dtype)
    group = form.group or columns
    grouped = group % RUN == 0 or group in GROUPS
    if rows % COLUMNS or columns % RUN or not grouped or skinny is None:
        return None
    return Int4Products(skinny)


class Int4Products:
    """Products (kept.py)."""

    rounding = None

    def __init__(self, skinny: SkinnyProducts) -> None:
        from pipeinfer.kernels import int4

        self._skinny = skinny
        self._kernels = int4

    def product(
        self, x: torch.Tensor, values: Int4Values, bias: torch.Tensor | None
    ) -> torch.Tensor:
        how = self._cut("product", x, values)
        if how is not None:
            return self._few(x, values, how, bias, x.dtype)[0]
        weight = self._kernels.decode(values.numbers, values.scale, values.zero, x.dtype)
        return functional.linear(x, weight, bias)

    def later(
        self, x: torch.Tensor, values: Int4Values, bias: torch.Tensor | None
    ) -> PartialSum | None:
        how = self._cut("split", x, values)
        if how is None:
            return None
        return PartialSum(self._few(x, values, how, bias), self._skinny)

    def _cut(self, kind: Kind, x: torch.Tensor, values: Int4Values) -> Cut | None:
        return cut(kind, x.shape[0], values.numbers.shape[0], x.shape[1])

    def _few(
        self,
        x: torch.Tensor,
        values: Int4Values,
        how: Cut,
        bias: torch.Tensor | None,
        dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        return self._kernels.few_rows(
            x, values.numbers, values.scale, values.zero, how, bias, dtype
        )
