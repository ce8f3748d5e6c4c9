"""Products with a matrix that stays in FP8, on GPUs with tensor cores for it.

Rows are rounded to FP8 themselves, few or many: each row by its largest value, or each 128 values
where weights have scales by block. Knows no layer and no file.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from pipeinfer.checkpoint.quantization import Fp8
from pipeinfer.kernels.formats import E4M3, SCALE_BLOCK
from pipeinfer.kernels.tile_configs import Fp8GemmKind as Kind
from pipeinfer.kernels.tile_configs import GemmConfig, fp8_gemm_config
from pipeinfer.layers.fp8_values import Fp8Values
from pipeinfer.layers.partial_sum import PartialSum
from pipeinfer.layers.placement import Placement
from pipeinfer.layers.rounded import RoundedRows, RowRounding, Rows
from pipeinfer.layers.skinny import SkinnyProducts, skinny_products

FIRST_CAPABILITY = (9, 0)  # scales by row, of both operands
MULTIPLE = 16  # of rows and columns
MEDIUM = 128  # rows, up to which sgl_kernel's product is the faster one (docs/benchmarks.md)

Many = Callable[[RoundedRows, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def fp8_products(form: Fp8, size: tuple[int, int], placement: Placement) -> Fp8Products | None:
    """None where such a matrix has to become plain: on this device, or of this size."""
    skinny = _where_it_stays(form, size, placement)
    return None if skinny is None else Fp8Products(skinny, form.scale_scope == "block")


def fp8_stack(form: Fp8, size: tuple[int, int, int], placement: Placement) -> Fp8Values | None:
    """Room for matrices that stay as they are, [matrices, out, in]; None where each would have to
    become plain."""
    stays = _where_it_stays(form, size[1:], placement)
    return None if stays is None else Fp8Values.empty(size, form, placement)


def products_on(placement: Placement) -> SkinnyProducts | None:
    """None where a device has no kernels for formats of 8 bits, or of MXFP4, in this dtype."""
    skinny = skinny_products(placement.device, placement.dtype)
    if skinny is None or placement.dtype != torch.bfloat16:
        return None
    capability = torch.cuda.get_device_capability(placement.device)
    return skinny if capability >= FIRST_CAPABILITY else None


def _where_it_stays(
    form: Fp8, size: tuple[int, int], placement: Placement
) -> SkinnyProducts | None:
    blocks = form.scale_scope == "block"
    fits = all(side % (SCALE_BLOCK if blocks else MULTIPLE) == 0 for side in size)
    if not fits or (blocks and form.block != (SCALE_BLOCK, SCALE_BLOCK)):
        return None
    return products_on(placement)


class Fp8Products:
    """Products (kept.py), in bfloat16. blocks: weights have a scale for each 128 x 128."""

    def __init__(self, skinny: SkinnyProducts, blocks: bool) -> None:
        from pipeinfer.kernels import gemm as kernels

        self.rounding = RowRounding(SCALE_BLOCK if blocks else 0)
        self._skinny, self._blocks = skinny, blocks
        self._kernels = kernels
        self._many = _by_block() if blocks else _by_row()

    def product(self, x: Rows, values: Fp8Values, bias: torch.Tensor | None) -> torch.Tensor:
        rows, (weight, scale) = self._rounded(x), (values.weight, values.scale)
        tile = self._tile("product", x, values)
        if tile is None:
            return self._many(rows, weight, scale, bias)
        scales = self._kernels.GemmScales(rows.scale, scale)
        return self._kernels.small_m_gemm(rows.values, weight, tile, bias, scales, torch.bfloat16)

    def later(self, x: Rows, values: Fp8Values, bias: torch.Tensor | None) -> PartialSum | None:
        tile = self._tile("split", x, values)
        if tile is None:
            return None
        rows = self._rounded(x)
        scales = self._kernels.GemmScales(rows.scale, values.scale)
        parts = self._kernels.split_k_gemm(rows.values, values.weight, tile, bias, scales)
        return PartialSum(parts, self._skinny)

    def _tile(self, kind: Kind, x: Rows, values: Fp8Values) -> GemmConfig | None:
        width, depth = values.weight.shape
        return fp8_gemm_config(kind, x.shape[0], width, depth, self._blocks)

    def _rounded(self, x: Rows) -> RoundedRows:
        return x if x.dtype == E4M3 else self.rounding.rows(x)


def _by_block() -> Many:
    from pipeinfer.kernels.gemm import block_scaled_gemm

    def many(
        rows: RoundedRows, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return block_scaled_gemm(rows.values, rows.scale, weight, scale, torch.bfloat16, bias)

    return many


def _by_row() -> Many:
    try:
        from sgl_kernel import fp8_scaled_mm as medium  # type: ignore
    except ImportError:  # not installed, or built for other GPUs
        medium = None

    def many(
        rows: RoundedRows, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        x, by_row = rows.values, rows.scale
        if x.shape[0] == 0:  # a step in which nobody samples, behind the last layer's attention
            return torch.empty(0, weight.shape[0], dtype=torch.bfloat16, device=x.device)
        if medium is not None and x.shape[0] <= MEDIUM:
            return medium(x, weight.t(), by_row, scale, torch.bfloat16, bias)
        return torch.ops.aten._scaled_mm(
            x, weight.t(), by_row, scale.t(), bias, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return many
