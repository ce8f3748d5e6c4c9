"""Matrices whose values are stored in a format of their own: what a format's values are, and the
Weight that makes them plain once they are final.

For devices without a product for the format. Knows no format.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from pipeinfer.layers.matrix import Matrix
from pipeinfer.layers.partial_sum import PartialSum
from pipeinfer.layers.placement import Placement, Source


class Values(Protocol):
    """What is kept of a matrix [rows, columns], to be filled from a checkpoint."""

    def decoded(self, dtype: torch.dtype, /) -> torch.Tensor:
        """The plain matrix, rounded to `dtype` once."""
        ...

    def permute(self, rows: torch.Tensor, /) -> None:
        """See Weight, as `sources`."""
        ...

    def sources(
        self, name: str, rows: slice, shape: tuple[int, int], slices: tuple[slice, slice], /
    ) -> Iterator[Source]: ...


class Decoded:
    """A Weight (matrix.py): from `pack` on a plain matrix."""

    rounding = None

    def __init__(self, values: Values, bias: torch.Tensor | None, placement: Placement) -> None:
        self.bias = bias
        self._values: Values | None = values
        self._dtype = placement.dtype
        self._matrix: Matrix | None = None

    @property
    def matrix(self) -> Matrix:
        """The plain one; RuntimeError before `pack`."""
        if self._matrix is None:
            raise RuntimeError("this matrix becomes plain when it is packed")
        return self._matrix

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.matrix(x)

    def gated(self, x: torch.Tensor) -> torch.Tensor | None:
        return self.matrix.gated(x)

    def later(self, x: torch.Tensor) -> PartialSum | None:
        return self.matrix.later(x)

    def into(
        self, out: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.matrix.into(out, x, bias)

    def pack(self) -> None:
        if self._matrix is None:
            self._matrix = Matrix(self._filled().decoded(self._dtype), self.bias)
            self._values = None
            self._matrix.pack()

    def permute(self, rows: torch.Tensor) -> None:
        self._filled().permute(rows)

    def sources(
        self, name: str, rows: slice, shape: tuple[int, int], slices: tuple[slice, slice]
    ) -> Iterator[Source]:
        return self._filled().sources(name, rows, shape, slices)

    def _filled(self) -> Values:
        if self._values is None:
            raise RuntimeError("this matrix is packed: its weights are final")
        return self._values
