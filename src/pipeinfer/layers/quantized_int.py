"""What is kept of a matrix in 4 bits: whole numbers 0 to 15, scales and zeros of groups of columns.

AWQ's, GPTQ's and compressed-tensors' files have the same numbers in different order; all of them
are laid out in one way here. Knows no product. Sources: https://arxiv.org/abs/2306.00978 and
https://arxiv.org/abs/2210.17323.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from pipeinfer.checkpoint.quantization import Int4, Int8
from pipeinfer.kernels.int4_layout import EACH, RUN, decoded, packed, run_of
from pipeinfer.kernels.int4_tiles import COLUMNS, cut
from pipeinfer.layers.placement import (
    DUMMY_STD,
    ConvertingTarget,
    CopyTarget,
    PartialSum,
    Placement,
    QuantizingTarget,
    WeightSource,
)
from pipeinfer.layers.weight import SmallMGemm, small_m_gemm
from pipeinfer.settings import ConfigurationError

INT4_DUMMY_ZERO = 8
WORDS, PLAIN = ("I32",), None
INT4_DUMMY_SCALE = DUMMY_STD / 4.6  # the standard deviation of numbers drawn evenly
# Where AWQ has the columns of an int32, from its lowest bits on.
AWQ_NIBBLE_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
NIBBLE_ORDER = tuple(range(EACH))


@dataclass(frozen=True)
class Int4Tensor:
    """Values (decoded.py). numbers: int32 [runs, rows, words], and kept: [groups, rows, 2] of the
    model's dtype, a scale and a zero side by side: what a kernel reads at a time lies together.
    Each may be a stack of matrices.
    """

    qweight: torch.Tensor
    scales_and_zeros: torch.Tensor
    form: Int4

    @property
    def scale(self) -> torch.Tensor:
        """[rows, groups]"""
        return self.scales_and_zeros[..., 0].transpose(-1, -2)

    @property
    def zero(self) -> torch.Tensor:
        """[rows, groups], whole numbers 0 to 16."""
        return self.scales_and_zeros[..., 1].transpose(-1, -2)

    @property
    def words(self) -> torch.Tensor:
        """[rows, runs, words]"""
        return self.qweight.transpose(-2, -3)

    @classmethod
    def empty(cls, size: tuple[int, ...], form: Int4, placement: Placement) -> Int4Tensor:
        """Not yet filled; `size` ends with rows and columns. ConfigurationError if those do not
        fit groups and words."""
        *stack, rows, columns = size
        group = form.group or columns
        if columns % group or columns % EACH or rows % EACH:
            raise ConfigurationError(
                f"quantization_config: a rank's {rows} x {columns} weights do not divide into "
                f"groups of {group} columns and words of {EACH} numbers"
            )
        device = placement.device
        groups = (*stack, columns // group, rows, 2)
        run = run_of(columns)
        words = (*stack, columns // run, rows, run // EACH)
        return cls(
            torch.empty(words, dtype=torch.int32, device=device),
            torch.full(groups, INT4_DUMMY_ZERO, dtype=placement.dtype, device=device),
            form,
        )

    def __getitem__(self, index: int) -> Int4Tensor:
        """One of a stack."""
        return Int4Tensor(self.qweight[index], self.scales_and_zeros[index], self.form)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        return decoded(self.words, self.scale, self.zero, dtype)

    def permute(self, rows: torch.Tensor) -> None:
        for part in (self.qweight, self.scales_and_zeros):
            part[:, : len(rows)] = part[:, rows]

    def sources(
        self, name: str, rows: slice, shape: tuple[int, int], slices: tuple[slice, slice]
    ) -> Iterator[WeightSource]:
        """ConfigurationError if `slices` cut through a group or a word."""
        group = self.form.group or shape[1]
        numbers, scale, zero = self.words[rows], self.scale[rows], self.zero[rows]
        cut = _FileSlices(name, shape, slices, group)
        if self.form.packing == "compressed-tensors":
            kept = ConvertingTarget(
                numbers, lambda words: packed(_unpacked_along_columns(words, NIBBLE_ORDER))
            )
            yield cut.source("weight_packed", kept, rows=1, columns=EACH)
            yield cut.source("weight_scale", scale, rows=1, columns=group)
            if self.form.zeros:
                kept = ConvertingTarget(zero, lambda words: _unpacked_along_rows(words))
                yield cut.source("weight_zero_point", kept, rows=EACH, columns=group)
            return
        awq = self.form.packing == "awq"
        places = AWQ_NIBBLE_ORDER if awq else NIBBLE_ORDER
        unpack = partial(_unpacked_along_columns, places=places)
        if awq:
            kept = ConvertingTarget(numbers, lambda words: packed(unpack(words).t()))
            yield cut.transposed("qweight", kept, rows=EACH, columns=1)
        else:
            kept = ConvertingTarget(numbers, lambda words: packed(_unpacked_along_rows(words).t()))
            yield cut.transposed("qweight", kept, rows=1, columns=EACH)
        shift = self.form.zero_shift
        kept = ConvertingTarget(zero, lambda words: (unpack(words) + shift).t())
        yield cut.transposed("qzeros", kept, rows=EACH, columns=group)
        yield cut.transposed("scales", scale.t(), rows=1, columns=group)


@dataclass(frozen=True)
class _FileSlices:
    """This rank's `slices` of matrix `name`, of `shape`, whose groups have `group` columns."""

    name: str
    shape: tuple[int, int]
    slices: tuple[slice, slice]
    group: int

    def source(self, what: str, target: CopyTarget, rows: int, columns: int) -> WeightSource:
        """Of a tensor with an entry for each `rows` x `columns`: words, where those are eight."""
        total = self.shape[0] // rows, self.shape[1] // columns
        held = self._part(self.slices[0], rows), self._part(self.slices[1], columns)
        stored = WORDS if EACH in (rows, columns) else PLAIN
        return WeightSource(f"{self.name}.{what}", total, held, target, stored, INT4_DUMMY_SCALE)

    def transposed(self, what: str, target: CopyTarget, rows: int, columns: int) -> WeightSource:
        """As `source`, of a tensor whose first dimension is that of columns."""
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
    """int32 [n, m] to uint8 [n, 8 m]; places: of each number among the eight of a word."""
    shifts = 4 * torch.tensor(places, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> shifts) & 15).to(torch.uint8).flatten(1)


