"""Products with a matrix that stays in four bits, on GPUs: for few rows its weights become plain in
registers, for many in memory.

Knows no layer and no file.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from pipeinfer.checkpoint.quantization import Int4
from pipeinfer.kernels.int4_layout import RUN
from pipeinfer.kernels.int4_tiles import COLUMNS, cut
from pipeinfer.layers.int4_values import Int4Tensor
from pipeinfer.layers.partial_sum import PartialSum
from pipeinfer.layers.placement import Placement
from pipeinfer.layers.skinny import SmallMGemm, small_m_gemm

INT4_SMALL_GROUPS = (16, 32, 64)  # columns, beside whole runs


def int4_gemm(form: Int4, size: tuple[int, int], placement: Placement) -> Int4Gemm | None:
    """Of any such form; None where a matrix must become plain: on this device, or of this size."""
    rows, columns = size
    skinny = small_m_gemm(placement.device, placement.dtype)
    group = form.group or columns
    grouped = group % RUN == 0 or group in INT4_SMALL_GROUPS
    if rows % COLUMNS or columns % RUN or not grouped or skinny is None:
        return None
    return Int4Gemm(skinny, rows // COLUMNS, placement.device)


class Int4Gemm:
    """Products (kept.py)."""

    input_quantizer = None

    def __init__(self, skinny: SmallMGemm, tiles: int, device: torch.device) -> None:
        from pipeinfer.kernels import int4

        self._small_m = skinny
        self._kernels = int4
        self._arrived = torch.zeros(tiles, dtype=torch.int32, device=device)

    def product(
        self, x: torch.Tensor, values: Int4Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        how = cut(x.shape[0], values.qweight.shape[1], x.shape[1])
        if how is not None:
            kept = values.qweight, values.scales_and_zeros
            return self._kernels.few_rows(x, *kept, how, bias, self._arrived)[0]
        weight = self._kernels.decode(values.qweight, values.scales_and_zeros, x.dtype)
        return functional.linear(x, weight, bias)

    def split_k(
        self, x: torch.Tensor, values: Int4Tensor, bias: torch.Tensor | None
    ) -> PartialSum | None:
        how = cut(x.shape[0], values.qweight.shape[1], x.shape[1])
        if how is None:
            return None
        parts = self._kernels.few_rows(x, values.qweight, values.scales_and_zeros, how, bias)
        return PartialSum(parts, self._small_m)
