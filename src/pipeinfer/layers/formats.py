"""From how a matrix is stored in the checkpoint to the Weight that holds it on this rank's device.

Knows which device has products for which format; no layer and no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch

from pipeinfer.checkpoint.quantization import Format, Fp8, Int4, Int8, Mxfp4
from pipeinfer.layers.decoded import DequantizedWeight, QuantizedTensor
from pipeinfer.layers.fp8_products import fp8_gemm, stacked_fp8
from pipeinfer.layers.fp8_values import Fp8Tensor
from pipeinfer.layers.int4_products import int4_gemm
from pipeinfer.layers.int4_values import Int4Tensor
from pipeinfer.layers.int8_products import int8_gemm
from pipeinfer.layers.int8_values import Int8Tensor
from pipeinfer.layers.kept import QuantizedGemm, QuantizedWeight
from pipeinfer.layers.matrix import UnquantizedWeight, Weight
from pipeinfer.layers.placement import Placement
from pipeinfer.layers.skinny import small_m_gemm
from pipeinfer.settings import ConfigurationError


class StackedTensor(QuantizedTensor, Protocol):
    """Values of one matrix, or of a stack of them."""

    def __getitem__(self, index: int, /) -> QuantizedTensor:
        """One of a stack."""
        ...


# By the class of a format: room for values of a size, not yet filled; and for a size the products
# that a device has with them, None without.
EMPTY_TENSORS: Mapping[type, Callable[[tuple[int, ...], Any, Placement], StackedTensor]] = {
    Fp8: Fp8Tensor.empty,
    Int4: Int4Tensor.empty,
    Int8: Int8Tensor.empty,
}
GEMMS: Mapping[type, Callable[[Any, tuple[int, int], Placement], QuantizedGemm[Any] | None]] = {
    Fp8: fp8_gemm,
    Int4: int4_gemm,
    Int8: int8_gemm,
}
# Room for a stack whose kernels take it as it is stored, None without.
EIGHT_BITS: Mapping[type, Callable[[Any, tuple[int, int, int], Placement], Fp8Tensor | None]] = {
    Fp8: stacked_fp8
}


def create_weight(
    placement: Placement,
    names: Iterable[str],
    size: tuple[int, int],
    bias: torch.Tensor | None,
    small_m: bool = False,
    split_k: bool = False,
) -> Weight:
    """A matrix of `size`, [out, in], of which modules `names` within placement's are the rows.

    few, split: as a Matrix's. Raises ConfigurationError if the size does not fit the format.
    """
    form = placement.format(names)
    if form is None or form == Mxfp4():  # which is for experts alone
        skinny = small_m_gemm(placement.device, placement.dtype)
        return UnquantizedWeight(
            placement.empty(*size), bias, skinny if small_m else None, skinny if split_k else None
        )
    kept = empty_quantized(form, size, placement)
    products = None if placement.dequantizes else GEMMS[type(form)](form, size, placement)
    if products is None:
        return DequantizedWeight(kept, bias, placement)
    return QuantizedWeight(kept, bias, products, split_k)


def empty_quantized(form: Format, size: tuple[int, ...], placement: Placement) -> StackedTensor:
    """Room for a matrix of `size`, or for a stack of them."""
    if form == Mxfp4():
        raise ConfigurationError("quantization_config: mxfp4 is for experts with bounds alone")
    return EMPTY_TENSORS[type(form)](size, form, placement)


def empty_stacked_fp8(
    form: Format, size: tuple[int, int, int], placement: Placement
) -> Fp8Tensor | None:
    """Room for a stack of matrices that stays in FP8; None: in this format, on this device or of
    this size they have to become plain."""
    room = None if placement.dequantizes else EIGHT_BITS.get(type(form))
    return None if room is None else room(form, size, placement)
