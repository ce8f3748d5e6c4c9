"""Rows in e4m3 on their way into a product that wants them so, and the operations that end in them.

A weight that multiplies in FP8 rounds what it is given, unless whatever comes before has done so as
its last step. Knows no layer and no weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.nn import functional

from pipeinfer.kernels.e4m3 import E4M3
from pipeinfer.kernels.skinny_tiles import tile as choose
from pipeinfer.layers.elementwise import HALF_DTYPES
from pipeinfer.layers.placement import PartialSum, Placement, WeightSource


@dataclass(frozen=True)
class QuantizedActivations:
    """e4m3 [T, n], and the float32 scales of its rows, [T, 1], or of parts of them, [T, parts].

    plain: the rows as they were, where somebody beside the weight reads them.
    """

    values: torch.Tensor
    scale: torch.Tensor
    unquantized: torch.Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """e4m3, which no plain rows have."""
        return self.values.dtype

    @property
    def shape(self) -> torch.Size:
        """[T, n]."""
        return self.values.shape


# A torch.Tensor [T, n]; or RoundedRows, of a RowRounding that the weight they are for has given.
Activations = Any


def unquantized(x: Activations) -> torch.Tensor:
    """Rows as they were; those that are rounded have to have kept them."""
    return x.unquantized if x.dtype == E4M3 else x


class ActivationQuantizer:
    """How a weight wants its rows rounded. part: values that share a scale, 0: all of a row; keeps:
    norms and rows, as they were, too. Needs triton."""

    def __init__(self, group_size: int = 0, keep_unquantized: bool = False) -> None:
        from pipeinfer.kernels import norm, rounding

        self._part, self._keeps = group_size, keep_unquantized
        self._norm = norm.rounded_norm
        self._gated = rounding.round_gated
        self._rows = rounding.round_parts

    def norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        residual: torch.Tensor | None,
        offset: float,
    ) -> QuantizedActivations:
        """RMSNorm of x [T, n], or of the sum of x [P, T, n], plus `residual`, which becomes that
        sum; `offset` is added to the weight."""
        plain = weight.new_empty(x.shape[-2:]) if self._keeps else None
        rounded = self._norm(x, weight, eps, residual, offset, self._part, plain)
        return QuantizedActivations(*rounded, plain)

    def swiglu(self, merged: torch.Tensor) -> QuantizedActivations:
        """SwiGLU of [T, 2 n], gate first."""
        return QuantizedActivations(*self._gated(merged, self._part))

    def quantize(self, x: torch.Tensor) -> QuantizedActivations:
        """x [T, n] itself."""
        return QuantizedActivations(*self._rows(x, self._part), x if self._keeps else None)


MIN_SHARED_MEMORY_BYTES = 200 * 1024  # of a block: the tiles were chosen for GPUs that have as much


class SmallMGemm:
    """Products of x [T, depth] with weights [width, depth]. Knows by measurement which to take.
    Needs triton."""

    def __init__(self) -> None:
        from pipeinfer.kernels import norm, skinny

        self._products = skinny
        self._norm = norm

    def product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor | None:
        """x @ weight.T + bias, [T, width]."""
        tile = choose("product", x.shape[0], *weight.shape)
        return None if tile is None else self._products.product(x, weight, tile, bias)

    def swiglu(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
        """SwiGLU of x @ weight.T, gate first: [T, width / 2]."""
        tile = choose("gated", x.shape[0], weight.shape[0] // 2, weight.shape[1])
        return None if tile is None else self._products.gated_product(x, weight, tile)

    def split_k(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> PartialSum | None:
        """x @ weight.T + bias, [T, width], whose splits the norm that follows adds up."""
        tile = choose("split", x.shape[0], *weight.shape)
        if tile is None:
            return None
        partial = self._products.split_product(x, weight, tile, bias)
        return PartialSum(partial, self)

    def split_k_parts(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor | None:
        """float32 [P, T, width], whose sum over P is x @ weight.T + bias, of a matrix with few
        rows, such as a router's."""
        tile = choose("narrow", x.shape[0], *weight.shape)
        return None if tile is None else self._products.split_product(x, weight, tile, bias)

    def add_norm(
        self, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the splits [P, T, size] of a product; see Summing."""
        return self._norm.sum_norm(partial, residual, weight, eps), residual


@lru_cache(maxsize=8)
def small_m_gemm(device: torch.device, dtype: torch.dtype) -> SmallMGemm | None:
    """None where the device has less room than the tiles take, or `dtype` no tensor cores."""
    if device.type != "cuda" or dtype not in HALF_DTYPES:
        return None
    properties = torch.cuda.get_device_properties(device)
    room = getattr(properties, "shared_memory_per_block_optin", 0)
    return SmallMGemm() if room >= MIN_SHARED_MEMORY_BYTES else None


PACKING_HINT_ROWS = 64  # a hint for the layout: a decode step; any number of rows may come


class Weight(Protocol):
    """[T, in] to [T, out]: x times the transpose of a matrix [out, in], plus `bias` [out]. It owns
    its product and its number format. Few and many rows may round differently."""

    bias: torch.Tensor | None

    def __call__(self, x: Activations, /) -> torch.Tensor: ...

    @property
    def input_quantizer(self) -> ActivationQuantizer | None:
        """How it rounds x; x may come as that made it. None: not."""
        ...

    def swiglu(self, x: Activations, /) -> torch.Tensor | None:
        """SwiGLU of the product, gate first, [T, out / 2]; None: not for so many rows, or not in
        this format. The bias counts nothing."""
        ...

    def split_k(self, x: Activations, /) -> PartialSum | None:
        """The product, whose splits the norm that follows adds up; None as for `gated`."""
        ...

    def into(
        self, out: torch.Tensor, x: Activations, bias: torch.Tensor | None = None, /
    ) -> torch.Tensor:
        """`out` [T, out], which becomes the product, plus `bias` in place of the matrix's own."""
        ...

    def pack(self) -> None:
        """The values are final now."""
        ...

    def permute(self, rows: torch.Tensor, /) -> None:
        """Row i becomes what row rows[i] was, int64 [n], of the first n; before `pack`."""
        ...

    def sources(
        self, name: str, rows: slice, shape: tuple[int, int], slices: tuple[slice, slice], /
    ) -> Iterator[WeightSource]:
        """What fills `rows`: `slices` of the checkpoint's matrix `name`, which has `shape`."""
        ...


class UnquantizedWeight:
    """A Weight in the dtype of what it is multiplied with. few, split: the kernels for products of
    few rows, and for those that a norm adds up, where they are wanted."""

    input_quantizer = None

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        small_m: SmallMGemm | None = None,
        split_k: SmallMGemm | None = None,
    ) -> None:
        self.bias = bias
        self._weight: torch.Tensor | None = weight
        self._packed: torch.Tensor | None = None
        self._small_m, self._small_m_split_k = small_m, split_k

    @property
    def weight(self) -> torch.Tensor:
        """The plain weight, to be filled; raises RuntimeError once it is packed."""
        if self._weight is None:
            raise RuntimeError("this matrix is packed: its weights are final")
        return self._weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is None:
            return self._unpacked_product(x)
        if x.shape[0] == 1:  # one row alone takes another path, with other rounding
            return self._packed_product(x.expand(2, -1))[:1]
        return self._packed_product(x)

    def swiglu(self, x: torch.Tensor) -> torch.Tensor | None:
        return None if self._small_m is None else self._small_m.swiglu(x, self.weight)

    def split_k(self, x: torch.Tensor) -> PartialSum | None:
        return (
            None
            if self._small_m_split_k is None
            else self._small_m_split_k.split_k(x, self.weight, self.bias)
        )

    def into(
        self, out: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self._packed is not None:
            out.copy_(torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], ""))
            return out
        if bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(bias, x, self.weight.t(), out=out)

    def _unpacked_product(self, x: torch.Tensor) -> torch.Tensor:
        if self._small_m is not None:
            product = self._small_m.product(x, self.weight, self.bias)
            if product is not None:
                return product
        return functional.linear(x, self.weight, self.bias)

    def _packed_product(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")

    def pack(self) -> None:
        """Replaces the weight by its packed form, where this CPU has one for its dtype."""
        if self._packed is None and _packable(self.weight):
            weight = self.weight.detach()
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKING_HINT_ROWS)
            self._weight = None

    def permute(self, rows: torch.Tensor) -> None:
        self.weight[: len(rows)] = self.weight[rows]

    def sources(
        self, name: str, rows: slice, shape: tuple[int, int], slices: tuple[slice, slice]
    ) -> Iterator[WeightSource]:
        yield WeightSource(f"{name}.weight", shape, slices, self.weight[rows])


def _packable(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if weight.dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return weight.dtype == torch.float32


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
