"""What single requests change of single logits, read by slot on the device.

One Triton launch whose grid depends on the number of rows only: fit for a CUDA graph. A row whose
slot changes nothing costs two loads. Needs triton.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pipeinfer.kernels.tables import BAD_WORDS_HEADER, SlotLogitBias

BIAS_BLOCK = 128
MAX_ALLOWED_IDS = 1024  # ids that a row may be left with; they are held in registers
FILL_BLOCK = 1024  # logits that are made impossible at a time
_HEAD = tl.constexpr(BAD_WORDS_HEADER)


@triton.jit
def _allow(row, width, stored, count, first_id, LISTED: tl.constexpr, FILLED: tl.constexpr):
    """Makes all logits of the row impossible but those of the `count` ids that are stored there."""
    at = tl.arange(0, LISTED)
    column = tl.load(stored + at, mask=at < count, other=-1) - first_id
    held = (at < count) & (column >= 0) & (column < width)
    kept = tl.load(row + column, mask=held, other=0.0)
    tl.debug_barrier()  # one thread's logits are overwritten by others, and then come back
    for begin in range(0, width, FILLED):
        over = begin + tl.arange(0, FILLED)
        tl.store(row + over, tl.full((FILLED,), float("-inf"), tl.float32), mask=over < width)
    tl.debug_barrier()
    tl.store(row + column, kept, mask=held)
    tl.debug_barrier()


@triton.jit
def _ban(
    row, width, ban, sequences, position, last_token, first_id,
    NOTE: tl.constexpr, RECENT: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """Makes what would complete one of the sequences impossible. See BansBySlot; NOTE: the last
    token is at the position before this one, if it was sampled in this slot."""
    recent = ban + _HEAD
    ends = recent + RECENT
    ids = ends + SEQUENCES + 1
    if NOTE:  # a constant
        token = tl.load(last_token).to(tl.int32)
        sampled = position > tl.load(ban + 2)
        tl.store(recent + ((position - 1) & (RECENT - 1)), token, mask=sampled)
    tl.debug_barrier()  # after the edits, and before what was noted is read
    at = tl.arange(0, SEQUENCES)
    there = at < sequences
    end = tl.load(ends + at + 1, mask=there, other=0)
    before = end - tl.load(ends + at, mask=there, other=0) - 1
    same = there & (before <= position - tl.load(ban + 1))
    for back in range(1, tl.load(ban + 3)):
        have = tl.load(recent + ((position - back) & (RECENT - 1)))
        want = tl.load(ids + end - 1 - back, mask=same & (back <= before), other=0)
        same = same & ((back > before) | (want == have))
    column = tl.load(ids + end - 1, mask=same, other=-1) - first_id
    held = same & (column >= 0) & (column < width)
    tl.store(row + column, tl.full((SEQUENCES,), float("-inf"), tl.float32), mask=held)


@triton.jit(do_not_specialize=["slot_count", "most", "stride", "first_id", "width", "ban_words"])
def _edit(
    logits, slots, positions, counts, words, bans, last_token, slot_count, most, stride, first_id,
    width, ban_words, VALUES: tl.constexpr, BLOCK: tl.constexpr, LISTED: tl.constexpr,
    FILLED: tl.constexpr, RECENT: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    slot, position = tl.load(slots + number), tl.load(positions + number)
    row = logits + number * stride
    count = tl.load(counts + slot)
    ban = bans + slot * ban_words
    sequences = tl.load(ban)
    if count < 0:
        count = -count
        _allow(row, width, words + slot * most, count, first_id, LISTED, FILLED)
    for begin in range(0, count, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        inside = at < count
        stored = words + slot * most + at
        column = tl.load(stored, mask=inside, other=-1) - first_id
        held = inside & (column >= 0) & (column < width)
        never = position < tl.load(stored + 2 * slot_count * most, mask=held, other=0)
        target = row + column
        if VALUES:
            bits = tl.load(stored + slot_count * most, mask=held, other=0)
            value = tl.load(target, mask=held, other=0.0) + bits.to(tl.float32, bitcast=True)
            tl.store(target, tl.where(never, float("-inf"), value), mask=held)
        else:
            tl.store(target, tl.full((BLOCK,), float("-inf"), tl.float32), mask=held & never)
    if sequences > 0:
        _ban(
            row, width, ban, sequences, position, last_token + slot, first_id,
            not VALUES, RECENT, SEQUENCES,
        )  # fmt: skip


def apply_logit_bias(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    edits: SlotLogitBias,
    first_id: int = 0,
    values: bool = False,
) -> None:
    """See interface.py."""
    if not len(logits):
        return
    assert logits.dtype is torch.float32 or not values
    _, slot_count, most = edits.words.shape
    bans = edits.bad_words
    _edit[(len(logits),)](
        logits, slots, positions, edits.counts, edits.words, bans.words, bans.last_token,
        slot_count, most, logits.stride(0), first_id, logits.shape[1], bans.words.shape[1],
        VALUES=values, BLOCK=BIAS_BLOCK, LISTED=MAX_ALLOWED_IDS, FILLED=FILL_BLOCK, RECENT=bans.history,
        SEQUENCES=bans.max_sequences, num_warps=1,
    )  # fmt: skip
