"""Log-probs on the device: one pass over the logits of each row, then a small reduction.

Needs triton. A record of some ids of a row is int64 [2 + most]: the bits of float32 log(sum of
exp(logit)), how many keys lie above the key of the row's own token, and the greatest keys, falling.
Records of blocks make that of a rank, those of ranks the scores. A key is an id with its logit, as
lanes.py packs them.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pipeinfer.kernels.lanes import pack, score_of, token_of
from pipeinfer.kernels.tables import NO_LOGIT_KEY
from pipeinfer.logprobs import NO_ID
from pipeinfer.params import MOST_LOGPROBS

# Fixed, whatever the batch: partial results must not depend on how many rows there are.
BLOCK = 4096  # logits of one program
MAX_KEYS = triton.next_power_of_2(MOST_LOGPROBS)  # keys of a record; one that is compiled for all
_HEAD = tl.constexpr(2)  # words of a record before its keys
_NO_KEY = tl.constexpr(NO_LOGIT_KEY)
_NO_ID = tl.constexpr(NO_ID)


@triton.jit(do_not_specialize=["stride", "width", "first_id"])
def _own(logits, ids, keys, stride, width, first_id):
    """A program per row: the key of the row's id, where this rank has it."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(ids + row)
    column = token - first_id
    held = (column >= 0) & (column < width)
    logit = tl.load(logits + row * stride + column, mask=held, other=0.0).to(tl.float32)
    tl.store(keys + row, tl.where(held, pack(logit, token.to(tl.int32)), _NO_KEY))


@triton.jit
def _write(record, total, above, keys, most):
    """One record of `keys`, of which those that are not there are NO_KEY, and no others equal."""
    tl.store(record, total.to(tl.int32, bitcast=True).to(tl.int64))
    tl.store(record + 1, above)
    for place in tl.range(0, most):
        best = tl.max(keys, axis=0)
        tl.store(record + (place + _HEAD), best)
        keys = tl.where(keys == best, _NO_KEY, keys)


