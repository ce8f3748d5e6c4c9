"""The Weight of a matrix that stays in a number format of its own, for devices with products in it.

What those products are, each format says. Knows no format and no file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

import torch

from pipeinfer.layers.decoded import QuantizedTensor
from pipeinfer.layers.partial_sum import PartialSum
from pipeinfer.layers.placement import WeightSource
from pipeinfer.layers.rounded import ActivationQuantizer, Activations

TensorKind = TypeVar("TensorKind", bound=QuantizedTensor)
AnyTensorKind = TypeVar("AnyTensorKind", bound=QuantizedTensor, contravariant=True)


class QuantizedGemm(Protocol[AnyTensorKind]):
    """Of rows [T, in] and a format's values of a matrix [out, in]."""

    @property
    def input_quantizer(self) -> ActivationQuantizer | None:
        """See Weight."""
        ...

    def product(
        self, x: Activations, values: AnyTensorKind, bias: torch.Tensor | None, /
    ) -> torch.Tensor:
        """[T, out], plus `bias` [out]."""
        ...

    def split_k(
        self, x: Activations, values: AnyTensorKind, bias: torch.Tensor | None, /
    ) -> PartialSum | None:
        """The same, whose splits the norm that follows adds up; None: not for so many rows."""
        ...


class QuantizedWeight(Generic[TensorKind]):
    """A Weight (matrix.py). split: whether a norm may add up its products of few rows."""

    def __init__(
        self,
        quantized: TensorKind,
        bias: torch.Tensor | None,
        gemm: QuantizedGemm[TensorKind],
        split_k: bool,
    ) -> None:
        self.bias = bias
        self._quantized = quantized
        self._gemm = gemm
        self._may_split_k = split_k

    def __call__(self, x: Activations) -> torch.Tensor:
        return self._gemm.product(x, self._quantized, self.bias)

    @property
    def input_quantizer(self) -> ActivationQuantizer | None:
        return self._gemm.input_quantizer

    def swiglu(self, x: Activations) -> torch.Tensor | None:
        return None

    def split_k(self, x: Activations) -> PartialSum | None:
        return self._gemm.split_k(x, self._quantized, self.bias) if self._may_split_k else None

    def into(
        self, out: torch.Tensor, x: Activations, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return out.copy_(self._gemm.product(x, self._quantized, bias))

    def pack(self) -> None:
        """They are as they stay."""

    def permute(self, rows: torch.Tensor) -> None:
        self._quantized.permute(rows)

    def sources(
        self, name: str, rows: slice, shape: tuple[int, int], slices: tuple[slice, slice]
    ) -> Iterator[WeightSource]:
        return self._quantized.sources(name, rows, shape, slices)
