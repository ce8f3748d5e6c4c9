"""Matrices whose values are stored in a format of their own: what a format's values are, and the
Weight that makes them plain once they are final.

For devices without a product for the format. Knows no format.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from pipeinfer.layers.matrix import UnquantizedWeight
from pipeinfer.layers.partial_sum import PartialSum
from pipeinfer.layers.placement import Placement, WeightSource


class QuantizedTensor(Protocol):
    """What is kept of a matrix [rows, columns], to be filled from a checkpoint."""

    def dequantized(self, dtype: torch.dtype, /) -> torch.Tensor:
        """The plain matrix, rounded to `dtype` once."""
        ...

    def permute(self, rows: torch.Tensor, /) -> None:
        """See Weight, as `sources`."""
        ...

    def sources(
        self, name: str, rows: slice, shape: tuple[int, int], slices: tuple[slice, slice], /
    ) -> Iterator[WeightSource]: ...


class DequantizedWeight:
    """A Weight (matrix.py): from `pack` on a plain matrix."""

    input_quantizer = None

    def __init__(
        self, quantized: QuantizedTensor, bias: torch.Tensor | None, placement: Placement
    ) -> None:
        self.bias = bias
        self._quantized: QuantizedTensor | None = quantized
        self._dtype = placement.dtype
        self._dequantized: UnquantizedWeight | None = None

    @property
    def dequantized(self) -> UnquantizedWeight:
        """The plain one; RuntimeError before `pack`."""
        if self._dequantized is None:
            raise RuntimeError("this matrix becomes plain when it is packed")
        return self._dequantized

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.dequantized(x)

    def swiglu(self, x: torch.Tensor) -> torch.Tensor | None:
        return self.dequantized.swiglu(x)

    def split_k(self, x: torch.Tensor) -> PartialSum | None:
        return self.dequantized.split_k(x)

    def into(
        self, out: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.dequantized.into(out, x, bias)

    def pack(self) -> None:
        if self._dequantized is None:
            self._dequantized = UnquantizedWeight(
                self._unpacked().dequantized(self._dtype), self.bias
            )
            self._quantized = None
            self._dequantized.pack()

    def permute(self, rows: torch.Tensor) -> None:
        self._unpacked().permute(rows)

    def sources(
        self, name: str, rows: slice, shape: tuple[int, int], slices: tuple[slice, slice]
    ) -> Iterator[WeightSource]:
        return self._unpacked().sources(name, rows, shape, slices)

    def _unpacked(self) -> QuantizedTensor:
        if self._quantized is None:
            raise RuntimeError("this matrix is packed: its weights are final")
        return self._quantized
