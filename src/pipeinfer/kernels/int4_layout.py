"""How weights of four bits lie in memory, and what they are as plain ones; by torch alone.

Columns come in runs of RUN, as words of 32 bits, 16 a run. Numbers p and p + 4 of a word, from its
lowest bits on, are two columns side by side: halves of a register. Word 4 q + k of a run has those
from 32 p + 8 k + 2 q on: what thread q of four holds of a tensor core's operand (PTX ISA,
"wgmma register fragments") are words side by side.
"""

from __future__ import annotations

import torch

EACH = 8  # numbers in a word
PAIRS = 4
BLOCK_WORDS = 4
RUN = 128  # columns; a matrix of others is one run


def packed(numbers: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, columns], each 0 to 15, to int32 [rows, runs, words]."""
    across, beside = _places(numbers.shape[1])
    runs = numbers.to(torch.int32).unflatten(1, (-1, PAIRS, beside, across, 2))
    words = (runs << _shifts(numbers.device)).sum((2, 5), dtype=torch.int32)
    return words.transpose(2, 3).flatten(2)


def spread(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `packed`."""
    across, beside = _places(EACH * words.shape[2])
    runs = words.unflatten(2, (1, across, beside)).transpose(-1, -2)
    return ((runs[..., None] >> _shifts(words.device)) & 15).to(torch.uint8).flatten(1)


def decoded(
    words: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """(number - zero) * scale, [rows, columns], rounded to `dtype` once. scale, any float dtype,
    and zero, of any dtype: [rows, groups], of columns side by side."""
    groups = spread(words).unflatten(1, (scale.shape[1], -1)).float()
    return ((groups - zero[..., None]) * scale[..., None].float()).flatten(1).to(dtype)


def _shifts(device: torch.device) -> torch.Tensor:
    """[pairs, 1, 1, 2]"""
    places = torch.arange(EACH, dtype=torch.int32, device=device).view(2, PAIRS)
    return 4 * places.t()[:, None, None, :]


def run_of(columns: int) -> int:
    """The columns of a run."""
    return RUN if columns % RUN == 0 else columns


def _places(columns: int) -> tuple[int, int]:
    """Threads that share a run, and the words of each; a run of other columns has no order."""
    return (RUN // EACH // BLOCK_WORDS, BLOCK_WORDS) if columns % RUN == 0 else (1, columns // EACH)