def _unpacked_along_rows(words: torch.Tensor) -> torch.Tensor:
    """int32 [n, m] to uint8 [8 n, m]."""
    shifts = 4 * torch.arange(EACH, dtype=torch.int32, device=words.device)
    return ((words[:, None, :] >> shifts[:, None]) & 15).to(torch.uint8).flatten(0, 1)


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


INT8_MAX = 127  # of the whole numbers of a row, in magnitude
MIN_ROW_MAX = 1e-12  # stands for the magnitude of a row of zeros


@dataclass(frozen=True)
class Int8Tensor:
    """Values (decoded.py). weight: int8 [rows, columns]; scale: [rows], in the model's dtype."""

    weight: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def empty(cls, size: tuple[int, ...], form: Int8, placement: Placement) -> Int8Tensor:
        """Not yet filled; `size` is rows and columns, before which a stack may have others."""
        weight = torch.empty(size, dtype=torch.int8, device=placement.device)
        return cls(weight, placement.empty(*size[:-1]))

    def __getitem__(self, index: int) -> Int8Tensor:
        """One of a stack."""
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
    """(whole numbers [n, columns], their scales [n] in the dtype `scales`) of plain rows; the
    largest of a row becomes LARGEST."""
    wide = values.to(torch.float32)
    # Numbers are rounded by the scale as it is kept, so that its own rounding costs nothing.
    scale = (wide.abs().amax(-1).clamp_(min=MIN_ROW_MAX) / INT8_MAX).to(scales)
    rounded = (wide / scale.to(torch.float32)[:, None]).round_()
    return rounded.clamp_(-INT8_MAX, INT8_MAX), scale


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
