"""Log-probs on the device: one pass over the logits of each row, then a small reduction.

A record of some ids of a row is int64 [2 + num_top]:

| float32 bits of logsumexp(logits) | keys above the row's own key | greatest keys, falling |

Keys are packed logit keys (triton_support.py); the row's own key is that of the token whose
log-prob is asked for. Records of blocks make that of a rank, those of ranks the log-probs. Needs
triton.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pipeinfer.kernels.interface import NO_LOGIT_KEY
from pipeinfer.kernels.triton_support import key_score, key_token, pack_logit_key
from pipeinfer.params import MAX_LOGPROBS
from pipeinfer.wire import NO_ID

# Fixed, whatever the batch: partial results must not depend on how many rows present are.
BLOCK = 4096  # logits of one program
MAX_KEYS = triton.next_power_of_2(MAX_LOGPROBS)  # keys of a record at most: compiled once for all
_HEADER = tl.constexpr(2)  # words of a record before its keys
_NO_KEY = tl.constexpr(NO_LOGIT_KEY)
_NO_ID = tl.constexpr(NO_ID)


@triton.jit(do_not_specialize=["stride", "width", "first_id"])
def _logit_keys_kernel(logits, ids, keys, stride, width, first_id):
    """Program (row): the key of the row's id, if it lies in this rank's shard."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(ids + row)
    column = token - first_id
    on_rank = (column >= 0) & (column < width)
    logit = tl.load(logits + row * stride + column, mask=on_rank, other=0.0).to(tl.float32)
    tl.store(keys + row, tl.where(on_rank, pack_logit_key(logit, token.to(tl.int32)), _NO_KEY))


@triton.jit
def _store_record(record, total, num_above, keys, num_top):
    """Writes a record of `keys`. Absent ones are NO_LOGIT_KEY; no others are equal."""
    tl.store(record, total.to(tl.int32, bitcast=True).to(tl.int64))
    tl.store(record + 1, num_above)
    for index in tl.range(0, num_top):
        best = tl.max(keys, axis=0)
        tl.store(record + (index + _HEADER), best)
        keys = tl.where(keys == best, _NO_KEY, keys)


