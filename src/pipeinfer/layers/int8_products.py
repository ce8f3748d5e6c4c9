"""Products with a matrix that stays in eight bits, on CPUs that multiply bfloat16: torch's own.

Knows no layer and no file.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from pipeinfer.checkpoint.quantization import Int8
from pipeinfer.layers.int8_values import Int8Tensor
from pipeinfer.layers.partial_sum import PartialSum
from pipeinfer.layers.placement import Placement

INT8_COLUMN_MULTIPLE = (
    16  # torch's kernel reads so many at once, beyond the end of a row if they do not divide
)
DEQUANTIZE_MIN_ROWS = (
    48  # rows from which on a plain copy of the matrix, made for one product, is faster
)


def int8_gemm(form: Int8, size: tuple[int, int], placement: Placement) -> Int8Gemm | None:
    """None where a matrix must become plain: on this device, in this dtype or of this size."""
    fits = placement.device.type == "cpu" and placement.dtype == torch.bfloat16
    return Int8Gemm() if fits and size[1] % INT8_COLUMN_MULTIPLE == 0 else None


class Int8Gemm:
    """Products (kept.py). Of up to MANY rows each comes out alike, however many there are."""

    input_quantizer = None

    def product(
        self, x: torch.Tensor, values: Int8Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if x.shape[0] >= DEQUANTIZE_MIN_ROWS:
            return functional.linear(x, values.dequantized(x.dtype), bias)
        product = torch.ops.aten._weight_int8pack_mm(x, values.weight, values.scale)
        return product if bias is None else product.add_(bias)

    def split_k(
        self, x: torch.Tensor, values: Int8Tensor, bias: torch.Tensor | None
    ) -> PartialSum | None:
        return None
