"""Products with a matrix that stays in four bits, on GPUs: for few rows its weights become plain in
registers, for many in memory.

Knows no layer and no file.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from pipeinfer.checkpoint.quantization import Int4
from pipeinfer.kernels.formats import INT4_TILE_K
from pipeinfer.kernels.tile_configs import INT4_BLOCK_N, int4_gemm_config
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
    grouped = group % INT4_TILE_K == 0 or group in GROUPS
    if rows % INT4_BLOCK_N or columns % INT4_TILE_K or not grouped or skinny is None:
        return None
    return Int4Products(skinny, rows // INT4_BLOCK_N, placement.device)


class Int4Products:
    """Products (kept.py)."""

    rounding = None

    def __init__(self, skinny: SkinnyProducts, tiles: int, device: torch.device) -> None:
        from pipeinfer.kernels import int4

        self._skinny = skinny
        self._kernels = int4
        self._arrived = torch.zeros(tiles, dtype=torch.int32, device=device)

    def product(
        self, x: torch.Tensor, values: Int4Values, bias: torch.Tensor | None
    ) -> torch.Tensor:
        how = int4_gemm_config(x.shape[0], values.numbers.shape[1], x.shape[1])
        if how is not None:
            kept = values.numbers, values.kept
            return self._kernels.int4_small_m_gemm(x, *kept, how, bias, self._arrived)[0]
        weight = self._kernels.int4_dequantize(values.numbers, values.kept, x.dtype)
        return functional.linear(x, weight, bias)

    def later(
        self, x: torch.Tensor, values: Int4Values, bias: torch.Tensor | None
    ) -> PartialSum | None:
        how = int4_gemm_config(x.shape[0], values.numbers.shape[1], x.shape[1])
        if how is None:
            return None
        parts = self._kernels.int4_small_m_gemm(x, values.numbers, values.kept, how, bias)
        return PartialSum(parts, self._skinny)
