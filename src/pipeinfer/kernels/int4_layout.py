"""How weights of four bits lie in memory, and what they are as plain ones; by torch alone.

Columns come in runs of RUN, as words of 32 bits, 16 a run. Numbers p and p + 4 of a run's word k,
counted from its lowest bits, are those of columns 32 p + 2 k and the next: two halves of a register
become two neighbours at once, and what has one place in all words lies side by side.
"""

from __future__ import annotations

import torch

EACH = 8  # numbers in a word
PAIRS = 4
RUN = 128  # columns; a matrix of others is one run


def packed(numbers: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, columns], each 0 to 15, to int32 [rows, columns / 8]."""
    columns = numbers.shape[1]
    runs = numbers.to(torch.int32).unflatten(1, (-1, PAIRS, _run(columns) // EACH, 2))
    return (runs << _shifts(numbers.device)).sum((2, 4), dtype=torch.int32).flatten(1)


def spread(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `packed`."""
    runs = words.unflatten(1, (-1, 1, _run(EACH * words.shape[1]) // EACH))
    return ((runs[..., None] >> _shifts(words.device)) & 15).to(torch.uint8).flatten(1)


def decoded(
    words: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """(number - zero) * scale, [rows, columns], rounded to `dtype` once. scale, any float dtype,
    and zero, uint8: [rows, groups], of columns side by side."""
    groups = spread(words).unflatten(1, (scale.shape[1], -1)).float()
    return ((groups - zero[..., None]) * scale[..., None].float()).flatten(1).to(dtype)


def _shifts(device: torch.device) -> torch.Tensor:
    """[pairs, 1, 2]"""
    places = torch.arange(EACH, dtype=torch.int32, device=device).view(2, PAIRS)
    return 4 * places.t()[:, None, :]


def _run(columns: int) -> int:
    return RUN if columns % RUN == 0 else columns
