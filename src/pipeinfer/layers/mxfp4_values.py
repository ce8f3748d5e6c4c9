"""What is kept of experts in MXFP4: four bits a value, e2m1, and an exponent for each 32 of a row.

Knows no product. Source: OCP Microscaling Formats, version 1.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from pipeinfer.layers.placement import Placement, WeightSource
from pipeinfer.settings import ConfigurationError

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
                f"quantization_config: a rank's {columns} columns are not whole blocks of {MXFP4_BLOCK}, "
                "as mxfp4 has them"
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