@triton.jit(do_not_specialize=["stride", "width", "first_id", "most"])
def _scan(
    logits, ids, own, records, stride, width, first_id, most, BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Program (row, block): the block's record. WHOLE: the logits are those of all ids, and keys of
    the rows' `ids` go to `own`, where they are else."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    values = tl.load(logits + row * stride + column, mask=inside, other=float("-inf"))
    values = values.to(tl.float32)
    keys = tl.where(inside, pack(values, column + first_id), _NO_KEY)
    if WHOLE:
        token = tl.load(ids + row)
        mine = pack(tl.load(logits + row * stride + token).to(tl.float32), token.to(tl.int32))
        if block == 0:
            tl.store(own + row, mine)
    else:
        mine = tl.load(own + row)
    above = tl.sum((keys > mine).to(tl.int32), axis=0).to(tl.int64)
    record = records + (row * tl.num_programs(1) + block) * (most + _HEAD)
    _write(record, _log_sum(values), above, keys, most)


@triton.jit
def _log_sum(values):
    """log(sum of exp(values)); -inf where all are."""
    peak = tl.max(values, axis=0)
    base = tl.where(peak > float("-inf"), peak, 0.0)
    return base + tl.log(tl.sum(tl.exp(values - base), axis=0))


@triton.jit
def _gather(records, gap, count, most, PARTS: tl.constexpr, MOST: tl.constexpr):
    """(log-sum, above, keys [PARTS * MOST]) of `count` records that lie `gap` words apart."""
    part = tl.arange(0, PARTS).to(tl.int64)
    there = part < count
    first = records + part * gap
    bits = tl.load(first, mask=there, other=0).to(tl.int32)
    total = tl.where(there, bits.to(tl.float32, bitcast=True), float("-inf"))
    above = tl.sum(tl.load(first + 1, mask=there, other=0), axis=0)
    place = tl.arange(0, MOST)
    inside = there[:, None] & (place < most)[None, :]
    keys = tl.load(first[:, None] + (place + _HEAD)[None, :], mask=inside, other=_NO_KEY)
    return _log_sum(total), above, tl.reshape(keys, (PARTS * MOST,))


@triton.jit(do_not_specialize=["count", "most"])
def _fold(parts, records, count, most, PARTS: tl.constexpr, MOST: tl.constexpr):
    """A program per row: one record of its blocks'."""
    row = tl.program_id(0).to(tl.int64)
    size = most + _HEAD
    total, above, keys = _gather(parts + row * count * size, size, count, most, PARTS, MOST)
    _write(records + row * size, total, above, keys, most)


@triton.jit
def _read(keys, total):
    """(ids, log-probs) of keys."""
    there = keys != _NO_KEY
    values = tl.where(there, score_of(keys) - total, float("-inf"))
    return tl.where(there, token_of(keys), _NO_ID), values.to(tl.int32, bitcast=True)


@triton.jit(do_not_specialize=["count", "of_row", "of_part", "most"])
def _tell(
    records, own, found, count, of_row, of_part, most, PARTS: tl.constexpr, MOST: tl.constexpr
):
    """A program per row: its score, from `count` records, a row's `of_row` words from the next
    row's, a part's `of_part` from the next part's."""
    row = tl.program_id(0).to(tl.int64)
    size = most + _HEAD
    total, above, keys = _gather(records + row * of_row, of_part, count, most, PARTS, MOST)
    score = found + row * (size + most)
    _, value = _read(tl.load(own + row), total)
    tl.store(score, value)
    tl.store(score + 1, (above + 1).to(tl.int32))
    for place in tl.range(0, most):
        best = tl.max(keys, axis=0)
        token, value = _read(best, total)
        tl.store(score + (place + _HEAD), token)
        tl.store(score + size + place, value)
        keys = tl.where(keys == best, _NO_KEY, keys)


def logprobs(logits: torch.Tensor, ids: torch.Tensor, most: int) -> torch.Tensor:
    """See interface.py, here and below."""
    ids = ids.contiguous()
    own = torch.empty_like(ids)
    parts = _scanned(logits, ids, own, most, 0, whole=True)
    _, blocks, size = parts.shape
    return _told(parts, own, blocks, blocks * size, size)


def logit_keys(logits: torch.Tensor, ids: torch.Tensor, first_id: int) -> torch.Tensor:
    ids = ids.contiguous()
    keys = torch.empty_like(ids)
    if len(ids):
        stride, width = logits.stride(0), logits.shape[1]
        _own[(len(ids),)](logits, ids, keys, stride, width, first_id, num_warps=1)
    return keys


def local_topk(logits: torch.Tensor, own: torch.Tensor, most: int, first_id: int) -> torch.Tensor:
    parts = _scanned(logits, own, own, most, first_id, whole=False)
    rows, blocks, size = parts.shape
    records = own.new_empty(rows, size)
    if rows:
        room = triton.next_power_of_2(blocks)
        _fold[(rows,)](parts, records, blocks, most, PARTS=room, MOST=MAX_KEYS)
    return records


def merge_topk(records: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    ranks, rows, size = records.shape
    return _told(records.contiguous(), own, ranks, size, rows * size)


def _scanned(
    logits: torch.Tensor, ids: torch.Tensor, own: torch.Tensor, most: int, first_id: int,
    whole: bool,
) -> torch.Tensor:  # fmt: skip
    """int64 [N, blocks, 2 + most]: a record of each block."""
    rows, width = logits.shape
    blocks = max(triton.cdiv(width, BLOCK), 1)
    parts = own.new_empty(rows, blocks, 2 + most)
    if rows:
        _scan[(rows, blocks)](
            logits, ids, own, parts, logits.stride(0), width, first_id, most, BLOCK=BLOCK,
            WHOLE=whole,
        )  # fmt: skip
    return parts


def _told(
    records: torch.Tensor, own: torch.Tensor, count: int, of_row: int, of_part: int
) -> torch.Tensor:
    """See _tell."""
    rows, most = len(own), records.shape[-1] - 2
    found = own.new_empty(rows, 2 + 2 * most, dtype=torch.int32)
    if rows:
        room = triton.next_power_of_2(count)
        _tell[(rows,)](
            records, own, found, count, of_row, of_part, most, PARTS=room, MOST=MAX_KEYS
        )  # fmt: skip
    return found
