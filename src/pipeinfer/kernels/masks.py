"""Which ids some rows may sample at all: a bit for each id, made by grammars on the host.

One Triton launch; it writes only where an id is forbidden. Needs triton.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

BITMASK_BLOCK = 2048


@triton.jit(do_not_specialize=["stride", "width", "first_id", "many"])
def _mask(logits, rows, words, stride, width, first_id, many, BLOCK: tl.constexpr):
    entry = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = column + first_id
    inside = column < width
    word = tl.load(words + entry * many + token // 32, mask=inside & (token // 32 < many), other=0)
    forbidden = ((word >> (token % 32)) & 1) == 0
    target = logits + tl.load(rows + entry) * stride + column
    never = tl.full((BLOCK,), float("-inf"), tl.float32)
    tl.store(target, never.to(logits.dtype.element_ty), mask=inside & forbidden)


def apply_token_bitmask(
    logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor, first_id: int = 0
) -> None:
    """See interface.py."""
    if not len(rows):
        return
    width = logits.shape[1]
    _mask[(len(rows), triton.cdiv(width, BITMASK_BLOCK))](
        logits, rows, words, logits.stride(0), width, first_id, words.shape[1], BLOCK=BITMASK_BLOCK
    )
