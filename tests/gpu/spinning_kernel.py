"""A kernel that spins for some time and then writes, for tests of what a killed process leaves."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

BLOCK = 1024


@triton.jit
def _spin(words, count, value, nanoseconds, BLOCK: tl.constexpr):
    begin = globaltimer()
    now = begin
    while now - begin < nanoseconds:
        now = globaltimer()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(words + at, value, mask=at < count)


def spin_and_write(words: torch.Tensor, value: int, seconds: float) -> None:
    """Launches it: `words`, an int32 vector, is `value` after so many seconds."""
    grid = (triton.cdiv(words.numel(), BLOCK),)
    _spin[grid](words, words.numel(), value, int(seconds * 1e9), BLOCK)
