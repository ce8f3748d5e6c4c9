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

from pipeinfer.checkpoint.quantization import Int4
from pipeinfer.kernels.formats import INT4_PER_WORD, dequantize_int4, int4_tile_k, pack_int4
from pipeinfer.layers.placement import DUMMY_STD, Converted, Placement, Source, Target
from pipeinfer.settings import ConfigurationError

MIDDLE = 8
WORDS, PLAIN = ("I32",), None
DUMMY_SCALE = DUMMY_STD / 4.6  # the standard deviation of numbers drawn evenly
# Where AWQ has the columns of an int32, from its lowest bits on.
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
IN_ORDER = tuple(range(INT4_PER_WORD))


@dataclass(frozen=True)
class Int4Values:
    """Values (decoded.py). numbers: int32 [runs, rows, words], and kept: [groups, rows, 2] of the
    model's dtype, a scale and a zero side by side: what a kernel reads at a time lies together.
    Each may be a stack of matrices.
    """

    numbers: torch.Tensor
    kept: torch.Tensor
    form: Int4

    @property
    def scale(self) -> torch.Tensor:
        """[rows, groups]"""
        return self.kept[..., 0].transpose(-1, -2)

    @property
    def zero(self) -> torch.Tensor:
        """[rows, groups], whole numbers 0 to 16."""
        return self.kept[..., 1].transpose(-1, -2)

    @property
    def words(self) -> torch.Tensor:
        """[rows, runs, words]"""
        return self.numbers.transpose(-2, -3)

    @classmethod
    def empty(cls, size: tuple[int, ...], form: Int4, placement: Placement) -> Int4Values:
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
            torch.full(groups, MIDDLE, dtype=placement.dtype, device=device),
            form,
        )

    def __getitem__(self, index: int) -> Int4Values:
        """One of a stack."""
        return Int4Values(self.numbers[index], self.kept[index], self.form)

    def decoded(self, dtype: torch.dtype) -> torch.Tensor:
        return dequantize_int4(self.words, self.scale, self.zero, dtype)

    def permute(self, rows: torch.Tensor) -> None:
        for part in (self.numbers, self.kept):
            part[:, : len(rows)] = part[:, rows]

    def sources(
        self, name: str, rows: slice, shape: tuple[int, int], slices: tuple[slice, slice]
    ) -> Iterator[Source]:
        """ConfigurationError if `slices` cut through a group or a word."""
        group = self.form.group or shape[1]
        numbers, scale, zero = self.words[rows], self.scale[rows], self.zero[rows]
        cut = _Cut(name, shape, slices, group)
        if self.form.packing == "compressed-tensors":
            kept = Converted(numbers, lambda words: pack_int4(_along_columns(words, IN_ORDER)))
            yield cut.source("weight_packed", kept, rows=1, columns=INT4_PER_WORD)
            yield cut.source("weight_scale", scale, rows=1, columns=group)
            if self.form.zeros:
                kept = Converted(zero, lambda words: _along_rows(words))
                yield cut.source("weight_zero_point", kept, rows=INT4_PER_WORD, columns=group)
            return
        awq = self.form.packing == "awq"
        places = AWQ_PLACES if awq else IN_ORDER
        unpack = partial(_along_columns, places=places)
        if awq:
            kept = Converted(numbers, lambda words: pack_int4(unpack(words).t()))
            yield cut.turned("qweight", kept, rows=INT4_PER_WORD, columns=1)
        else:
            kept = Converted(numbers, lambda words: pack_int4(_along_rows(words).t()))
            yield cut.turned("qweight", kept, rows=1, columns=INT4_PER_WORD)
        shift = self.form.zero_shift
        kept = Converted(zero, lambda words: (unpack(words) + shift).t())
        yield cut.turned("qzeros", kept, rows=INT4_PER_WORD, columns=group)
        yield cut.turned("scales", scale.t(), rows=1, columns=group)


@dataclass(frozen=True)
class _Cut:
    """This rank's `slices` of matrix `name`, of `shape`, whose groups have `group` columns."""

    name: str
    shape: tuple[int, int]
    slices: tuple[slice, slice]
    group: int

    def source(self, what: str, target: Target, rows: int, columns: int) -> Source:
        """Of a tensor with an entry for each `rows` x `columns`: words, where those are eight."""
        total = self.shape[0] // rows, self.shape[1] // columns
        held = self._part(self.slices[0], rows), self._part(self.slices[1], columns)
        stored = WORDS if INT4_PER_WORD in (rows, columns) else PLAIN
        return Source(f"{self.name}.{what}", total, held, target, stored, DUMMY_SCALE)

    def turned(self, what: str, target: Target, rows: int, columns: int) -> Source:
        """As `source`, of a tensor whose first dimension is that of columns."""
        (height, width), (down, across) = self.shape, self.slices
        turned = _Cut(self.name, (width, height), (across, down), self.group)
        return turned.source(what, target, columns, rows)

    def _part(self, cut: slice, each: int) -> slice:
        if cut.start % each or cut.stop % each:
            raise ConfigurationError(
                f"{self.name}: {cut.start} to {cut.stop} cuts through {each} that are stored as one"
            )
        return slice(cut.start // each, cut.stop // each)


def _along_columns(words: torch.Tensor, places: tuple[int, ...]) -> torch.Tensor:
    """int32 [n, m] to uint8 [n, 8 m]; places: of each number among the eight of a word."""
    shifts = 4 * torch.tensor(places, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> shifts) & 15).to(torch.uint8).flatten(1)


def _along_rows(words: torch.Tensor) -> torch.Tensor:
    """int32 [n, m] to uint8 [8 n, m]."""
    shifts = 4 * torch.arange(INT4_PER_WORD, dtype=torch.int32, device=words.device)
    return ((words[:, None, :] >> shifts[:, None]) & 15).to(torch.uint8).flatten(0, 1)
