"""Matrices in floating-point formats of 8 and 4 bits, and the GEMM with those that stay in FP8.

- FP8 (e4m3, https://arxiv.org/abs/2209.05433): a float32 scale for each row or each block. Inputs
  are quantized to FP8 too, few rows or many: each by its largest value, or each 128 values of it
  where weights have scales by block. For GPUs with tensor cores for it.
- MXFP4 (OCP Microscaling Formats, version 1.0): values in e2m1 and an exponent for each 32 of a
  row, for the experts of mixtures, whose kernels are kernels/moe.py.

Knows no layer and no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from pipeinfer.checkpoint.quantization import Fp8
from pipeinfer.kernels.formats import E4M3, SCALE_BLOCK, quantize_rows_min_error
from pipeinfer.kernels.tile_configs import Fp8GemmKind as Kind
from pipeinfer.kernels.tile_configs import GemmConfig, fp8_gemm_config
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
# Standard deviation of dummy values, and the scale that makes them dummy weights.
FP8_DUMMY_STD = 16.0
FP8_DUMMY_SCALE = DUMMY_STD / FP8_DUMMY_STD


@dataclass(frozen=True)
class Fp8Tensor:
    """A QuantizedTensor in FP8, or a stack of them.

    Attributes:
        weight: e4m3 [rows, columns].
        scale: float32 [rows, 1], or of blocks [rows / high, columns / wide], rounded up.
        form: the format.
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
        """See Weight. ConfigurationError if rows would leave their block."""
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
        """See Weight. ConfigurationError if `slices` cut through a block."""
        weight, scale = f"{name}.weight", f"{name}.{self.form.scale}"
        if self.form.quantize_at_load:
            target = QuantizingTarget(self.weight[rows], self.scale[rows], quantize_rows_min_error)
            yield WeightSource(weight, shape, slices, target)
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
    """The blocks of `side` that the rows or columns `cut` of `size` are."""
    if cut.start % side or (cut.stop % side and cut.stop != size):
        raise ConfigurationError(
            f"{name}: {cut.start} to {cut.stop} of {size} are not whole blocks of {side}, which "
            "share a scale"
        )
    return slice(cut.start // side, -(-cut.stop // side))


# Compute capability from which tensor cores take FP8 with scales by row of both operands.
FP8_MIN_CAPABILITY = (9, 0)
# Rows and columns of a matrix with scales by row must be multiples of it.
FP8_SIDE_MULTIPLE = 16
# Rows up to which sgl_kernel's GEMM is the faster one (docs/benchmarks.md).
SGL_KERNEL_MAX_ROWS = 128

LargeMGemm = Callable[
    [QuantizedActivations, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor
]


def fp8_gemm(form: Fp8, size: tuple[int, int], placement: Placement) -> Fp8Gemm | None:
    """None where a matrix of `size` has to be dequantized: on this device, or of this size."""
    small_m = _gemm_for(form, size, placement)
    return None if small_m is None else Fp8Gemm(small_m, form.scale_scope == "block")


def stacked_fp8(form: Fp8, size: tuple[int, int, int], placement: Placement) -> Fp8Tensor | None:
    """Not yet filled, for matrices [count, out, in] that stay in FP8; None where each would have to
    be dequantized."""
    gemm = _gemm_for(form, size[1:], placement)
    return None if gemm is None else Fp8Tensor.empty(size, form, placement)


def small_m_gemm_8bit(placement: Placement) -> SmallMGemm | None:
    """None where the device has no kernels for FP8 and MXFP4, or not in this dtype."""
    gemm = small_m_gemm(placement.device, placement.dtype)
    if gemm is None or placement.dtype != torch.bfloat16:
        return None
    capability = torch.cuda.get_device_capability(placement.device)
    return gemm if capability >= FP8_MIN_CAPABILITY else None


def _gemm_for(form: Fp8, size: tuple[int, int], placement: Placement) -> SmallMGemm | None:
    blocks = form.scale_scope == "block"
    fits = all(side % (SCALE_BLOCK if blocks else FP8_SIDE_MULTIPLE) == 0 for side in size)
    if not fits or (blocks and form.block != (SCALE_BLOCK, SCALE_BLOCK)):
        return None
    return small_m_gemm_8bit(placement)


class Fp8Gemm:
    """A QuantizedGemm of FP8 with FP8; products in bfloat16."""

    def __init__(self, small_m: SmallMGemm, blocks: bool) -> None:
        """blocks: weights have a scale for each 128 x 128 values, not for each row."""
        from pipeinfer.kernels import gemm as kernels

        self.input_quantizer = ActivationQuantizer(SCALE_BLOCK if blocks else 0)
        self._small_m, self._blocks = small_m, blocks
        self._kernels = kernels
        self._large_m = _block_gemm() if blocks else _row_gemm()

    def product(self, x: Activations, values: Fp8Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows, (weight, scale) = self._quantized(x), (values.weight, values.scale)
        tile = self._tile("product", x, values)
        if tile is None:
            return self._large_m(rows, weight, scale, bias)
        scales = self._kernels.GemmScales(rows.scale, scale)
        return self._kernels.small_m_gemm(rows.values, weight, tile, bias, scales, torch.bfloat16)

    def split_k(
        self, x: Activations, values: Fp8Tensor, bias: torch.Tensor | None
    ) -> PartialSum | None:
        tile = self._tile("split", x, values)
        if tile is None:
            return None
        rows = self._quantized(x)
        scales = self._kernels.GemmScales(rows.scale, values.scale)
        parts = self._kernels.split_k_gemm(rows.values, values.weight, tile, bias, scales)
        return PartialSum(parts, self._small_m)

    def _tile(self, kind: Kind, x: Activations, values: Fp8Tensor) -> GemmConfig | None:
        width, depth = values.weight.shape
        return fp8_gemm_config(kind, x.shape[0], width, depth, self._blocks)

    def _quantized(self, x: Activations) -> QuantizedActivations:
        return x if x.dtype == E4M3 else self.input_quantizer.quantize(x)


def _block_gemm() -> LargeMGemm:
    from pipeinfer.kernels.gemm import block_scaled_gemm

    def gemm(
        rows: QuantizedActivations,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        return block_scaled_gemm(rows.values, rows.scale, weight, scale, torch.bfloat16, bias)

    return gemm


def _row_gemm() -> LargeMGemm:
    try:
        from sgl_kernel import fp8_scaled_mm as sgl_gemm  # type: ignore
    except ImportError:  # not installed, or built for other GPUs
        sgl_gemm = None

    def gemm(
        rows: QuantizedActivations,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        x, by_row = rows.values, rows.scale
        if x.shape[0] == 0:  # of a step that samples no row, behind the last layer's attention
            return torch.empty(0, weight.shape[0], dtype=torch.bfloat16, device=x.device)
        if sgl_gemm is not None and x.shape[0] <= SGL_KERNEL_MAX_ROWS:
            return sgl_gemm(x, weight.t(), by_row, scale, torch.bfloat16, bias)
        return torch.ops.aten._scaled_mm(
            x, weight.t(), by_row, scale.t(), bias, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return gemm


# Values of e2m1 by their number; 8 more have the other sign.
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Values of a row that share an exponent.
MXFP4_BLOCK = 32
# The stored exponent that stands for a factor of one.
EXPONENT_OF_ONE = 127
# Exponents of a row that a kernel reads at once.
MXFP4_SCALE_MULTIPLE = 4
# Of dummy weights: their standard deviation is about 0.02.
MXFP4_DUMMY_EXPONENT = 120.0
MXFP4_STORED_DTYPES = ("U8",)


@dataclass(frozen=True)
class Mxfp4Tensor:
    """A matrix for each expert, in MXFP4.

    Attributes:
        values: uint8 [experts, out, in / 32, 16], two values a byte, the first in the lower bits.
        exponents: uint8 [experts, out, in / 32].
    """

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
        """Fills [experts, out, in], one expert at a time."""
        table = torch.tensor(
            [*E2M1_MAGNITUDES, *(-one for one in E2M1_MAGNITUDES)], device=into.device
        )
        for values, exponents, expert in zip(self.values, self.exponents, into, strict=True):
            both = torch.stack((values & 15, values >> 4), dim=-1).flatten(-2).int()
            powers = exponents.int() - EXPONENT_OF_ONE
            expert.copy_(torch.ldexp(table[both], powers[..., None]).flatten(1))

    def padded_for_kernels(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(values uint8 [experts, out, in / 2], exponents uint8 [experts, out, blocks]) as
        kernels/moe.py takes them: the blocks of a row are filled up to a multiple of
        MXFP4_SCALE_MULTIPLE with exponents that stand for 1."""
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