@triton.jit(do_not_specialize=["stride", "width", "first_id", "num_top"])
def _scan_block(
    logits, ids, own_keys, records, stride, width, first_id, num_top, BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Program (row, block): the block's record.

    WHOLE: logits are those of the whole vocabulary; the keys of the rows' `ids` are written to
        own_keys, which otherwise has them before.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    values = tl.load(logits + row * stride + column, mask=inside, other=float("-inf"))
    values = values.to(tl.float32)
    keys = tl.where(inside, pack_logit_key(values, column + first_id), _NO_KEY)
    if WHOLE:
        token = tl.load(ids + row)
        own_key = pack_logit_key(
            tl.load(logits + row * stride + token).to(tl.float32), token.to(tl.int32)
        )
        if block == 0:
            tl.store(own_keys + row, own_key)
    else:
        own_key = tl.load(own_keys + row)
    num_above = tl.sum((keys > own_key).to(tl.int32), axis=0).to(tl.int64)
    record = records + (row * tl.num_programs(1) + block) * (num_top + _HEADER)
    _store_record(record, _log_sum(values), num_above, keys, num_top)


@triton.jit
def _log_sum(values):
    """log(sum(exp(values))); -inf if all values are."""
    peak = tl.max(values, axis=0)
    base = tl.where(peak > float("-inf"), peak, 0.0)
    return base + tl.log(tl.sum(tl.exp(values - base), axis=0))


@triton.jit
def _load_records(
    records, record_stride, count, num_top, RECORDS: tl.constexpr, MAX_KEYS: tl.constexpr
):
    """(logsumexp, num_above, keys [RECORDS * MAX_KEYS]) of `count` records, `record_stride` words
    apart."""
    part = tl.arange(0, RECORDS).to(tl.int64)
    present = part < count
    first = records + part * record_stride
    bits = tl.load(first, mask=present, other=0).to(tl.int32)
    total = tl.where(present, bits.to(tl.float32, bitcast=True), float("-inf"))
    num_above = tl.sum(tl.load(first + 1, mask=present, other=0), axis=0)
    index = tl.arange(0, MAX_KEYS)
    inside = present[:, None] & (index < num_top)[None, :]
    keys = tl.load(first[:, None] + (index + _HEADER)[None, :], mask=inside, other=_NO_KEY)
    return _log_sum(total), num_above, tl.reshape(keys, (RECORDS * MAX_KEYS,))


@triton.jit(do_not_specialize=["count", "num_top"])
def _merge_blocks(
    block_records, records, count, num_top, RECORDS: tl.constexpr, MAX_KEYS: tl.constexpr
):
    """Program (row): one record of those of its blocks."""
    row = tl.program_id(0).to(tl.int64)
    size = num_top + _HEADER
    total, num_above, keys = _load_records(
        block_records + row * count * size, size, count, num_top, RECORDS, MAX_KEYS
    )
    _store_record(records + row * size, total, num_above, keys, num_top)


@triton.jit
def _ids_and_logprobs(keys, total):
    """(ids, bits of float32 log-probs) of keys; NO_ID and -inf for absent ones."""
    present = keys != _NO_KEY
    values = tl.where(present, key_score(keys) - total, float("-inf"))
    return tl.where(present, key_token(keys), _NO_ID), values.to(tl.int32, bitcast=True)


@triton.jit(do_not_specialize=["count", "row_stride", "record_stride", "num_top"])
def _merge_records(
    records,
    own_keys,
    out,
    count,
    row_stride,
    record_stride,
    num_top,
    RECORDS: tl.constexpr,
    MAX_KEYS: tl.constexpr,
):
    """Program (row): its log-probs, from `count` records.

    row_stride, record_stride: words from a row's first record to the next row's, and from a record
        to the next of the row.
    """
    row = tl.program_id(0).to(tl.int64)
    size = num_top + _HEADER
    total, num_above, keys = _load_records(
        records + row * row_stride, record_stride, count, num_top, RECORDS, MAX_KEYS
    )
    score = out + row * (size + num_top)
    _, value = _ids_and_logprobs(tl.load(own_keys + row), total)
    tl.store(score, value)
    tl.store(score + 1, (num_above + 1).to(tl.int32))
    for index in tl.range(0, num_top):
        best = tl.max(keys, axis=0)
        token, value = _ids_and_logprobs(best, total)
        tl.store(score + (index + _HEADER), token)
        tl.store(score + size + index, value)
        keys = tl.where(keys == best, _NO_KEY, keys)


def logprobs(logits: torch.Tensor, ids: torch.Tensor, num_top: int) -> torch.Tensor:
    """See interface.py, here and below."""
    ids = ids.contiguous()
    own_keys = torch.empty_like(ids)
    block_records = _block_records(logits, ids, own_keys, num_top, 0, whole=True)
    _, blocks, size = block_records.shape
    return _merged(block_records, own_keys, blocks, blocks * size, size)


def logit_keys(logits: torch.Tensor, ids: torch.Tensor, first_id: int) -> torch.Tensor:
    ids = ids.contiguous()
    keys = torch.empty_like(ids)
    if len(ids):
        stride, width = logits.stride(0), logits.shape[1]
        _logit_keys_kernel[(len(ids),)](logits, ids, keys, stride, width, first_id, num_warps=1)
    return keys


def local_topk(
    logits: torch.Tensor, own_keys: torch.Tensor, num_top: int, first_id: int
) -> torch.Tensor:
    block_records = _block_records(logits, own_keys, own_keys, num_top, first_id, whole=False)
    rows, blocks, size = block_records.shape
    records = own_keys.new_empty(rows, size)
    if rows:
        padded = triton.next_power_of_2(blocks)
        _merge_blocks[(rows,)](
            block_records, records, blocks, num_top, RECORDS=padded, MAX_KEYS=MAX_KEYS
        )
    return records


def merge_topk(records: torch.Tensor, own_keys: torch.Tensor) -> torch.Tensor:
    ranks, rows, size = records.shape
    return _merged(records.contiguous(), own_keys, ranks, size, rows * size)


def _block_records(
    logits: torch.Tensor, ids: torch.Tensor, own_keys: torch.Tensor, num_top: int, first_id: int,
    whole: bool,
) -> torch.Tensor:  # fmt: skip
    """int64 [N, blocks, 2 + num_top]: a record of each block."""
    rows, width = logits.shape
    blocks = max(triton.cdiv(width, BLOCK), 1)
    block_records = own_keys.new_empty(rows, blocks, 2 + num_top)
    if rows:
        _scan_block[(rows, blocks)](
            logits, ids, own_keys, block_records, logits.stride(0), width, first_id, num_top,
            BLOCK=BLOCK, WHOLE=whole,
        )  # fmt: skip
    return block_records


def _merged(
    records: torch.Tensor, own_keys: torch.Tensor, count: int, row_stride: int, record_stride: int
) -> torch.Tensor:
    """int32 [N, 2 + 2 num_top]: see _merge_records."""
    rows, num_top = len(own_keys), records.shape[-1] - 2
    out = own_keys.new_empty(rows, 2 + 2 * num_top, dtype=torch.int32)
    if rows:
        padded = triton.next_power_of_2(count)
        _merge_records[(rows,)](
            records, own_keys, out, count, row_stride, record_stride, num_top, RECORDS=padded,
            MAX_KEYS=MAX_KEYS,
        )  # fmt: skip
    return out
