"""From how a matrix is stored in the checkpoint to the Weight that holds it on this rank's device.

Knows which device has products for which format; no layer and no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch

from pipeinfer.checkpoint.quantization import Format, Fp8, Int4, Int8, Mxfp4
from pipeinfer.layers.decoded import Decoded, Values
from pipeinfer.layers.fp8_products import fp8_products, fp8_stack
from pipeinfer.layers.fp8_values import Fp8Values
from pipeinfer.layers.int4_products import int4_products
from pipeinfer.layers.int4_values import Int4Values
from pipeinfer.layers.int8_products import int8_products
from pipeinfer.layers.int8_values import Int8Values
from pipeinfer.layers.kept import Kept, Products
from pipeinfer.layers.matrix import Matrix, Weight
from pipeinfer.layers.placement import Placement
from pipeinfer.layers.skinny import skinny_products
from pipeinfer.settings import ConfigurationError


class Stacked(Values, Protocol):
    """Values of one matrix, or of a stack of them."""

    def __getitem__(self, index: int, /) -> Values:
        """One of a stack."""
        ...


# By the class of a format: room for values of a size, not yet filled; and for a size the products
# that a device has with them, None without.
ROOM: Mapping[type, Callable[[tuple[int, ...], Any, Placement], Stacked]] = {
    Fp8: Fp8Values.empty,
    Int4: Int4Values.empty,
    Int8: Int8Values.empty,
}
PRODUCTS: Mapping[type, Callable[[Any, tuple[int, int], Placement], Products[Any] | None]] = {
    Fp8: fp8_products,
    Int4: int4_products,
    Int8: int8_products,
}
# Room for a stack whose kernels take it as it is stored, None without.
EIGHT_BITS: Mapping[type, Callable[[Any, tuple[int, int, int], Placement], Fp8Values | None]] = {
    Fp8: fp8_stack
}


def weight(
    placement: Placement,
    names: Iterable[str],
    size: tuple[int, int],
    bias: torch.Tensor | None,
    few: bool = False,
    split: bool = False,
) -> Weight:
    """A matrix of `size`, [out, in], of which modules `names` within placement's are the rows.

    few, split: as a Matrix's. Raises ConfigurationError if the size does not fit the format.
    """
    form = placement.format(names)
    if form is None or form == Mxfp4():  # which is for experts alone
        skinny = skinny_products(placement.device, placement.dtype)
        return Matrix(
            placement.empty(*size), bias, skinny if few else None, skinny if split else None
        )
    kept = values(form, size, placement)
    products = None if placement.decodes else PRODUCTS[type(form)](form, size, placement)
    if products is None:
        return Decoded(kept, bias, placement)
    return Kept(kept, bias, products, split)


def values(form: Format, size: tuple[int, ...], placement: Placement) -> Stacked:
    """Room for a matrix of `size`, or for a stack of them."""
    if form == Mxfp4():
        raise ConfigurationError("quantization_config: mxfp4 is for experts with bounds alone")
    return ROOM[type(form)](size, form, placement)


def eight_bits(form: Format, size: tuple[int, int, int], placement: Placement) -> Fp8Values | None:
    """Room for a stack of matrices that stays in FP8; None: in this format, on this device or of
    this size they have to become plain."""
    room = None if placement.decodes else EIGHT_BITS.get(type(form))
    return None if room is None else room(form, size, placement)
