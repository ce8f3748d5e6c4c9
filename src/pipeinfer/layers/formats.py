"""From how a matrix is stored in the checkpoint to the Weight that holds it on this rank's device.

Knows which device has products for which format; no layer and no file.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from pipeinfer.checkpoint.quantization import Format, Fp8, Int4, Mxfp4
from pipeinfer.layers.decoded import Decoded
from pipeinfer.layers.fp8_matrix import Fp8Matrix, fp8_products
from pipeinfer.layers.fp8_values import Fp8Values
from pipeinfer.layers.int4_matrix import Int4Matrix, int4_products
from pipeinfer.layers.int4_values import Int4Values
from pipeinfer.layers.matrix import Matrix, Weight
from pipeinfer.layers.placement import Placement
from pipeinfer.layers.skinny import skinny_products
from pipeinfer.settings import ConfigurationError


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
    if form is None or isinstance(form, Mxfp4):  # which is for experts alone
        skinny = skinny_products(placement.device, placement.dtype)
        return Matrix(
            placement.empty(*size), bias, skinny if few else None, skinny if split else None
        )
    if not placement.decodes:
        if isinstance(form, Fp8):
            skinny = fp8_products(form, size, placement)
            if skinny is not None:
                return Fp8Matrix(Fp8Values.empty(size, form, placement), bias, skinny, split)
        else:
            skinny = int4_products(size, placement)
            if skinny is not None:
                return Int4Matrix(Int4Values.empty(size, form, placement), bias, skinny, split)
    return Decoded(values(form, size, placement), bias, placement)


def values(form: Format, size: tuple[int, ...], placement: Placement) -> Fp8Values | Int4Values:
    """Room for a matrix of `size`, or for a stack of them."""
    if isinstance(form, Fp8):
        return Fp8Values.empty(size, form, placement)
    if isinstance(form, Int4):
        return Int4Values.empty(size, form, placement)
    raise ConfigurationError("quantization_config: mxfp4 is for experts with bounds alone")
