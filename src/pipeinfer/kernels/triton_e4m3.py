"""e4m3 inside of kernels: by the GPU's own conversions, or bit by bit in Triton's interpreter.

The interpreter rounds ties the wrong way and turns NaN into a number, so there kernels see pages as
bytes (`as_seen`), and do what a GPU of capability 8.9 does. Needs triton; e4m3.py has the format.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pipeinfer.kernels.e4m3 import E4M3
from pipeinfer.kernels.interpreted import INTERPRETED


def as_seen(cache: torch.Tensor) -> torch.Tensor:
    """A cache as kernels are to be given it: e4m3 on the CPU as bytes, all else as it is."""
    bits = cache.dtype == E4M3 and cache.device.type == "cpu"
    return cache.view(torch.uint8) if bits else cache


def in_pairs(cache: torch.Tensor) -> torch.Tensor:
    """A cache as it is, but two neighbours of e4m3 as one int16, for `halves`: what is read by 16
    bits can be turned about on the way out of shared memory."""
    return cache.view(torch.int16) if cache.dtype == E4M3 else cache


@triton.jit
def narrowed(values, scale, kind: tl.constexpr):
    """float32 `values` over `scale`, as elements of kind: e4m3, or bytes of e4m3."""
    return nearest(tl.math.div_rn(values, scale), kind)


@triton.jit
def nearest(values, kind: tl.constexpr):
    """float32 `values` as elements of kind; what is too large becomes the largest number."""
    if kind != tl.float8e4nv:
        values = tl.where(values > 448.0, 448.0, values)  # comparisons leave NaN as it is
        values = tl.where(values < -448.0, -448.0, values)
        return _bits(values)
    return values.to(kind)  # the GPU's own conversion is bounded


@triton.jit
def _bits(values):
    """float32 of at most 448 as bytes: the nearest e4m3, ties to even."""
    bits = values.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    large = (bits & 0x7FFFFFFF).to(tl.int32)
    # Below 2^-6 numbers lie 2^-9 apart: 1.5 * 2^14 is so large that adding it rounds to those.
    small = (large.to(tl.float32, bitcast=True) + 24576.0).to(tl.int32, bitcast=True) & 0x3FFFFF
    rounded = (large + 0x7FFFF + ((large >> 20) & 1)) >> 20
    magnitude = tl.where(large < 0x3C800000, small, rounded - (120 << 3))
    magnitude = tl.where(values != values, 0x7F, magnitude)
    return (sign.to(tl.int32) | magnitude).to(tl.uint8)


@triton.jit
def widened(stored, kind: tl.constexpr):
    """What was loaded from pages as elements of kind, exactly; scales are the caller's business."""
    if stored.dtype == tl.uint8:
        # As a half, the bits stand for a number 2^8 times too small.
        magnitude = (stored & 0x7F).to(tl.uint16)
        half = (((stored & 0x80).to(tl.uint16) << 8) | (magnitude << 7)).to(
            tl.float16, bitcast=True
        )
        wide = half.to(tl.float32) * 256.0
        stored = tl.where(magnitude == 0x7F, float("nan"), wide).to(kind)
    elif stored.dtype == tl.float8e4nv and kind == tl.bfloat16:
        # The direct way takes an instruction that a Hopper has for 16 values a cycle only.
        stored = stored.to(tl.float16).to(tl.float32).to(kind)
    elif stored.dtype == tl.float8e4nv:
        stored = stored.to(kind)
    return stored


@triton.jit
def halves(pairs):
    """(the first, the second) of each of `pairs`, int16 that hold two of e4m3, as float16."""
    if INTERPRETED:
        first = widened((pairs & 0xFF).to(tl.uint8), tl.float16)
        second = widened((pairs >> 8 & 0xFF).to(tl.uint8), tl.float16)
    else:
        # Two pairs at a time: the instruction takes two neighbours to two.
        first, second = tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $2, 0, 0x3120; mov.b32 {a, b}, t;"
            " cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
            "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return first, second
