"""A matrix that stays in FP8, on GPUs with tensor cores for it.

Few rows are multiplied as they are: weights are read in eight bits and become the rows' dtype. Many
rows are rounded to FP8 themselves, each row by its largest value, or each 128 values where weights
have scales by block. Knows no layer and no file.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pipeinfer.checkpoint.quantization import Fp8
from pipeinfer.layers.fp8_values import Fp8Values
from pipeinfer.layers.partial_sum import PartialSum
from pipeinfer.layers.placement import Placement, Source
from pipeinfer.layers.skinny import SkinnyProducts, skinny_products

FIRST_CAPABILITY = (9, 0)  # scales by row, of both operands
SIDE = 128  # of blocks
MULTIPLE = 16  # of rows and columns


def fp8_products(form: Fp8, size: tuple[int, int], placement: Placement) -> SkinnyProducts | None:
    """None where such a matrix has to become plain: on this device, or of this size."""
    skinny = skinny_products(placement.device, placement.dtype)
    if skinny is None or placement.dtype != torch.bfloat16:
        return None
    if torch.cuda.get_device_capability(placement.device) < FIRST_CAPABILITY:
        return None
    blocks = form.shared == "block"
    fits = all(side % (SIDE if blocks else MULTIPLE) == 0 for side in size)
    return skinny if fits and (not blocks or form.block == (SIDE, SIDE)) else None


def fp8_stack(form: Fp8, size: tuple[int, int, int], placement: Placement) -> Fp8Values | None:
    """Room for matrices that stay as they are, [matrices, out, in]; None where each would have to
    become plain."""
    _, rows, columns = size
    if fp8_products(form, (rows, columns), placement) is None:
        return None
    return Fp8Values.empty(size, form, placement)


class Fp8Matrix:
    """A Weight (matrix.py). split: whether a norm may add up its products of few rows."""

    def __init__(
        self,
        values: Fp8Values,
        bias: torch.Tensor | None,
        skinny: SkinnyProducts,
        split: bool,
    ) -> None:
        from pipeinfer.kernels import fp8_blocks, rounding

        self.bias = bias
        self._values = values
        self._skinny = skinny
        self._split = split
        self._round = rounding.round_parts
        self._by_block = fp8_blocks.block_product

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x, self.bias)

    def gated(self, x: torch.Tensor) -> torch.Tensor | None:
        return self._skinny.gated(x, self._values.weight, self._values.scale)

    def later(self, x: torch.Tensor) -> PartialSum | None:
        if not self._split:
            return None
        return self._skinny.later(x, self._values.weight, self.bias, self._values.scale)

    def into(
        self, out: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return out.copy_(self._product(x, bias))

    def _product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        weight, scale = self._values.weight, self._values.scale
        few = self._skinny.product(x, weight, bias, scale)
        if few is not None:
            return few
        if self._values.form.shared == "block":
            rounded, by_part = self._round(x, SIDE)
            return self._by_block(rounded, by_part, weight, scale, x.dtype, bias)
        rounded, by_row = self._round(x)
        return torch.ops.aten._scaled_mm(
            rounded, weight.t(), by_row, scale.t(), bias, out_dtype=x.dtype, use_fast_accum=True
        )

    def pack(self) -> None:
        """They are as they stay."""

    def permute(self, rows: torch.Tensor) -> None:
        self._values.permute(rows.to(self._values.weight.device))

    def sources(
        self, name: str, rows: slice, shape: tuple[int, int], slices: tuple[slice, slice]
    ) -> Iterator[Source]:
        return self._values.sources(name, rows, shape, slices)
