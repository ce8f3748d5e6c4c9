"""Number formats of weights and KV pages in plain torch: e4m3, int4, and the Hadamard transform.

e4m3 (FP8) has a sign, 4 bits of exponent and 3 of mantissa, and goes with a scale; source:
https://arxiv.org/abs/2209.05433. Keys in e4m3 are Hadamard-transformed before: queries and keys
transformed alike have the same scores, and large values of a head spread over all of it; source:
QuaRot, https://arxiv.org/abs/2404.00456. Uses tensors. Needs no triton; triton_support.py and
store.py have the same formats inside of kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0  # the largest number of e4m3
SCALE_BLOCK = 128  # rows, and columns, of a weight matrix that share a scale, where blocks do
SCALE_CANDIDATES = 8  # scales that are tried for a row, within a factor of two
EXPONENT_BITS = 0x7F800000  # exponent bits of a float32
LEAST_EXPONENT_BITS = (127 - 6) << 23  # exponent bits of 2^-6, below which e4m3 is denormal
MIN_SCALE = 1e-12  # the scale of a row of zeros, which are zeros in any scale

INT4_PER_WORD = 8  # numbers in a word of 32 bits
PAIRS_PER_WORD = 4
WORDS_PER_THREAD = 4  # words of a tile that a thread of a tensor core has side by side
INT4_TILE_K = 128  # columns of a tile; a matrix with other columns is one tile


class KVScales(NamedTuple):
    """The scales of a layer's KV pages: a number is the stored value, times the scale.

    Attributes:
    - k, v: of keys and of values
    """

    k: float = 1.0
    v: float = 1.0


UNIT_KV_SCALES = KVScales()


def quantize_e4m3(values: torch.Tensor, scale: float) -> torch.Tensor:
    """Returns e4m3 of values / scale, for any float dtype: the nearest number, ties to even.

    Values beyond the largest number become the largest number. NaN stays NaN, by which bad rows are
    found.
    """
    wide = values.float()
    if scale != 1:
        # On a GPU torch multiplies by the inverse of a Python number, which rounds twice.
        wide = wide / torch.full((), scale, device=values.device)
    return wide.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def dequantize_e4m3(stored: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """stored * scale in `dtype`, rounded once at most; a new tensor."""
    wide = stored.to(dtype)  # exact in all float dtypes that are used
    return wide if scale == 1 else wide.mul_(scale)


def quantize_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (e4m3 [..., n], float32 scales [..., 1]) of values [..., n] of any float dtype, with
    a scale a row: its largest value is 448 times the scale.
    """
    wide = values.float()
    scale = (wide.abs().amax(dim=-1, keepdim=True) / E4M3_MAX).clamp_(min=MIN_SCALE)
    return (wide * scale.reciprocal()).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3), scale


