"""Products with a matrix that stays in FP8, on GPUs with tensor cores for it.

Rows are rounded to FP8 themselves, few or many: each row by its largest value, or each 128 values
where weights have scales by block. Knows no layer and no file.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from pipeinfer.checkpoint.quantization import Fp8
from pipeinfer.kernels.e4m3 import E4M3
from pipeinfer.kernels.fp8 import SIDE
from pipeinfer.kernels.skinny_tiles import EightBitKind as Kind
from pipeinfer.kernels.skinny_tiles import Tile, eight_bit_tile
from pipeinfer.layers.fp8_values import Fp8Tensor
from pipeinfer.layers.partial_sum import PartialSum
from pipeinfer.layers.placement import Placement
from pipeinfer.layers.rounded import ActivationQuantizer, Activations, QuantizedActivations
from pipeinfer.layers.skinny import SmallMGemm, small_m_gemm

FP8_MIN_CAPABILITY = (9, 0)  # scales by row, of both operands
FP8_SIDE_MULTIPLE = 16  # of rows and columns
SGL_KERNEL_MAX_ROWS = (
    128  # rows, up to which sgl_kernel's product is the faster one (docs/benchmarks.md)
)

LargeMGemm = Callable[
    [QuantizedActivations, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor
]


def fp8_gemm(form: Fp8, size: tuple[int, int], placement: Placement) -> Fp8Gemm | None:
    """None where such a matrix has to become plain: on this device, or of this size."""
    skinny = _gemm_for(form, size, placement)
    return None if skinny is None else Fp8Gemm(skinny, form.scale_scope == "block")


def stacked_fp8(form: Fp8, size: tuple[int, int, int], placement: Placement) -> Fp8Tensor | None:
    """Room for matrices that stay as they are, [matrices, out, in]; None where each would have to
    become plain."""
    stays = _gemm_for(form, size[1:], placement)
    return None if stays is None else Fp8Tensor.empty(size, form, placement)


def small_m_gemm_8bit(placement: Placement) -> SmallMGemm | None:
    """None where a device has no kernels for formats of 8 bits, or of MXFP4, in this dtype."""
    skinny = small_m_gemm(placement.device, placement.dtype)
    if skinny is None or placement.dtype != torch.bfloat16:
        return None
    capability = torch.cuda.get_device_capability(placement.device)
    return skinny if capability >= FP8_MIN_CAPABILITY else None


def _gemm_for(form: Fp8, size: tuple[int, int], placement: Placement) -> SmallMGemm | None:
    blocks = form.scale_scope == "block"
    fits = all(side % (SIDE if blocks else FP8_SIDE_MULTIPLE) == 0 for side in size)
    if not fits or (blocks and form.block != (SIDE, SIDE)):
        return None
    return small_m_gemm_8bit(placement)


class Fp8Gemm:
    """Products (kept.py), in bfloat16. blocks: weights have a scale for each 128 x 128."""

    def __init__(self, skinny: SmallMGemm, blocks: bool) -> None:
        from pipeinfer.kernels import skinny as kernels

        self.input_quantizer = ActivationQuantizer(SIDE if blocks else 0)
        self._small_m, self._blocks = skinny, blocks
        self._kernels = kernels
        self._large_m = _block_gemm() if blocks else _row_gemm()

    def product(self, x: Activations, values: Fp8Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows, (weight, scale) = self._quantized(x), (values.weight, values.scale)
        tile = self._tile("product", x, values)
        if tile is None:
            return self._large_m(rows, weight, scale, bias)
        scales = self._kernels.Scales(rows.scale, scale)
        return self._kernels.product(rows.values, weight, tile, bias, scales, torch.bfloat16)

    def split_k(
        self, x: Activations, values: Fp8Tensor, bias: torch.Tensor | None
    ) -> PartialSum | None:
        tile = self._tile("split", x, values)
        if tile is None:
            return None
        rows = self._quantized(x)
        scales = self._kernels.Scales(rows.scale, values.scale)
        parts = self._kernels.split_product(rows.values, values.weight, tile, bias, scales)
        return PartialSum(parts, self._small_m)

    def _tile(self, kind: Kind, x: Activations, values: Fp8Tensor) -> Tile | None:
        width, depth = values.weight.shape
        return eight_bit_tile(kind, x.shape[0], width, depth, self._blocks)

    def _quantized(self, x: Activations) -> QuantizedActivations:
        return x if x.dtype == E4M3 else self.input_quantizer.quantize(x)


def _block_gemm() -> LargeMGemm:
    from pipeinfer.kernels.fp8_blocks import block_product

    def many(
        rows: QuantizedActivations,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        return block_product(rows.values, rows.scale, weight, scale, torch.bfloat16, bias)

    return many


def _row_gemm() -> LargeMGemm:
    try:
        from sgl_kernel import fp8_scaled_mm as medium  # type: ignore
    except ImportError:  # not installed, or built for other GPUs
        medium = None

    def many(
        rows: QuantizedActivations,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        x, by_row = rows.values, rows.scale
        if x.shape[0] == 0:  # a step in which nobody samples, behind the last layer's attention
            return torch.empty(0, weight.shape[0], dtype=torch.bfloat16, device=x.device)
        if medium is not None and x.shape[0] <= SGL_KERNEL_MAX_ROWS:
            return medium(x, weight.t(), by_row, scale, torch.bfloat16, bias)
        return torch.ops.aten._scaled_mm(
            x, weight.t(), by_row, scale.t(), bias, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return many
