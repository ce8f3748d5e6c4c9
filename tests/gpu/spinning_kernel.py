"""A kernel that spins for some time and then writes, for tests of what a killed process leaves."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _spin(words, count, value, nanoseconds, BLOCK: tl.constexpr):
    clock = "mov.u64 $0, %globaltimer;"
    begin = tl.inline_asm_elementwise(clock, "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    now = begin
    while now - begin < nanoseconds:
        now = tl.inline_asm_elementwise(clock, "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(words + at, value, mask=at < count)


def spin_and_write(words: torch.Tensor, value: int, seconds: float) -> None:
    """Launches it: `words`, an int32 vector, is `value` after so many seconds."""
    grid = (triton.cdiv(words.numel(), BLOCK),)
    _spin[grid](words, words.numel(), value, int(seconds * 1e9), BLOCK)
