"""A weight matrix and the products with it: what a layer asks of one in any number format, and the
plain one, which is packed for the CPU once its weights are final.

Knows no layer and no shard. oneDNN's packed layout is 1.3 to 2 times as fast as a plain float32
product at 4 to 64 rows (measured, AVX-512), and rows come out alike however many there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch.nn import functional

from pipeinfer.layers.partial_sum import PartialSum
from pipeinfer.layers.placement import WeightSource
from pipeinfer.layers.rounded import ActivationQuantizer, Activations
from pipeinfer.layers.skinny import SmallMGemm

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
