"""Matrices of one size that are one tensor on disk, one for each expert that a rank has.

Plain ones stand there as [in, out], those in MXFP4 as [out, in]; these stay so where a device has
kernels for them. Knows no expert and no product.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pipeinfer.checkpoint.quantization import Format, Mxfp4
from pipeinfer.layers.fp8_products import small_m_gemm_8bit
from pipeinfer.layers.mxfp4_values import Mxfp4Tensor
from pipeinfer.layers.placement import Placement, WeightSource
from pipeinfer.settings import ConfigurationError


class MergedExpertWeights:
    """`size`: matrices, out, in. halves: rows of two matrices stand on disk in turn, and one after
    the other once they are final. ConfigurationError if form is neither None, plain, nor MXFP4.

    plain: [matrices, out, in], final from `pack` on; None where they stay in MXFP4.
    """

    def __init__(
        self,
        form: Format | None,
        size: tuple[int, int, int],
        placement: Placement,
        interleaved: bool = False,
    ) -> None:
        if form not in (None, Mxfp4()):
            raise ConfigurationError(
                "experts with bounds are stored plain or in mxfp4, not in another number format"
            )
        self._stored = None if form is None else Mxfp4Tensor.empty(size, placement)
        kept = form is not None and not placement.dequantizes
        stays = kept and small_m_gemm_8bit(placement) is not None
        self.unquantized = None if stays else placement.empty(*size)
        self._interleaved = interleaved
        self._packed: tuple[torch.Tensor, torch.Tensor | None] | None = None

    @property
    def for_kernels(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(weight, scale) as kernels/moe.py takes them, from `pack` on; RuntimeError before."""
        if self._packed is None:
            raise RuntimeError("these matrices are not final yet")
        return self._packed

    def pack(self) -> None:
        """To be called once, when the weights are final."""
        plain, stored, self._stored = self.unquantized, self._stored, None
        if self._interleaved:
            for part in (plain,) if stored is None else (stored.values, stored.exponents):
                if part is not None:
                    deinterleave(part)
        if plain is not None:
            if stored is not None:
                stored.dequantize_into(plain)
            self._packed = plain, None
        elif stored is not None:
            self._packed = stored.padded_for_kernels()

    def sources(
        self, name: str, shape: tuple[int, int, int], held: tuple[slice, slice, slice]
    ) -> Iterator[WeightSource]:
        """`held` of matrices, out and in of `shape`, which is that of all ranks."""
        if self._stored is not None:
            yield from self._stored.sources(name, shape, held)
        elif self.unquantized is not None:
            (count, out, deep), (matrices, rows, columns) = shape, held
            turned = self.unquantized.transpose(1, 2)
            yield WeightSource(name, (count, deep, out), (matrices, columns, rows), turned)


def deinterleave(stack: torch.Tensor) -> None:
    """Of each matrix, rows 0, 2, 4 ... come before rows 1, 3, 5 ..., in place."""
    for rows in stack:
        rows.copy_(torch.cat((rows[::2], rows[1::2])))
