"""What is kept of experts in MXFP4: four bits a value, e2m1, and an exponent for each 32 of a row.

Knows no product. Source: OCP Microscaling Formats, version 1.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from pipeinfer.layers.placement import Placement, Source
from pipeinfer.settings import ConfigurationError

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # and the same below zero
BLOCK = 32
EXPONENT_OF_ONE = 127
WORD = 4  # exponents that a kernel reads at once
DUMMY_EXPONENT = 120.0  # a standard deviation of 0.02 or so
STORED = ("U8",)


@dataclass(frozen=True)
class Mxfp4Values:
    """values: uint8 [experts, out, in / 32, 16], the first of two in the lower bits; exponents:
    uint8 [experts, out, in / 32]."""

    values: torch.Tensor
    exponents: torch.Tensor

    @classmethod
    def empty(cls, size: tuple[int, int, int], placement: Placement) -> Mxfp4Values:
        """Not yet filled; `size`: experts, out, in. ConfigurationError unless a row has whole
        blocks."""
        experts, rows, columns = size
        if columns % BLOCK:
            raise ConfigurationError(
                f"quantization_config: a rank's {columns} columns are not whole blocks of {BLOCK}, "
                "as mxfp4 has them"
            )
        blocks = (experts, rows, columns // BLOCK)
        device = placement.device
        return cls(
            torch.empty((*blocks, BLOCK // 2), dtype=torch.uint8, device=device),
            torch.empty(blocks, dtype=torch.uint8, device=device),
        )

    def decode(self, into: torch.Tensor) -> None:
        """Fills [experts, out, in], an expert after the other."""
        table = torch.tensor([*E2M1, *(-one for one in E2M1)], device=into.device)
        for values, exponents, plain in zip(self.values, self.exponents, into, strict=True):
            both = torch.stack((values & 15, values >> 4), dim=-1).flatten(-2).int()
            powers = exponents.int() - EXPONENT_OF_ONE
            plain.copy_(torch.ldexp(table[both], powers[..., None]).flatten(1))

    def packed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 ([experts, out, in / 2], [experts, out, blocks]) as kernels/moe.py takes them:
        what fills the blocks of a row up to a multiple of WORD stands for 1."""
        more = -self.exponents.shape[2] % WORD
        filled = functional.pad(self.exponents, (0, more), value=EXPONENT_OF_ONE)
        return self.values.flatten(2), filled

    def sources(
        self, name: str, shape: tuple[int, int, int], held: tuple[slice, slice, slice]
    ) -> Iterator[Source]:
        """`held` of experts, rows and columns of `shape`; ConfigurationError if columns cut through
        a block."""
        experts, rows, columns = held
        if columns.start % BLOCK or columns.stop % BLOCK:
            raise ConfigurationError(
                f"{name}: {columns.start} to {columns.stop} cuts through a block of {BLOCK}"
            )
        blocks = slice(columns.start // BLOCK, columns.stop // BLOCK)
        total = (shape[0], shape[1], shape[2] // BLOCK)
        at, inner = (experts, rows, blocks), slice(0, BLOCK // 2)
        yield Source(f"{name}_blocks", (*total, BLOCK // 2), (*at, inner), self.values, STORED)
        yield Source(f"{name}_scales", total, at, self.exponents, STORED, DUMMY_EXPONENT)
