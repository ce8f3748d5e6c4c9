"""Logits before sampling: logit bias, suppressed and allowed ids, bad words, and token bitmasks.

Logit bias and bad words lie by slot on the device; bitmasks come from grammars on the host. One
Triton launch each, whose grid depends on the number of rows only, so a CUDA graph can hold it. A
row whose slot changes nothing costs two loads. Needs triton.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pipeinfer.kernels.interface import BAD_WORDS_HEADER, SlotLogitBias

BIAS_BLOCK = 128  # entries of a slot's logit bias that a program applies at a time
MAX_ALLOWED_IDS = 1024  # allowed ids of a row at most; their logits are held in registers
FILL_BLOCK = 1024  # logits that are set to -inf at a time
BITMASK_BLOCK = 2048  # logits of one program of the bitmask
_HEADER = tl.constexpr(BAD_WORDS_HEADER)


@triton.jit
def _mask_all_but(
    row, width, stored, count, first_id, ALLOWED_BLOCK: tl.constexpr, FILL_BLOCK: tl.constexpr
):
    """Sets the row's logits to -inf, except those of the `count` allowed ids at `stored`."""
    at = tl.arange(0, ALLOWED_BLOCK)
    column = tl.load(stored + at, mask=at < count, other=-1) - first_id
    on_rank = (at < count) & (column >= 0) & (column < width)
    saved = tl.load(row + column, mask=on_rank, other=0.0)
    tl.debug_barrier()  # other threads overwrite a thread's logits, which it then writes back
    for begin in range(0, width, FILL_BLOCK):
        over = begin + tl.arange(0, FILL_BLOCK)
        tl.store(row + over, tl.full((FILL_BLOCK,), float("-inf"), tl.float32), mask=over < width)
    tl.debug_barrier()
    tl.store(row + column, saved, mask=on_rank)
    tl.debug_barrier()


@triton.jit
def _mask_bad_words(
    row, width, own_bad_words, num_sequences, position, last_token, first_id,
    RECORD_TOKEN: tl.constexpr, HISTORY: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """Sets the logit of each id to -inf that would complete one of the slot's bad words.

    own_bad_words: the slot's row of SlotBadWords.words. RECORD_TOKEN: the last token, if it was
    sampled in this slot, first joins the history at the position before this one.
    """
    history = own_bad_words + _HEADER
    ends = history + HISTORY
    ids = ends + SEQUENCES + 1
    if RECORD_TOKEN:  # a constant
        token = tl.load(last_token).to(tl.int32)
        sampled = position > tl.load(own_bad_words + 2)
        tl.store(history + ((position - 1) & (HISTORY - 1)), token, mask=sampled)
    tl.debug_barrier()  # after the logit bias, and before the history is read
    at = tl.arange(0, SEQUENCES)
    there = at < num_sequences
    end = tl.load(ends + at + 1, mask=there, other=0)
    before = end - tl.load(ends + at, mask=there, other=0) - 1
    same = there & (before <= position - tl.load(own_bad_words + 1))
    for back in range(1, tl.load(own_bad_words + 3)):
        have = tl.load(history + ((position - back) & (HISTORY - 1)))
        want = tl.load(ids + end - 1 - back, mask=same & (back <= before), other=0)
        same = same & ((back > before) | (want == have))
    column = tl.load(ids + end - 1, mask=same, other=-1) - first_id
    on_rank = same & (column >= 0) & (column < width)
    tl.store(row + column, tl.full((SEQUENCES,), float("-inf"), tl.float32), mask=on_rank)


@triton.jit(
    do_not_specialize=[
        "num_slots",
        "max_entries",
        "stride",
        "first_id",
        "width",
        "bad_words_stride",
    ]
)
def _logit_bias_kernel(
    logits, slots, positions, counts, words, bad_words, last_token, num_slots, max_entries, stride,
    first_id, width, bad_words_stride, ADD_BIAS: tl.constexpr, BLOCK: tl.constexpr,
    ALLOWED_BLOCK: tl.constexpr, FILL_BLOCK: tl.constexpr, HISTORY: tl.constexpr,
    SEQUENCES: tl.constexpr,
):  # fmt: skip
    """Program (row of logits). See SlotLogitBias for counts and words."""
    number = tl.program_id(0).to(tl.int64)
    slot, position = tl.load(slots + number), tl.load(positions + number)
    row = logits + number * stride
    count = tl.load(counts + slot)
    own_bad_words = bad_words + slot * bad_words_stride
    num_sequences = tl.load(own_bad_words)
    if count < 0:
        count = -count
        allowed = words + slot * max_entries
        _mask_all_but(row, width, allowed, count, first_id, ALLOWED_BLOCK, FILL_BLOCK)
    for begin in range(0, count, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        inside = at < count
        stored = words + slot * max_entries + at
        column = tl.load(stored, mask=inside, other=-1) - first_id
        on_rank = inside & (column >= 0) & (column < width)
        never = position < tl.load(stored + 2 * num_slots * max_entries, mask=on_rank, other=0)
        target = row + column
        if ADD_BIAS:
            bits = tl.load(stored + num_slots * max_entries, mask=on_rank, other=0)
            value = tl.load(target, mask=on_rank, other=0.0) + bits.to(tl.float32, bitcast=True)
            tl.store(target, tl.where(never, float("-inf"), value), mask=on_rank)
        else:
            tl.store(target, tl.full((BLOCK,), float("-inf"), tl.float32), mask=on_rank & never)
    if num_sequences > 0:
        _mask_bad_words(
            row, width, own_bad_words, num_sequences, position, last_token + slot, first_id,
            not ADD_BIAS, HISTORY, SEQUENCES,
        )  # fmt: skip


def apply_logit_bias(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    bias: SlotLogitBias,
    first_id: int = 0,
    add_bias: bool = False,
) -> None:
    """See interface.py."""
    if not len(logits):
        return
    assert logits.dtype is torch.float32 or not add_bias
    _, num_slots, max_entries = bias.words.shape
    bad_words = bias.bad_words
    _logit_bias_kernel[(len(logits),)](
        logits, slots, positions, bias.counts, bias.words, bad_words.words,
        bad_words.last_token, num_slots, max_entries, logits.stride(0), first_id, logits.shape[1],
        bad_words.words.shape[1], ADD_BIAS=add_bias, BLOCK=BIAS_BLOCK,
        ALLOWED_BLOCK=MAX_ALLOWED_IDS, FILL_BLOCK=FILL_BLOCK, HISTORY=bad_words.history,
        SEQUENCES=bad_words.max_sequences, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["stride", "width", "first_id", "num_words"])
def _bitmask_kernel(logits, rows, words, stride, width, first_id, num_words, BLOCK: tl.constexpr):
    entry = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = column + first_id
    inside = column < width
    has_bit = inside & (token // 32 < num_words)
    word = tl.load(words + entry * num_words + token // 32, mask=has_bit, other=0)
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
