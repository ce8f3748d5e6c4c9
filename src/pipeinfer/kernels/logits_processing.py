"""What single requests change of single logits, read by slot on the device.

One Triton launch whose grid depends on the number of rows only: fit for a CUDA graph. A row whose
slot changes nothing costs two loads. Needs triton.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pipeinfer.kernels.interface import BAD_WORDS_HEADER, SlotLogitBias

BIAS_BLOCK = 128
MAX_ALLOWED_IDS = 1024  # ids that a row may be left with; they are held in registers
FILL_BLOCK = 1024  # logits that are made impossible at a time
_HEAD = tl.constexpr(BAD_WORDS_HEADER)


@triton.jit
def _mask_all_but(row, width, stored, count, first_id, LISTED: tl.constexpr, FILLED: tl.constexpr):
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
def _mask_bad_words(
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
def _logit_bias_kernel(
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
        _mask_all_but(row, width, words + slot * most, count, first_id, LISTED, FILLED)
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
        _mask_bad_words(
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
    _logit_bias_kernel[(len(logits),)](
        logits, slots, positions, edits.counts, edits.words, bans.words, bans.last_token,
        slot_count, most, logits.stride(0), first_id, logits.shape[1], bans.words.shape[1],
        VALUES=values, BLOCK=BIAS_BLOCK, LISTED=MAX_ALLOWED_IDS, FILLED=FILL_BLOCK, RECENT=bans.history,
        SEQUENCES=bans.max_sequences, num_warps=1,
    )  # fmt: skip


BITMASK_BLOCK = 2048


@triton.jit(do_not_specialize=["stride", "width", "first_id", "many"])
def _bitmask_kernel(logits, rows, words, stride, width, first_id, many, BLOCK: tl.constexpr):
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
    _bitmask_kernel[(len(rows), triton.cdiv(width, BITMASK_BLOCK))](
        logits, rows, words, logits.stride(0), width, first_id, words.shape[1], BLOCK=BITMASK_BLOCK
    )
