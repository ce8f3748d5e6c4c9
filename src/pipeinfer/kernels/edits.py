"""What single requests change of single logits, read by slot on the device.

One Triton launch whose grid depends on the number of rows only: fit for a CUDA graph. Needs triton.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pipeinfer.kernels.tables import EditsBySlot

BLOCK = 128


@triton.jit(do_not_specialize=["slot_count", "most", "stride", "first_id", "width"])
def _edit(
    logits, slots, positions, counts, words, slot_count, most, stride, first_id, width,
    VALUES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot, position = tl.load(slots + row), tl.load(positions + row)
    for begin in range(0, tl.load(counts + slot), BLOCK):
        at = begin + tl.arange(0, BLOCK)
        inside = at < tl.load(counts + slot)
        stored = words + slot * most + at
        column = tl.load(stored, mask=inside, other=-1) - first_id
        held = inside & (column >= 0) & (column < width)
        never = position < tl.load(stored + 2 * slot_count * most, mask=held, other=0)
        target = logits + row * stride + column
        if VALUES:
            bits = tl.load(stored + slot_count * most, mask=held, other=0)
            value = tl.load(target, mask=held, other=0.0) + bits.to(tl.float32, bitcast=True)
            tl.store(target, tl.where(never, float("-inf"), value), mask=held)
        else:
            tl.store(target, tl.full((BLOCK,), float("-inf"), tl.float32), mask=held & never)


def edit(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    edits: EditsBySlot,
    first_id: int = 0,
    values: bool = False,
) -> None:
    """See interface.py."""
    if not len(logits):
        return
    assert logits.dtype is torch.float32 or not values
    _, slot_count, most = edits.words.shape
    _edit[(len(logits),)](
        logits, slots, positions, edits.counts, edits.words, slot_count, most, logits.stride(0),
        first_id, logits.shape[1], VALUES=values, BLOCK=BLOCK, num_warps=1,
    )  # fmt: skip
