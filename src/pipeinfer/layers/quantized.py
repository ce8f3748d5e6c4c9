"""Matrices in 8 and 4 bits, and the GEMM with those that stay so.

Floating-point formats:

- FP8 (e4m3, https://arxiv.org/abs/2209.05433): a float32 scale for each row or each block. Inputs
  are quantized to FP8 too, few rows or many: each by its largest value, or each 128 values of it
  where weights have scales by block. For GPUs with tensor cores for it.
- MXFP4 (OCP Microscaling Formats, version 1.0): values in e2m1 and an exponent for each 32 of a
  row, for the experts of mixtures, whose kernels are kernels/moe.py.

Whole numbers:

- INT4: numbers 0 to 15 with a scale and a zero point for each group of columns. The files of AWQ
  (https://arxiv.org/abs/2306.00978), GPTQ (https://arxiv.org/abs/2210.17323) and compressed-tensors
  have the same numbers in different order; all of them are laid out in one way here. On GPUs, for
  few rows the kernel dequantizes in registers, for many rows the matrix is dequantized in memory.
- INT8: numbers -127 to 127 with a scale for each row, on CPUs that multiply bfloat16, by torch.
- INT4 as GGUF files have it, with a scale and a zero for 32 columns, on the same CPUs, by torch.

Knows no layer and no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch.nn import functional

from pipeinfer.checkpoint.quantization import Fp8, Int4, Int4Blocks, Int8
from pipeinfer.kernels.formats import (
    E4M3,
    INT4_PER_WORD,
    INT4_TILE_K,
    SCALE_BLOCK,
    dequantize_int4,
    int4_tile_k,
    pack_int4,
    quantize_rows_min_error,
)
from pipeinfer.kernels.tile_configs import (
    INT4_BLOCK_N,
    GemmConfig,
    fp8_gemm_config,
    int4_gemm_config,
)
from pipeinfer.kernels.tile_configs import Fp8GemmKind as Kind
from pipeinfer.layers.placement import (
    DUMMY_STD,
    ConvertingTarget,
    CopyTarget,
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
    small_m_gemm_for,
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
    - weight: e4m3 [rows, columns]
    - scale: float32 [rows, 1], or of blocks [rows / high, columns / wide], rounded up
    - form: the format
    """

    weight: torch.Tensor
    scale: torch.Tensor
    form: Fp8

    @classmethod
    def empty(cls, size: tuple[int, ...], form: Fp8, placement: Placement) -> Fp8Tensor:
        """Allocates tensors that are not filled yet; `size` ends with rows and columns."""
        *stack, rows, columns = size
        high, wide = form.block if form.scale_scope == "block" else (1, columns)
        scales = (*stack, -(-rows // high), -(-columns // wide))
        return cls(
            placement.empty(*size, dtype=E4M3),
            placement.empty(*scales, dtype=torch.float32),
            form,
        )

    def __getitem__(self, index: int) -> Fp8Tensor:
        """Returns one matrix of a stack."""
        return Fp8Tensor(self.weight[index], self.scale[index], self.form)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        rows, columns = self.weight.shape
        scale = self.scale
        if self.form.scale_scope == "block":
            high, wide = self.form.block
            scale = scale.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
        return self.weight.float().mul_(scale).to(dtype)

    def permute(self, rows: torch.Tensor) -> None:
        """Permutes rows, see Weight.permute. ConfigurationError if rows would leave their block."""
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
        """Yields the sources, see Weight.sources. ConfigurationError if `slices` cut through a
        block.
        """
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
    """Allocates matrices [count, out, in] that stay in FP8, not filled yet; None if each would have
    to be dequantized.
    """
    gemm = _gemm_for(form, size[1:], placement)
    return None if gemm is None else Fp8Tensor.empty(size, form, placement)


def small_m_gemm_8bit(placement: Placement) -> SmallMGemm | None:
    """None where the device has no kernels for FP8 and MXFP4, or not in this dtype."""
    gemm = small_m_gemm_for(placement.device, placement.dtype)
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
        """Products by kernels. blocks: weights have a scale for each 128 x 128 values, not for each
        row.
        """
        from pipeinfer.kernels import gemm as kernels

        self.input_quantizer = ActivationQuantizer(SCALE_BLOCK if blocks else 0)
        self._small_m, self._blocks = small_m, blocks
        self._kernels = kernels
        self._large_m = _block_gemm() if blocks else _row_gemm()

    def pack(self, values: Fp8Tensor) -> None:
        """Does nothing: the values already have the layout of the products."""

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
        if x.shape[0] == 0:  # a step that samples no row, after the last layer's attention
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
# Standard deviation of dummy weights: about 0.02.
MXFP4_DUMMY_EXPONENT = 120.0
MXFP4_STORED_DTYPES = ("U8",)


@dataclass(frozen=True)
class Mxfp4Tensor:
    """A matrix for each expert, in MXFP4.

    Attributes:
    - values: uint8 [experts, out, in / 32, 16], two values a byte, the first in the lower bits
    - exponents: uint8 [experts, out, in / 32], views of `padded`
    - padded: uint8 [experts, out, blocks]: the exponents of a row are filled up to a multiple of
      MXFP4_SCALE_MULTIPLE with some that stand for 1, as kernels/moe.py takes them
    """

    values: torch.Tensor
    padded: torch.Tensor

    @property
    def exponents(self) -> torch.Tensor:
        return self.padded[..., : self.values.shape[2]]

    @classmethod
    def empty(cls, size: tuple[int, int, int], placement: Placement) -> Mxfp4Tensor:
        """Allocates tensors that are not filled yet. size: experts, out, in. ConfigurationError
        unless a row has whole blocks.
        """
        experts, rows, columns = size
        if columns % MXFP4_BLOCK:
            raise ConfigurationError(
                f"quantization_config: a rank's {columns} columns are not whole blocks of "
                f"{MXFP4_BLOCK}, as mxfp4 has them"
            )
        blocks = columns // MXFP4_BLOCK
        filled = -(-blocks // MXFP4_SCALE_MULTIPLE) * MXFP4_SCALE_MULTIPLE
        values = placement.empty(experts, rows, blocks, MXFP4_BLOCK // 2, dtype=torch.uint8)
        padded = placement.empty(experts, rows, filled, dtype=torch.uint8)
        if not placement.memory.final:
            padded[..., blocks:] = EXPONENT_OF_ONE
        return cls(values, padded)

    def dequantize_into(self, into: torch.Tensor) -> None:
        """Fills [experts, out, in], one expert at a time."""
        table = torch.tensor(
            [*E2M1_MAGNITUDES, *(-one for one in E2M1_MAGNITUDES)], device=into.device
        )
        for values, exponents, expert in zip(self.values, self.exponents, into, strict=True):
            both = torch.stack((values & 15, values >> 4), dim=-1).flatten(-2).int()
            powers = exponents.int() - EXPONENT_OF_ONE
            expert.copy_(torch.ldexp(table[both], powers[..., None]).flatten(1))

    @property
    def for_kernels(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (values uint8 [experts, out, in / 2], `padded`) as kernels/moe.py takes them."""
        return self.values.flatten(2), self.padded

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


# Dummy weights: the zero point, and the scale (4.6 is the standard deviation of numbers that are
# drawn evenly from 0 to 15).
INT4_DUMMY_ZERO = 8
INT4_DUMMY_SCALE = DUMMY_STD / 4.6
INT4_STORED_DTYPES = ("I32",)
# Columns (of eight) that the 4 bits of an int32 belong to, from the lowest bits on: in AWQ's files,
AWQ_NIBBLE_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
# and in other files.
NIBBLE_ORDER = tuple(range(INT4_PER_WORD))


@dataclass(frozen=True)
class Int4Tensor:
    """A QuantizedTensor in INT4, or a stack of them. Numbers that a kernel reads together are
    adjacent.

    Attributes:
    - qweight: int32 [runs, rows, words], eight numbers a word (kernels/int4_layout.py)
    - scales_and_zeros: [groups, rows, 2] in the model's dtype, a scale and a zero side by side
    - form: the format
    """

    qweight: torch.Tensor
    scales_and_zeros: torch.Tensor
    form: Int4

    @property
    def scale(self) -> torch.Tensor:
        """Scales, [rows, groups]."""
        return self.scales_and_zeros[..., 0].transpose(-1, -2)

    @property
    def zero(self) -> torch.Tensor:
        """Zeros, [rows, groups], whole numbers 0 to 16."""
        return self.scales_and_zeros[..., 1].transpose(-1, -2)

    @property
    def words(self) -> torch.Tensor:
        """Words, [rows, runs, words]."""
        return self.qweight.transpose(-2, -3)

    @classmethod
    def empty(cls, size: tuple[int, ...], form: Int4, placement: Placement) -> Int4Tensor:
        """Allocates tensors that are not filled yet; `size` ends with rows and columns.
        ConfigurationError if they do not fit groups and words.
        """
        *stack, rows, columns = size
        group = form.group or columns
        if columns % group or columns % INT4_PER_WORD or rows % INT4_PER_WORD:
            raise ConfigurationError(
                f"quantization_config: a rank's {rows} x {columns} weights do not divide into "
                f"groups of {group} columns and words of {INT4_PER_WORD} numbers"
            )
        run = int4_tile_k(columns)
        words = (*stack, columns // run, rows, run // INT4_PER_WORD)
        qweight = placement.empty(*words, dtype=torch.int32)
        scales_and_zeros = placement.empty(*stack, columns // group, rows, 2)
        if not placement.memory.final:
            scales_and_zeros.fill_(INT4_DUMMY_ZERO)
        return cls(qweight, scales_and_zeros, form)

    def __getitem__(self, index: int) -> Int4Tensor:
        """Returns one matrix of a stack."""
        return Int4Tensor(self.qweight[index], self.scales_and_zeros[index], self.form)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        return dequantize_int4(self.words, self.scale, self.zero, dtype)

    def permute(self, rows: torch.Tensor) -> None:
        for part in (self.qweight, self.scales_and_zeros):
            part[:, : len(rows)] = part[:, rows]

    def sources(
        self, name: str, rows: slice, shape: tuple[int, int], slices: tuple[slice, slice]
    ) -> Iterator[WeightSource]:
        """Yields the sources, see Weight.sources. ConfigurationError if `slices` cut through a
        group or a word.
        """
        group = self.form.group or shape[1]
        qweight, scale, zero = self.words[rows], self.scale[rows], self.zero[rows]
        part = _FileSlices(name, shape, slices, group)
        if self.form.packing == "compressed-tensors":
            target = ConvertingTarget(
                qweight, lambda words: pack_int4(_unpacked_along_columns(words, NIBBLE_ORDER))
            )
            yield part.source("weight_packed", target, rows=1, columns=INT4_PER_WORD)
            yield part.source("weight_scale", scale, rows=1, columns=group)
            if self.form.zeros:
                target = ConvertingTarget(zero, lambda words: _unpacked_along_rows(words))
                yield part.source("weight_zero_point", target, rows=INT4_PER_WORD, columns=group)
            return
        awq = self.form.packing == "awq"
        places = AWQ_NIBBLE_ORDER if awq else NIBBLE_ORDER
        unpack = partial(_unpacked_along_columns, places=places)
        if awq:
            target = ConvertingTarget(qweight, lambda words: pack_int4(unpack(words).t()))
            yield part.transposed("qweight", target, rows=INT4_PER_WORD, columns=1)
        else:
            target = ConvertingTarget(
                qweight, lambda words: pack_int4(_unpacked_along_rows(words).t())
            )
            yield part.transposed("qweight", target, rows=1, columns=INT4_PER_WORD)
        shift = self.form.zero_shift
        target = ConvertingTarget(zero, lambda words: (unpack(words) + shift).t())
        yield part.transposed("qzeros", target, rows=INT4_PER_WORD, columns=group)
        yield part.transposed("scales", scale.t(), rows=1, columns=group)


@dataclass(frozen=True)
class _FileSlices:
    """This rank's part of a matrix in the checkpoint that stores several numbers as one.

    Attributes:
    - name: of the matrix
    - shape: [out, in]
    - slices: this rank's part of the matrix
    - group: columns that share a scale
    """

    name: str
    shape: tuple[int, int]
    slices: tuple[slice, slice]
    group: int

    def source(self, what: str, target: CopyTarget, rows: int, columns: int) -> WeightSource:
        """Returns the source of the tensor `what` with an entry for each `rows` x `columns` of the
        matrix: an int32, if either is eight.
        """
        total = self.shape[0] // rows, self.shape[1] // columns
        held = self._part(self.slices[0], rows), self._part(self.slices[1], columns)
        stored = INT4_STORED_DTYPES if INT4_PER_WORD in (rows, columns) else None
        return WeightSource(f"{self.name}.{what}", total, held, target, stored, INT4_DUMMY_SCALE)

    def transposed(self, what: str, target: CopyTarget, rows: int, columns: int) -> WeightSource:
        """Returns the source of a tensor whose first dimension is that of columns, see `source`."""
        (height, width), (down, across) = self.shape, self.slices
        turned = _FileSlices(self.name, (width, height), (across, down), self.group)
        return turned.source(what, target, columns, rows)

    def _part(self, cut: slice, each: int) -> slice:
        if cut.start % each or cut.stop % each:
            raise ConfigurationError(
                f"{self.name}: {cut.start} to {cut.stop} cuts through {each} that are stored as one"
            )
        return slice(cut.start // each, cut.stop // each)


def _unpacked_along_columns(words: torch.Tensor, places: tuple[int, ...]) -> torch.Tensor:
    """Unpacks int32 [n, m] to uint8 [n, 8 m]. places: of each number among the eight of a word."""
    shifts = 4 * torch.tensor(places, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> shifts) & 15).to(torch.uint8).flatten(1)


def _unpacked_along_rows(words: torch.Tensor) -> torch.Tensor:
    """Unpacks int32 [n, m] to uint8 [8 n, m]."""
    shifts = 4 * torch.arange(INT4_PER_WORD, dtype=torch.int32, device=words.device)
    return ((words[:, None, :] >> shifts[:, None]) & 15).to(torch.uint8).flatten(0, 1)


# Columns of a group that the kernel takes beside whole runs.
INT4_SMALL_GROUPS = (16, 32, 64)


def int4_gemm(form: Int4, size: tuple[int, int], placement: Placement) -> Int4Gemm | None:
    """None where a matrix of `size` has to be dequantized: on this device, or of this size."""
    rows, columns = size
    small_m = small_m_gemm_for(placement.device, placement.dtype)
    group = form.group or columns
    grouped = group % INT4_TILE_K == 0 or group in INT4_SMALL_GROUPS
    if rows % INT4_BLOCK_N or columns % INT4_TILE_K or not grouped or small_m is None:
        return None
    return Int4Gemm(small_m, rows // INT4_BLOCK_N, placement.device)


class Int4Gemm:
    """A QuantizedGemm of INT4 with the model's dtype."""

    input_quantizer = None

    def __init__(self, small_m: SmallMGemm, tiles: int, device: torch.device) -> None:
        """Products by kernels. tiles: of INT4_BLOCK_N rows of the matrix, for each of which splits
        are counted.
        """
        from pipeinfer.kernels import gemm

        self._small_m = small_m
        self._kernels = gemm
        self._arrived = torch.zeros(tiles, dtype=torch.int32, device=device)

    def pack(self, values: Int4Tensor) -> None:
        """Does nothing: the values already have the layout of the products."""

    def product(
        self, x: torch.Tensor, values: Int4Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        how = int4_gemm_config(x.shape[0], values.qweight.shape[1], x.shape[1])
        if how is not None:
            weight = values.qweight, values.scales_and_zeros
            return self._kernels.int4_small_m_gemm(x, *weight, how, bias, self._arrived)[0]
        weight = self._kernels.int4_dequantize(values.qweight, values.scales_and_zeros, x.dtype)
        return functional.linear(x, weight, bias)

    def split_k(
        self, x: torch.Tensor, values: Int4Tensor, bias: torch.Tensor | None
    ) -> PartialSum | None:
        how = int4_gemm_config(x.shape[0], values.qweight.shape[1], x.shape[1])
        if how is None:
            return None
        parts = self._kernels.int4_small_m_gemm(
            x, values.qweight, values.scales_and_zeros, how, bias
        )
        return PartialSum(parts, self._small_m)


# Magnitude of the largest number of a row.
INT8_MAX = 127
# Stands for the largest magnitude of a row of zeros.
MIN_ROW_MAX = 1e-12


@dataclass(frozen=True)
class Int8Tensor:
    """A QuantizedTensor in INT8, or a stack of them.

    Attributes:
    - weight: int8 [rows, columns]
    - scale: [rows], in the model's dtype
    """

    weight: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def empty(cls, size: tuple[int, ...], form: Int8, placement: Placement) -> Int8Tensor:
        """Allocates tensors that are not filled yet; `size` is rows and columns, before which a
        stack may have others.
        """
        return cls(placement.empty(*size, dtype=torch.int8), placement.empty(*size[:-1]))

    def __getitem__(self, index: int) -> Int8Tensor:
        """Returns one matrix of a stack."""
        return Int8Tensor(self.weight[index], self.scale[index])

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        return self.weight.to(dtype).mul_(self.scale.to(dtype)[..., None])

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids`, int64 [T], in the model's dtype: [T, columns]."""
        return self.weight[ids].to(self.scale.dtype).mul_(self.scale[ids][:, None])

    def permute(self, rows: torch.Tensor) -> None:
        for part in (self.weight, self.scale):
            part[: len(rows)] = part[rows]

    def sources(
        self, name: str, rows: slice, shape: tuple[int, int], slices: tuple[slice, slice]
    ) -> Iterator[WeightSource]:
        how = partial(quantize_rows, scales=self.scale.dtype)
        target = QuantizingTarget(self.weight[rows], self.scale[rows], how)
        yield WeightSource(f"{name}.weight", shape, slices, target)


def quantize_rows(values: torch.Tensor, scales: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (whole numbers [n, columns], their scales [n] in the dtype `scales`) of rows [n,
    columns]. The largest of a row becomes INT8_MAX.
    """
    wide = values.to(torch.float32)
    # Numbers are rounded by the scale as it is stored, so that its own rounding costs nothing.
    scale = (wide.abs().amax(-1).clamp_(min=MIN_ROW_MAX) / INT8_MAX).to(scales)
    rounded = (wide / scale.to(torch.float32)[:, None]).round_()
    return rounded.clamp_(-INT8_MAX, INT8_MAX), scale


# Columns that torch's kernel reads at once, beyond the end of a row if they do not divide.
INT8_COLUMN_MULTIPLE = 16
# Rows from which on it is faster to dequantize the matrix for one product.
DEQUANTIZE_MIN_ROWS = 48


def int8_gemm(form: Int8, size: tuple[int, int], placement: Placement) -> Int8Gemm | None:
    """None where a matrix of `size` has to be dequantized: on this device, in this dtype or of this
    size."""
    fits = placement.device.type == "cpu" and placement.dtype == torch.bfloat16
    return Int8Gemm() if fits and size[1] % INT8_COLUMN_MULTIPLE == 0 else None


class Int8Gemm:
    """A QuantizedGemm of INT8 with bfloat16. A row's product is the same for any number of rows
    below DEQUANTIZE_MIN_ROWS."""

    input_quantizer = None

    def pack(self, values: Int8Tensor) -> None:
        """Does nothing: the values already have the layout of the products."""

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


# Rows from which on it is faster to dequantize the matrix for one product.
DEQUANTIZE_BLOCKS_MIN_ROWS = 96


@lru_cache(maxsize=1)
def packed_int4_rows() -> int:
    """Returns the number of adjacent rows in a matrix that torch has packed for this CPU: of each
    column, the first half of the rows is in the lower bits of bytes, the second in the upper ones.
    0: torch uses another layout, or cannot pack.
    """
    numbers = torch.arange(128 * Int4Blocks.group, dtype=torch.int32).view(128, -1) * 7 % 16
    try:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1)
    except (AttributeError, RuntimeError):
        return 0
    for rows in (64, 32):
        if torch.equal(_unpacked_by_run(packed, rows).mT.flatten(0, 1) + 8, numbers):
            return rows
    return 0


def _unpacked_by_run(packed: torch.Tensor, rows: int) -> torch.Tensor:
    """Returns int8 [out / rows, in, rows], -8 to 7, of a matrix that torch has packed."""
    blocks = packed.view(packed.shape[0] // rows, -1, rows // 2)
    return _nibbles(blocks).view(torch.int8).sub_(8)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Returns uint8 [..., 2 n] of uint8 [..., n]: the lower bits of all, then the upper ones."""
    return torch.cat((packed & 15, packed >> 4), -1)


@dataclass(frozen=True)
class Int4BlocksTensor:
    """A QuantizedTensor in INT4 blocks. Its values: (n - 8) * scale + zero.

    Attributes:
    - numbers: uint8 [rows, columns / 2], n of column c in the lower bits of a byte, of column c +
      columns / 2 in its upper ones; from Int4BlocksGemm.pack on as torch packs them, a run of rows
      after the other
    - scales_and_zeros: [blocks, rows, 2] in the model's dtype
    """

    numbers: torch.Tensor
    scales_and_zeros: torch.Tensor

    @classmethod
    def empty(
        cls, size: tuple[int, ...], form: Int4Blocks, placement: Placement
    ) -> Int4BlocksTensor:
        """Allocates tensors that are not filled yet. size: rows and columns, which divide into
        blocks.
        """
        rows, columns = size
        numbers = placement.empty(rows, columns // 2, dtype=torch.uint8)
        return cls(numbers, placement.empty(columns // Int4Blocks.group, rows, 2))

    def __getitem__(self, index: int) -> Int4BlocksTensor:
        raise TypeError("there are no stacks of INT4 blocks")

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        rows, half = self.numbers.shape
        values = _nibbles(self.numbers).to(dtype).sub_(8).view(rows, -1, Int4Blocks.group)
        scales, zeros = self.scales_and_zeros.to(dtype).permute(2, 1, 0)[..., None]
        return (values * scales + zeros).view(rows, 2 * half)

    def permute(self, rows: torch.Tensor) -> None:
        self.numbers[: len(rows)] = self.numbers[rows]
        self.scales_and_zeros[:, : len(rows)] = self.scales_and_zeros[:, rows]

    def sources(
        self, name: str, rows: slice, shape: tuple[int, int], slices: tuple[slice, slice]
    ) -> Iterator[WeightSource]:
        target = _BlocksTarget(self.numbers[rows], self.scales_and_zeros[:, rows])
        yield WeightSource(f"{name}.weight", shape, slices, target, Int4Blocks.types, blocks=True)


@dataclass(frozen=True)
class _BlocksTarget:
    """Rows of an Int4BlocksTensor, as a CopyTarget of a file's blocks."""

    numbers: torch.Tensor
    scales_and_zeros: torch.Tensor

    @property
    def device(self) -> torch.device:
        return self.numbers.device

    def copy_(self, blocks: torch.Tensor) -> None:
        """Unpacks `blocks` uint8 [n, blocks, 24], see gguf/config.py."""
        packed, floats = blocks[..., :16], blocks[..., 16:].contiguous().view(torch.float32)
        first, second = _nibbles(packed).flatten(1).chunk(2, -1)
        self.numbers.copy_(first | second << 4)
        self.scales_and_zeros.copy_(floats.transpose(0, 1))

    def __getitem__(self, rows: slice) -> _BlocksTarget:
        return _BlocksTarget(self.numbers[rows], self.scales_and_zeros[:, rows])


def int4_blocks_gemm(
    form: Int4Blocks, size: tuple[int, int], placement: Placement
) -> Int4BlocksGemm | None:
    """None where a matrix of `size` cannot stay so: on this device, in this dtype or of this
    size."""
    if placement.device.type != "cpu" or placement.dtype != torch.bfloat16:
        return None
    rows = packed_int4_rows()
    fits = rows and size[0] % rows == 0 and size[1] % Int4Blocks.group == 0
    return Int4BlocksGemm(rows) if fits else None


class Int4BlocksGemm:
    """A QuantizedGemm of INT4 blocks with bfloat16. A row's product is the same for any number of
    rows below DEQUANTIZE_BLOCKS_MIN_ROWS."""

    input_quantizer = None

    def __init__(self, rows: int) -> None:
        """Products by torch. rows: see packed_int4_rows."""
        self._rows = rows

    def pack(self, values: Int4BlocksTensor) -> None:
        """Packs the numbers in place: allocating and freeing between weights that stay would leave
        holes in memory.
        """
        pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu
        for numbers in values.numbers.split(self._rows):
            numbers.copy_(pack(_nibbles(numbers).int(), 1))

    def product(
        self, x: torch.Tensor, values: Int4BlocksTensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns x @ values.T + bias. values: packed."""
        packed, scales_and_zeros = values.numbers, values.scales_and_zeros
        if x.shape[0] >= DEQUANTIZE_BLOCKS_MIN_ROWS:
            product = torch.matmul(x, self._dequantized(packed, scales_and_zeros))
        else:
            product = torch.ops.aten._weight_int4pack_mm_for_cpu(
                x.contiguous(), packed, Int4Blocks.group, scales_and_zeros
            )
        return product if bias is None else product.add_(bias)

    def _dequantized(self, packed: torch.Tensor, scales_and_zeros: torch.Tensor) -> torch.Tensor:
        """Returns the dequantized matrix, [in, out]."""
        numbers = _unpacked_by_run(packed, self._rows).to(scales_and_zeros.dtype)
        runs, columns, rows = numbers.shape
        # [blocks, out, 2] to two [runs, blocks, 1, rows], laid out as numbers are
        factors = scales_and_zeros.unflatten(1, (runs, rows)).permute(3, 1, 0, 2)
        scales, zeros = factors.unsqueeze(3).contiguous()
        blocks = numbers.view(runs, columns // Int4Blocks.group, Int4Blocks.group, rows)
        values = torch.addcmul(zeros, blocks, scales)
        return values.view(runs, columns, rows).transpose(0, 1).reshape(columns, runs * rows)

    def split_k(
        self, x: torch.Tensor, values: Int4BlocksTensor, bias: torch.Tensor | None
    ) -> PartialSum | None:
        return None
