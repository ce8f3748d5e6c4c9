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


SCALE_CANDIDATES = 8  # scales of a row, within a factor of two
SCALE_BLOCK = 128  # rows and columns of weights that share a scale, where blocks do
MIN_SCALE = 1e-12  # of a row of zeros, which are zeros in any scale


def quantize_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 [..., n], float32 scales [..., 1]) of values [..., n] of any float dtype, so that each
    row's largest is 448 times its scale."""
    wide = values.float()
    scale = (wide.abs().amax(dim=-1, keepdim=True) / E4M3_MAX).clamp_(min=MIN_SCALE)
    return (wide * scale.reciprocal()).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3), scale


def quantize_rows_min_error(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `round_rows`, with the scale, of TRIED from there to twice as much, that has the least
    square error: for weights, which are rounded once.

    Numbers of e4m3 lie as densely around one power of two as around the next, so what matters is
    where between two of them a row's values come to lie.
    """
    wide = values.float()
    _, first = quantize_rows(wide)
    rounded, scale = wide.to(E4M3).view(torch.uint8), first
    least = torch.full_like(first, torch.inf)
    for step in range(SCALE_CANDIDATES):
        tried = first * 2 ** (step / SCALE_CANDIDATES)
        near = (wide / tried).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)
        error = (near.float() * tried - wide).square_().sum(dim=-1, keepdim=True)
        better = error < least
        rounded = torch.where(better, near.view(torch.uint8), rounded)
        scale, least = torch.where(better, tried, scale), torch.where(better, error, least)
    return rounded.view(E4M3), scale


def hadamard_transform(heads: torch.Tensor) -> torch.Tensor:
    """float32 [..., dim] of heads of any float dtype, dim even; twice gives them back.

    Orthonormal. A block that is turned has as many values as the largest power of two that divides
    dim: neighbours in both halves of a head. Value by value, so that a token's bits depend on no
    other token.
    """
    dim = heads.shape[-1]
    run = hadamard_half_block(dim)
    wide = heads.float()
    for span in (dim // 2, *(1 << power for power in range(run.bit_length() - 1))):
        pairs = wide.unflatten(-1, (-1, 2, span))
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        wide = torch.stack((first + second, first - second), dim=-2).flatten(-3)
    return wide.mul_((2 * run) ** -0.5)


def hadamard_half_block(dim: int) -> int:
    """The neighbours of a block in each half of a head: the largest power of two in dim / 2."""
    half = dim // 2
    return half & -half


INT4_PER_WORD = 8  # numbers in a word
PAIRS_PER_WORD = 4
WORDS_PER_THREAD = 4
INT4_TILE_K = 128  # columns; a matrix of others is one run


def pack_int4(numbers: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, columns], each 0 to 15, to int32 [rows, runs, words]."""
    across, beside = _thread_layout(numbers.shape[1])
    runs = numbers.to(torch.int32).unflatten(1, (-1, PAIRS_PER_WORD, beside, across, 2))
    words = (runs << _bit_shifts(numbers.device)).sum((2, 5), dtype=torch.int32)
    return words.transpose(2, 3).flatten(2)


def unpack_int4(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `packed`."""
    across, beside = _thread_layout(INT4_PER_WORD * words.shape[2])
    runs = words.unflatten(2, (1, across, beside)).transpose(-1, -2)
    return ((runs[..., None] >> _bit_shifts(words.device)) & 15).to(torch.uint8).flatten(1)


def dequantize_int4(
    words: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """(number - zero) * scale, [rows, columns], rounded to `dtype` once. scale, any float dtype,
    and zero, of any dtype: [rows, groups], of columns side by side."""
    groups = unpack_int4(words).unflatten(1, (scale.shape[1], -1)).float()
    return ((groups - zero[..., None]) * scale[..., None].float()).flatten(1).to(dtype)


def _bit_shifts(device: torch.device) -> torch.Tensor:
    """[pairs, 1, 1, 2]"""
    places = torch.arange(INT4_PER_WORD, dtype=torch.int32, device=device).view(2, PAIRS_PER_WORD)
    return 4 * places.t()[:, None, None, :]


def int4_tile_k(columns: int) -> int:
    """The columns of a run."""
    return INT4_TILE_K if columns % INT4_TILE_K == 0 else columns


def _thread_layout(columns: int) -> tuple[int, int]:
    """Threads that share a run, and the words of each; a run of other columns has no order."""
    return (
        (INT4_TILE_K // INT4_PER_WORD // WORDS_PER_THREAD, WORDS_PER_THREAD)
        if columns % INT4_TILE_K == 0
        else (1, columns // INT4_PER_WORD)
    )
