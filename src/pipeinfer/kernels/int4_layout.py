"""How weights of four bits lie in memory, and what they are as plain ones; by torch alone.

Columns come in runs of RUN, as words of 32 bits, 16 a run. Numbers p and p + 4 of a word, from its
lowest bits on, are two columns side by side: halves of a register. Word 4 q + k of a run has those
from 32 p + 8 k + 2 q on: what thread q of four holds of a tensor core's operand (PTX ISA,
"wgmma register fragments") are words side by side.
"""

from __future__ import annotations

import torch

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
