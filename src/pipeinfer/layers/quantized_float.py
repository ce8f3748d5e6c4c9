"""What is kept of a matrix in FP8: e4m3 values and float32 scales, of rows or of blocks.

Knows no product. Source: https://arxiv.org/abs/2209.05433.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from pipeinfer.checkpoint.quantization import Fp8
from pipeinfer.kernels.e4m3 import E4M3
from pipeinfer.kernels.fp8 import SIDE, round_rows_closely
from pipeinfer.kernels.skinny_tiles import EightBitKind as Kind
from pipeinfer.kernels.skinny_tiles import Tile, eight_bit_tile
from pipeinfer.layers.placement import (
    DUMMY_STD,
    PartialSum,
    Placement,
    QuantizingTarget,
    WeightSource,
)
from pipeinfer.layers.weight import (
    ActivationQuantizer,
    Activations,
    QuantizedActivations,
    SmallMGemm,
    small_m_gemm,
)
from pipeinfer.settings import ConfigurationError

FP8_STORED_DTYPES = ("F8_E4M3",)
FP8_DUMMY_STD = 16.0  # standard deviation of those without a checkpoint
FP8_DUMMY_SCALE = DUMMY_STD / FP8_DUMMY_STD


@dataclass(frozen=True)
class Fp8Tensor:
    """Values (decoded.py). weight: e4m3 [rows, columns]; scale: float32 [rows, 1], or of blocks
    [rows / high, columns / wide], rounded up. Either may be a stack of such matrices.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    form: Fp8

    @classmethod
    def empty(cls, size: tuple[int, ...], form: Fp8, placement: Placement) -> Fp8Tensor:
        """Not yet filled; `size` ends with rows and columns."""
        *stack, rows, columns = size
        high, wide = form.block if form.scale_scope == "block" else (1, columns)
        scales = (*stack, -(-rows // high), -(-columns // wide))
        return cls(
            torch.empty(size, dtype=E4M3, device=placement.device),
            torch.empty(scales, dtype=torch.float32, device=placement.device),
            form,
        )

    def __getitem__(self, index: int) -> Fp8Tensor:
        """One of a stack."""
        return Fp8Tensor(self.weight[index], self.scale[index], self.form)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        rows, columns = self.weight.shape
        scale = self.scale
        if self.form.scale_scope == "block":
            high, wide = self.form.block
            scale = scale.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
        return self.weight.float().mul_(scale).to(dtype)

    def permute(self, rows: torch.Tensor) -> None:
        """ConfigurationError if rows would leave their block."""
        if self.form.scale_scope == "block":
            high = self.form.block[0]
            if not torch.equal(rows // high, torch.arange(len(rows)) // high):
                raise ConfigurationError(
                    f"quantization_config: blocks of {high} rows do not fit heads whose RoPE is "
                    "interleaved"
                )
        else:
            self.scale[: len(rows)] = self.scale[rows]
        bits = self.weight.view(torch.uint8)  # there is no indexing of e4m3 everywhere
        bits[: len(rows)] = bits[rows]

    def sources(
        self, name: str, rows: slice, shape: tuple[int, int], slices: tuple[slice, slice]
    ) -> Iterator[WeightSource]:
        """ConfigurationError if `slices` cut through a block."""
        weight, scale = f"{name}.weight", f"{name}.{self.form.scale}"
        if self.form.quantize_at_load:
            rounding = QuantizingTarget(self.weight[rows], self.scale[rows], round_rows_closely)
            yield WeightSource(weight, shape, slices, rounding)
            return
        yield WeightSource(
            weight, shape, slices, self.weight[rows], FP8_STORED_DTYPES, dummy=FP8_DUMMY_STD
        )
        if self.form.scale_scope == "block":
            high, wide = self.form.block
            total = (-(-shape[0] // high), -(-shape[1] // wide))
            held = (
                _blocks(name, slices[0], shape[0], high),
                _blocks(name, slices[1], shape[1], wide),
            )
            target = self.scale[_blocks(name, rows, self.weight.shape[0], high)]
        elif self.form.scale_scope == "row":
            total, held, target = (shape[0], 1), (slices[0], slice(0, 1)), self.scale[rows]
        else:
            total, held, target = (1,), (slice(0, 1),), self.scale[rows]
        yield WeightSource(scale, total, held, target, dummy=FP8_DUMMY_SCALE)


def _blocks(name: str, cut: slice, size: int, side: int) -> slice:
    """Which blocks of `side` the rows or columns `cut` of `size` are."""
    if cut.start % side or (cut.stop % side and cut.stop != size):
        raise ConfigurationError(
            f"{name}: {cut.start} to {cut.stop} of {size} are not whole blocks of {side}, which "
            "share a scale"
        )
    return slice(cut.start // side, -(-cut.stop // side))


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


E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # and the same below zero
MXFP4_BLOCK = 32
EXPONENT_OF_ONE = 127
MXFP4_SCALE_MULTIPLE = 4  # exponents that a kernel reads at once
MXFP4_DUMMY_EXPONENT = 120.0  # a standard deviation of 0.02 or so
MXFP4_STORED_DTYPES = ("U8",)


@dataclass(frozen=True)
class Mxfp4Tensor:
    """values: uint8 [experts, out, in / 32, 16], the first of two in the lower bits; exponents:
    uint8 [experts, out, in / 32]."""

    values: torch.Tensor
    exponents: torch.Tensor

    @classmethod
    def empty(cls, size: tuple[int, int, int], placement: Placement) -> Mxfp4Tensor:
        """Not yet filled; `size`: experts, out, in. ConfigurationError unless a row has whole
        blocks."""
        experts, rows, columns = size
        if columns % MXFP4_BLOCK:
            raise ConfigurationError(
                f"quantization_config: a rank's {columns} columns are not whole blocks of "
                f"{MXFP4_BLOCK}, as mxfp4 has them"
            )
        blocks = (experts, rows, columns // MXFP4_BLOCK)
        device = placement.device
        return cls(
            torch.empty((*blocks, MXFP4_BLOCK // 2), dtype=torch.uint8, device=device),
            torch.empty(blocks, dtype=torch.uint8, device=device),
        )

    def dequantize_into(self, into: torch.Tensor) -> None:
        """Fills [experts, out, in], an expert after the other."""
        table = torch.tensor(
            [*E2M1_MAGNITUDES, *(-one for one in E2M1_MAGNITUDES)], device=into.device
        )
        for values, exponents, plain in zip(self.values, self.exponents, into, strict=True):
            both = torch.stack((values & 15, values >> 4), dim=-1).flatten(-2).int()
            powers = exponents.int() - EXPONENT_OF_ONE
            plain.copy_(torch.ldexp(table[both], powers[..., None]).flatten(1))

    def padded_for_kernels(self) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 ([experts, out, in / 2], [experts, out, blocks]) as kernels/moe.py takes them:
        what fills the blocks of a row up to a multiple of WORD stands for 1."""
        more = -self.exponents.shape[2] % MXFP4_SCALE_MULTIPLE
        filled = functional.pad(self.exponents, (0, more), value=EXPONENT_OF_ONE)
        return self.values.flatten(2), filled

    def sources(
        self, name: str, shape: tuple[int, int, int], held: tuple[slice, slice, slice]
    ) -> Iterator[WeightSource]:
        """`held` of experts, rows and columns of `shape`; ConfigurationError if columns cut through
        a block."""
        experts, rows, columns = held
        if columns.start % MXFP4_BLOCK or columns.stop % MXFP4_BLOCK:
            raise ConfigurationError(
                f"{name}: {columns.start} to {columns.stop} cuts through a block of {MXFP4_BLOCK}"
            )
        blocks = slice(columns.start // MXFP4_BLOCK, columns.stop // MXFP4_BLOCK)
        total = (shape[0], shape[1], shape[2] // MXFP4_BLOCK)
        at, inner = (experts, rows, blocks), slice(0, MXFP4_BLOCK // 2)
        yield WeightSource(
            f"{name}_blocks",
            (*total, MXFP4_BLOCK // 2),
            (*at, inner),
            self.values,
            MXFP4_STORED_DTYPES,
        )
        yield WeightSource(
            f"{name}_scales", total, at, self.exponents, MXFP4_STORED_DTYPES, MXFP4_DUMMY_EXPONENT
        )
