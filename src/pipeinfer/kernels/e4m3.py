"""Keys and values in 8 bits: e4m3, a sign, 4 bits of exponent and 3 of mantissa, times a scale.

By torch alone; triton_e4m3.py has the same inside of kernels. Source of the format:
https://arxiv.org/abs/2209.05433.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0  # the largest number


class KVScales(NamedTuple):
    """Of a layer's keys and of its values: a value is what is stored, times its scale."""

    k: float = 1.0
    v: float = 1.0


UNIT_KV_SCALES = KVScales()


def quantize_e4m3(values: torch.Tensor, scale: float) -> torch.Tensor:
    """`values` of any float dtype as they are stored: e4m3, the nearest one, ties to even.

    What is too large becomes the largest number. NaN stays NaN, by which bad rows are found.
    """
    wide = values.float()
    if scale != 1:
        # On a GPU torch multiplies by the inverse of a Python number, which rounds twice.
        wide = wide / torch.full((), scale, device=values.device)
    return wide.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def dequantize_e4m3(stored: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """The values of what is stored, in `dtype`, rounded once at most; a new tensor."""
    wide = stored.to(dtype)  # exact in all of ours
    return wide if scale == 1 else wide.mul_(scale)
