"""The Weight of a matrix that stays in a number format of its own, for devices with products in it.

What those products are, each format says. Knows no format and no file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

import torch

from pipeinfer.layers.decoded import Values
from pipeinfer.layers.partial_sum import PartialSum
from pipeinfer.layers.placement import Source
from pipeinfer.layers.rounded import RowRounding, Rows

Kind = TypeVar("Kind", bound=Values)
Form = TypeVar("Form", bound=Values, contravariant=True)


class Products(Protocol[Form]):
    """Of rows [T, in] and a format's values of a matrix [out, in]."""

    @property
    def rounding(self) -> RowRounding | None:
        """See Weight."""
        ...

    def product(self, x: Rows, values: Form, bias: torch.Tensor | None, /) -> torch.Tensor:
        """[T, out], plus `bias` [out]."""
        ...

    def later(self, x: Rows, values: Form, bias: torch.Tensor | None, /) -> PartialSum | None:
        """The same, whose splits the norm that follows adds up; None: not for so many rows."""
        ...


class Kept(Generic[Kind]):
    """A Weight (matrix.py). split: whether a norm may add up its products of few rows."""

    def __init__(
        self, values: Kind, bias: torch.Tensor | None, products: Products[Kind], split: bool
    ) -> None:
        self.bias = bias
        self._values = values
        self._products = products
        self._split = split

    def __call__(self, x: Rows) -> torch.Tensor:
        return self._products.product(x, self._values, self.bias)

    @property
    def rounding(self) -> RowRounding | None:
        return self._products.rounding

    def gated(self, x: Rows) -> torch.Tensor | None:
        return None

    def later(self, x: Rows) -> PartialSum | None:
        return self._products.later(x, self._values, self.bias) if self._split else None

    def into(self, out: torch.Tensor, x: Rows, bias: torch.Tensor | None = None) -> torch.Tensor:
        return out.copy_(self._products.product(x, self._values, bias))

    def pack(self) -> None:
        """They are as they stay."""

    def permute(self, rows: torch.Tensor) -> None:
        self._values.permute(rows)

    def sources(
        self, name: str, rows: slice, shape: tuple[int, int], slices: tuple[slice, slice]
    ) -> Iterator[Source]:
        return self._values.sources(name, rows, shape, slices)