def quantize_rows_min_error(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes rows as `quantize_rows` does, with the scale of the least square error among
    SCALE_CANDIDATES: from the scale of `quantize_rows` to twice as much. For weights, which are
    quantized once.

    Numbers of e4m3 lie as densely around one power of two as around the next, so scales outside of
    a factor of two would only repeat.
    """
    wide = values.float()
    _, first = quantize_rows(wide)
    scale, least = first, torch.full_like(first, torch.inf)
    for step in range(SCALE_CANDIDATES):
        tried = first * 2 ** (step / SCALE_CANDIDATES)
        near = round_to_e4m3((wide / tried).clamp_(-E4M3_MAX, E4M3_MAX))
        error = near.mul_(tried).sub_(wide).square_().sum(dim=-1, keepdim=True)
        better = error < least
        scale, least = torch.where(better, tried, scale), torch.where(better, error, least)
    return (wide / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3), scale


def round_to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """`values.to(E4M3).float()` for float32 values up to E4M3_MAX: the nearest numbers, ties to
    even. A CPU takes a third of the time for it.

    A number of e4m3 is a whole multiple of its exponent's power of two divided by 8. Adding a
    number whose own last place is that step rounds to it; the sum less the same is exact.
    """
    power = (values.view(torch.int32) & EXPONENT_BITS).clamp_(min=LEAST_EXPONENT_BITS)
    shift = power.view(torch.float32) * (1.5 * 2**20)
    return (values + shift).sub_(shift)


def hadamard_transform(heads: torch.Tensor) -> torch.Tensor:
    """Returns float32 [..., dim] of heads [..., dim] of any float dtype, dim even. Orthonormal, and
    its own inverse.

    In blocks of as many values as the largest power of two that divides dim: neighbours in both
    halves of a head. Value by value, so that a token's bits depend on no other token.
    """
    dim = heads.shape[-1]
    half_block = hadamard_half_block(dim)
    wide = heads.float()
    for span in (dim // 2, *(1 << power for power in range(half_block.bit_length() - 1))):
        pairs = wide.unflatten(-1, (-1, 2, span))
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        wide = torch.stack((first + second, first - second), dim=-2).flatten(-3)
    return wide.mul_((2 * half_block) ** -0.5)


def hadamard_half_block(dim: int) -> int:
    """Values of a Hadamard block in each half of a head: the largest power of two in dim / 2."""
    half = dim // 2
    return half & -half


# How weights of four bits lie in memory. Columns come in tiles of INT4_TILE_K, 16 words each.
# Numbers p and p + 4 of a word, from its lowest bits on, are two neighbouring columns: two halves
# of a register. Word 4 q + k of a tile has the numbers from column 32 p + 8 k + 2 q on, so that the
# numbers which thread q of four holds of a tensor core's operand lie in neighbouring words (PTX
# ISA, "wgmma register fragments").


def pack_int4(numbers: torch.Tensor) -> torch.Tensor:
    """Returns int32 [rows, tiles, words] of numbers uint8 [rows, columns], each 0 to 15."""
    threads, words_each = _thread_layout(numbers.shape[1])
    tiles = numbers.to(torch.int32).unflatten(1, (-1, PAIRS_PER_WORD, words_each, threads, 2))
    words = (tiles << _bit_shifts(numbers.device)).sum((2, 5), dtype=torch.int32)
    return words.transpose(2, 3).flatten(2)


def unpack_int4(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_int4`."""
    threads, words_each = _thread_layout(INT4_PER_WORD * words.shape[2])
    tiles = words.unflatten(2, (1, threads, words_each)).transpose(-1, -2)
    return ((tiles[..., None] >> _bit_shifts(words.device)) & 15).to(torch.uint8).flatten(1)


def dequantize_int4(
    words: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Returns (number - zero) * scale, [rows, columns], rounded to `dtype` once.

    - words: int32, of `pack_int4`
    - scale, zero: [rows, groups] of neighbouring columns, of any float dtype and of any dtype
    """
    groups = unpack_int4(words).unflatten(1, (scale.shape[1], -1)).float()
    return ((groups - zero[..., None]) * scale[..., None].float()).flatten(1).to(dtype)


def _bit_shifts(device: torch.device) -> torch.Tensor:
    """Returns int32 [pairs, 1, 1, 2], where the numbers of each pair begin in a word, in bits."""
    places = torch.arange(INT4_PER_WORD, dtype=torch.int32, device=device).view(2, PAIRS_PER_WORD)
    return 4 * places.t()[:, None, None, :]


def int4_tile_k(columns: int) -> int:
    """The columns of a tile."""
    return INT4_TILE_K if columns % INT4_TILE_K == 0 else columns


def _thread_layout(columns: int) -> tuple[int, int]:
    """Returns (threads that share a tile, words of each); a tile of other columns is not
    reordered.
    """
    if columns % INT4_TILE_K:
        return 1, columns // INT4_PER_WORD
    return INT4_TILE_K // INT4_PER_WORD // WORDS_PER_THREAD, WORDS_PER_THREAD
