"""Matrices in whole numbers of 4 and 8 bits, and the GEMM with those that stay so.

- INT4: numbers 0 to 15 with a scale and a zero point for each group of columns. The files of AWQ
  (https://arxiv.org/abs/2306.00978), GPTQ (https://arxiv.org/abs/2210.17323) and compressed-tensors
  have the same numbers in different order; all of them are laid out in one way here. On GPUs, for
  few rows the kernel dequantizes in registers, for many rows the matrix is dequantized in memory.
- INT8: numbers -127 to 127 with a scale for each row, on CPUs that multiply bfloat16, by torch.

Knows no layer and no file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from pipeinfer.checkpoint.quantization import Int4, Int8
from pipeinfer.kernels.formats import (
    INT4_PER_WORD,
    INT4_TILE_K,
    dequantize_int4,
    int4_tile_k,
    pack_int4,
)
from pipeinfer.kernels.tile_configs import INT4_BLOCK_N, int4_gemm_config
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

# Of dummy weights: the zero point, and the scale (4.6 is the standard deviation of numbers that are
# drawn evenly from 0 to 15).
INT4_DUMMY_ZERO = 8
INT4_DUMMY_SCALE = DUMMY_STD / 4.6
INT4_STORED_DTYPES = ("I32",)
# Which of its eight columns each 4 bits of an int32 are, from the lowest bits on: in AWQ's files,
AWQ_NIBBLE_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
# and in those of the others.
NIBBLE_ORDER = tuple(range(INT4_PER_WORD))


@dataclass(frozen=True)
class Int4Tensor:
    """A QuantizedTensor in INT4, or a stack of them. What a kernel reads at a time lies together.

    Attributes:
        qweight: int32 [runs, rows, words], eight numbers a word (kernels/int4_layout.py).
        scales_and_zeros: [groups, rows, 2] in the model's dtype, a scale and a zero side by side.
        form: the format.
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
        if columns % group or columns % INT4_PER_WORD or rows % INT4_PER_WORD:
            raise ConfigurationError(
                f"quantization_config: a rank's {rows} x {columns} weights do not divide into "
                f"groups of {group} columns and words of {INT4_PER_WORD} numbers"
            )
        device = placement.device
        groups = (*stack, columns // group, rows, 2)
        run = int4_tile_k(columns)
        words = (*stack, columns // run, rows, run // INT4_PER_WORD)
        return cls(
            torch.empty(words, dtype=torch.int32, device=device),
            torch.full(groups, INT4_DUMMY_ZERO, dtype=placement.dtype, device=device),
            form,
        )

    def __getitem__(self, index: int) -> Int4Tensor:
        """One of a stack."""
        return Int4Tensor(self.qweight[index], self.scales_and_zeros[index], self.form)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        return dequantize_int4(self.words, self.scale, self.zero, dtype)

    def permute(self, rows: torch.Tensor) -> None:
        for part in (self.qweight, self.scales_and_zeros):
            part[:, : len(rows)] = part[:, rows]

    def sources(
        self, name: str, rows: slice, shape: tuple[int, int], slices: tuple[slice, slice]
    ) -> Iterator[WeightSource]:
        """See Weight. ConfigurationError if `slices` cut through a group or a word."""
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
    """This rank's part of a matrix in the checkpoint, of whose numbers several are stored as one.

    Attributes:
        name: of the matrix.
        shape: [out, in].
        slices: of it, this rank's.
        group: columns that share a scale.
    """

    name: str
    shape: tuple[int, int]
    slices: tuple[slice, slice]
    group: int

    def source(self, what: str, target: CopyTarget, rows: int, columns: int) -> WeightSource:
        """Of the tensor `what` with an entry for each `rows` x `columns` of the matrix: an int32,
        where either is eight."""
        total = self.shape[0] // rows, self.shape[1] // columns
        held = self._part(self.slices[0], rows), self._part(self.slices[1], columns)
        stored = INT4_STORED_DTYPES if INT4_PER_WORD in (rows, columns) else None
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
    shifts = 4 * torch.arange(INT4_PER_WORD, dtype=torch.int32, device=words.device)
    return ((words[:, None, :] >> shifts[:, None]) & 15).to(torch.uint8).flatten(0, 1)


# Columns of a group that the kernel takes beside whole runs.
INT4_SMALL_GROUPS = (16, 32, 64)


def int4_gemm(form: Int4, size: tuple[int, int], placement: Placement) -> Int4Gemm | None:
    """None where a matrix of `size` has to be dequantized: on this device, or of this size."""
    rows, columns = size
    small_m = small_m_gemm(placement.device, placement.dtype)
    group = form.group or columns
    grouped = group % INT4_TILE_K == 0 or group in INT4_SMALL_GROUPS
    if rows % INT4_BLOCK_N or columns % INT4_TILE_K or not grouped or small_m is None:
        return None
    return Int4Gemm(small_m, rows // INT4_BLOCK_N, placement.device)


class Int4Gemm:
    """A QuantizedGemm of INT4 with the model's dtype."""

    input_quantizer = None

    def __init__(self, small_m: SmallMGemm, tiles: int, device: torch.device) -> None:
        """tiles: of INT4_BLOCK_N rows of the matrix, for each of which splits are counted."""
        from pipeinfer.kernels import gemm

        self._small_m = small_m
        self._kernels = gemm
        self._arrived = torch.zeros(tiles, dtype=torch.int32, device=device)

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
        weight: int8 [rows, columns].
        scale: [rows], in the model's dtype.
    """

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
    """(whole numbers [n, columns], their scales [n] in the dtype `scales`) of rows [n, columns].
    The largest of a row becomes INT8_MAX."""
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
