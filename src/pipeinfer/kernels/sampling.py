"""Seeded sampling on the device: noise, Gumbel-max over a row, top-k, top-p, min-p, vocabulary
shards.

A first launch scans blocks of each row, a second one reduces them; rows that top-k, top-p or min-p
truncate take two more. Where each rank has a shard of the vocabulary, `local_argmax` finds a rank's
best candidates, and `global_argmax` the best of all ranks. A row's token depends on its own logits,
parameters, seed and position only. Needs triton. Knows rows of parameters; no request, no rank and
no exchange.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from pipeinfer.kernels import host
from pipeinfer.kernels.interface import GREEDY_BELOW
from pipeinfer.kernels.triton_support import (
    INTERPRETED,
    best_quad_key,
    key_score,
    key_token,
    load_quads,
    load_shard_quads,
    max_logit,
    ordered_bits,
    pack_logit_key,
)  # fmt: skip

# Fixed, whatever the batch: partial results must not depend on how many rows there are.
SAMPLING_BLOCK = 4096  # logits of one program of the scan
SCAN_WARPS = 4  # warps of a program of the scan
# A score is rounded where it is multiplied and where noise is added, in every kernel that makes it:
# the sample of a row must not depend on whether another row has top-k, which is another kernel.
ROUNDING = {"enable_fp_fusion": False}
MAX_CANDIDATES = 4096  # collected candidates of a truncated row at most, a power of two
MAX_PER_BLOCK = 1024  # collected candidates of a block at most; no more than a block has logits
ROW_CHUNK = 8192  # logits that are read at a time where there are more candidates
TRUNCATED_WARPS = 16  # warps of a program that samples a truncated row
TRUNCATED_MAX_REGISTERS = 0  # of a thread of such a program at most; 0: chosen by the compiler
_GREEDY = tl.constexpr(GREEDY_BELOW)
_TRUNCATED = tl.constexpr(2)  # a result of _row_kind
_LOWEST_KEY = tl.constexpr(-(2**31))  # among the keys of truncation
_NO_KEY = tl.constexpr(-(2**63))  # among packed logit keys

# Words and uniforms are bit for bit those of host.py. The Gumbel variates are made with the
# device's quick logarithm and differ from host.py by at most 6e-6: less than the rounding of a
# score of 64 or more, so a different token needs two scores that close.


@triton.jit
def _wide_multiply(word, FACTOR: tl.constexpr):
    """Returns (high, low) word of a product: one wide multiplication."""
    product = word.to(tl.uint64) * FACTOR
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def philox_words(seed, position, counters):
    """Returns four uint32 tensors: the words of ids 4 c, 4 c + 1, 4 c + 2, 4 c + 3 for each counter
    c.

    - seed: int64 scalar, the bits of the uint64
    - position: int64 or int32 scalar
    """
    position = position.to(tl.int64)
    c0 = counters.to(tl.uint32)
    c1 = (position & 0xFFFFFFFF).to(tl.uint32)
    c2 = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c3 = c2 * 0
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(10):
        high, low = _wide_multiply(c0, 0xD2511F53)
        other_high, other_low = _wide_multiply(c2, 0xCD9E8D57)
        c0, c1 = other_high ^ c1 ^ k0, other_low
        c2, c3 = high ^ c3 ^ k1, low
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def uniform_of_word(word):
    """float32 in (0, 1) of uint32 words, exactly as host.py defines it."""
    v = word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    return tl.minimum(v, 0.9999999403953552)


@triton.jit
def _fast_log2(x):
    """The device's quick logarithm of normal numbers: absolute error 2^-22 near 1."""
    if INTERPRETED:
        return tl.log2(x)
    else:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def gumbel_noise(word):
    """Standard Gumbel variates, float32, of uint32 words: -log(-log1p(-uniform))."""
    v = uniform_of_word(word)
    # -log2(1 - v), by its series where 1 - v would lose the bits of v. All in powers of two, which
    # is what the device computes: the natural logarithm's factor comes in once, at the end.
    series = v * 0.36067376022224085 + 0.4808983469629878
    series = v * series + 0.7213475204444817
    series = v * series + 1.4426950408889634
    exponential = tl.where(v < 0.03125, v * series, -_fast_log2(1.0 - v))
    return _fast_log2(exponential) * -0.6931471805599453 + 0.36651292058166435


@triton.jit
def gumbel_noise_at(seed, position, ids):
    """The noise of single ids; four times the work of `philox_words` for ids by fours."""
    w0, w1, w2, w3 = philox_words(seed, position, ids // 4)
    which = ids % 4
    low = tl.where(which == 0, w0, w1)
    high = tl.where(which == 2, w2, w3)
    return gumbel_noise(tl.where(which < 2, low, high))


# Top-k, top-p and min-p, in vLLM's order: top-k, then top-p of what is left, then min-p; equal
# logits stand or fall together. The definition is `truncation_thresholds` in host.py.
#
# From the maxima and sums of a row's blocks follows a lower bound of the threshold.
# _collect_candidates, a program per block, copies the few candidates from there up;
# _sample_truncated_rows, a program per row, searches and samples among these alone, in registers.
# Where there are too many (flat logits, a top_k above the number of blocks) it reads the whole row
# for every step of the search: the same result, slowly. How many a block may have matters as much
# as how many a row may: vocabularies are sorted by frequency, so that candidates stand together.
#
# A key is here a logit as an integer that sorts like it. 16 bits are enough for bfloat16.


@triton.jit
def _is_truncated(temperature, top_k, top_p, min_p, vocab, GREEDY: tl.constexpr):
    """Whether top-k, top-p or min-p leave out ids of the row; top_k, top_p and min_p are
    pointers."""
    k = tl.load(top_k)
    some = ((k > 0) & (k < vocab)) | (tl.load(top_p) < 1.0) | (tl.load(min_p) > 0.0)
    return some & (temperature >= GREEDY)


@triton.jit
def _store_sample(row, token, sampled, last_token, slots, WRITE_LAST: tl.constexpr):
    """Writes the row's number of tokens and its id: (1, token), or (0, 0) if token is -1.

    -1 is of a row without a finite maximum. Such a row may be part of one more step, and goes on
    from an id that exists.
    """
    found = tl.maximum(token, 0).to(tl.int64)
    tl.store(sampled + 2 * row, (token >= 0).to(tl.int64))
    tl.store(sampled + 2 * row + 1, found)
    if WRITE_LAST:
        tl.store(last_token + tl.load(slots + row), found)


@triton.jit
def _scaled_logits(logits, row_max, temperature):
    """Returns (logits - row_max) / temperature, rounded as the definition does."""
    return tl.div_rn(logits - row_max, temperature)


@triton.jit
def _total_above(
    keys, weights, row, vocab, key, row_max, temperature, WEIGH: tl.constexpr,
    COLLECTED: tl.constexpr, SHIFT: tl.constexpr, ROW_CHUNK: tl.constexpr,
):  # fmt: skip
    """The number of candidates with a key >= `key` (exact below 2^24); if WEIGH, their sum of
    exp(x).

    - COLLECTED: the candidates are `keys` with `weights`; else they are the whole row
    """
    if COLLECTED:
        total = tl.where(keys >= key, weights if WEIGH else 1.0, 0.0)
    else:
        total = tl.zeros((ROW_CHUNK,), tl.float32)
        for begin in tl.range(0, vocab, ROW_CHUNK, num_stages=4):
            index = begin + tl.arange(0, ROW_CHUNK)
            logits = tl.load(row + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
            weight = tl.exp(_scaled_logits(logits, row_max, temperature)) if WEIGH else 1.0
            total += tl.where(
                ((ordered_bits(logits) >> SHIFT) >= key) & (index < vocab), weight, 0.0
            )
    return tl.sum(total, axis=0)


@triton.jit
def _largest_key(
    keys, weights, row, vocab, low_key, high_key, need, row_max, temperature, WEIGH: tl.constexpr,
    COLLECTED: tl.constexpr, SHIFT: tl.constexpr, ROW_CHUNK: tl.constexpr,
):  # fmt: skip
    """The largest key in low_key .. high_key - 1 whose _total_above reaches `need`."""
    while high_key - low_key > 1:
        middle = low_key + (high_key - low_key) // 2
        key = middle.to(tl.int32)
        found = _total_above(
            keys, weights, row, vocab, key, row_max, temperature, WEIGH, COLLECTED, SHIFT, ROW_CHUNK
        )
        if found >= need:
            low_key = middle
        else:
            high_key = middle
    return low_key


@triton.jit
def _threshold_key(
    keys, weights, row, vocab, low_key, k, p, total, row_max, temperature, COLLECTED: tl.constexpr,
    SHIFT: tl.constexpr, ROW_CHUNK: tl.constexpr,
):  # fmt: skip
    """The key of the last candidate that top-k and top-p leave. total: the weight of the whole
    row."""
    high_key = (ordered_bits(row_max) >> SHIFT).to(tl.int64) + 1
    if k > 0:
        low_key = _largest_key(
            keys, weights, row, vocab, low_key, high_key, k.to(tl.float32), row_max, temperature,
            False, COLLECTED, SHIFT, ROW_CHUNK,
        )  # fmt: skip
        if p < 1.0:
            total = _total_above(
                keys, weights, row, vocab, low_key.to(tl.int32), row_max, temperature, True,
                COLLECTED, SHIFT, ROW_CHUNK,
            )  # fmt: skip
    if p < 1.0:
        low_key = _largest_key(
            keys, weights, row, vocab, low_key, high_key, total * p, row_max, temperature, True,
            COLLECTED, SHIFT, ROW_CHUNK,
        )  # fmt: skip
    return low_key.to(tl.int32)


@triton.jit
def _sample_from_candidates(
    logits, local_ids, counts, blocks, low_key, k, p, floor, total, row_max, temperature, seed,
    position, SHIFT: tl.constexpr, MAX_PER_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Gumbel-max over the collected candidates that the threshold leaves."""
    index = tl.arange(0, MAX_CANDIDATES)
    block = tl.zeros_like(index)  # each candidate's block, and the block's first candidate
    first = tl.zeros_like(index)
    end = low_key.to(tl.int32) * 0
    for one in range(0, blocks):
        end += tl.load(counts + one)
        block += (index >= end).to(tl.int32)
        first = tl.where(index >= end, end, first)
    inside = index < end
    at = block * MAX_PER_BLOCK + index - first
    value = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
    ids = block * BLOCK + tl.load(local_ids + at, mask=inside, other=0).to(tl.int32)
    x = _scaled_logits(value, row_max, temperature)
    keys = tl.where(inside, ordered_bits(value) >> SHIFT, _LOWEST_KEY)
    weights = tl.exp(x)
    key = _threshold_key(
        keys, weights, logits, 0, low_key, k, p, total, row_max, temperature, True, SHIFT,
        MAX_CANDIDATES,
    )  # fmt: skip
    kept = inside & (keys >= key) & (x >= floor)
    score = tl.where(kept, x + gumbel_noise_at(seed, position, ids), float("-inf"))
    return key_token(tl.max(pack_logit_key(score, ids), axis=0))


@triton.jit
def _score_if_kept(logits, word, key, floor, row_max, temperature, SHIFT: tl.constexpr):
    x = _scaled_logits(logits, row_max, temperature)
    kept = ((ordered_bits(logits) >> SHIFT) >= key) & (x >= floor)
    return tl.where(kept, x + gumbel_noise(word), float("-inf"))


@triton.jit
def _sample_from_row(
    row, vocab, low_key, k, p, floor, total, row_max, temperature, seed, position,
    SHIFT: tl.constexpr, ROW_CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Samples by Gumbel-max over the ids of the whole row that the threshold leaves."""
    key = _threshold_key(
        low_key, low_key, row, vocab, low_key, k, p, total, row_max, temperature, False, SHIFT,
        ROW_CHUNK,
    )  # fmt: skip
    best = tl.full((), _NO_KEY, tl.int64)
    for first in range(0, vocab, BLOCK):
        l0, l1, l2, l3, counters = load_quads(row, first, vocab, BLOCK)
        w0, w1, w2, w3 = philox_words(seed, position, counters)
        l0 = _score_if_kept(l0, w0, key, floor, row_max, temperature, SHIFT)
        l1 = _score_if_kept(l1, w1, key, floor, row_max, temperature, SHIFT)
        l2 = _score_if_kept(l2, w2, key, floor, row_max, temperature, SHIFT)
        l3 = _score_if_kept(l3, w3, key, floor, row_max, temperature, SHIFT)
        best = tl.maximum(best, best_quad_key(l0, l1, l2, l3, counters))
    return key_token(best)


@triton.jit
def _lower_bound(maxima, total, row_max, temperature, k, p, min_p, vocab, blocks):
    """Returns a lower bound of the row's threshold, a logit; -inf if there is none.

    - top-k: at least k blocks have a maximum from the bound on
    - top-p: the ids below weigh less than 1 - p of the row, even if they were all of the vocabulary
    - min-p: its floor

    The bound is lowered by a margin for rounding.
    """
    rank = tl.sum((maxima[None, :] >= maxima[:, None]).to(tl.int32), axis=1)
    by_k = tl.max(tl.where(rank >= k, maxima, float("-inf")), axis=0)
    weight = tl.maximum((1.0 - p) * total / vocab, min_p)
    by_p = row_max + temperature * (tl.log(weight) - 0.01) - 1e-5 * tl.abs(row_max)
    return tl.where(k > blocks, float("-inf"), tl.where(k > 0, by_k, by_p))


@triton.jit
def _row_statistics(
    row, temperature, top_k, top_p, min_p, block_max, block_sums, vocab, blocks,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Returns (greatest logit, weight of the whole row, lower bound of the threshold, k) of a
    row.
    """
    at = row * blocks + tl.arange(0, BLOCKS)
    inside = tl.arange(0, BLOCKS) < blocks
    maxima = tl.load(block_max + at, mask=inside, other=float("-inf"))
    weights = tl.load(block_sums + at, mask=inside, other=0.0)
    row_max = tl.max(maxima, axis=0)
    total = tl.sum(weights * tl.exp((maxima - row_max) / temperature), axis=0)
    k, p, least = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    k = tl.where(k < vocab, k, 0)
    bound = _lower_bound(maxima, total, row_max, temperature, k, p, least, vocab, blocks)
    return row_max, total, bound, k


@triton.jit
def _collect_candidates(
    logits, temperatures, top_k, top_p, min_p, block_max, block_sums, candidates, local_ids, counts,
    stride, vocab, blocks, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, MAX_PER_BLOCK: tl.constexpr,
    GREEDY: tl.constexpr,
):  # fmt: skip
    """Program (row, block): copies the block's candidates in order.

    - candidates, local_ids: [rows, blocks, MAX_PER_BLOCK], logits, and ids less the first id of the
      block
    - counts: [rows, blocks], candidates of each block, which may be more than MAX_PER_BLOCK
    """
    row = tl.program_id(0)
    block = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    if _is_truncated(temperature, top_k + row, top_p + row, min_p + row, vocab, GREEDY):
        _, _, bound, _ = _row_statistics(
            row, temperature, top_k, top_p, min_p, block_max, block_sums, vocab, blocks, BLOCKS
        )
        at = row * blocks + block
        size = row * 0
        if tl.load(block_max + at) >= bound:
            local_id = tl.arange(0, BLOCK)
            index = block * BLOCK + local_id
            row_logits = logits + row.to(tl.int64) * stride
            value = tl.load(row_logits + index, mask=index < vocab, other=float("-inf"))
            found = (value.to(tl.float32) >= bound) & (index < vocab)
            nth = tl.cumsum(found.to(tl.int32), axis=0) - 1
            target = at * MAX_PER_BLOCK + nth
            tl.store(candidates + target, value, mask=found & (nth < MAX_PER_BLOCK))
            tl.store(local_ids + target, local_id.to(tl.int16), mask=found & (nth < MAX_PER_BLOCK))
            size = tl.sum(found.to(tl.int32), axis=0)
        tl.store(counts + at, size)


@triton.jit
def _sample_truncated_rows(
    logits, temperatures, top_k, top_p, min_p, seeds, positions, block_max, block_sums, candidates,
    local_ids, counts, sampled, last_token, slots, stride, vocab, blocks, BLOCKS: tl.constexpr,
    MAX_PER_BLOCK: tl.constexpr, MAX_CANDIDATES: tl.constexpr, ROW_CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, SHIFT: tl.constexpr, GREEDY: tl.constexpr, WRITE_LAST: tl.constexpr,
):  # fmt: skip
    """Program (row), after _collect_candidates. Does nothing for rows that are not truncated."""
    row = tl.program_id(0)
    temperature = tl.load(temperatures + row)
    if _is_truncated(temperature, top_k + row, top_p + row, min_p + row, vocab, GREEDY):
        row_max, total, bound, k = _row_statistics(
            row, temperature, top_k, top_p, min_p, block_max, block_sums, vocab, blocks, BLOCKS
        )
        token = row * 0 - 1
        if tl.abs(row_max) < float("inf"):
            p, floor = tl.load(top_p + row), tl.log(tl.load(min_p + row))
            seed, position = tl.load(seeds + row), tl.load(positions + row)
            low_key = (ordered_bits(bound) >> SHIFT).to(tl.int64)
            block = tl.arange(0, BLOCKS)
            row_counts = counts + row * blocks
            found = tl.load(row_counts + block, mask=block < blocks, other=0)
            if (tl.max(found, axis=0) <= MAX_PER_BLOCK) & (tl.sum(found, axis=0) <= MAX_CANDIDATES):
                first = row * blocks * MAX_PER_BLOCK
                token = _sample_from_candidates(
                    candidates + first, local_ids + first, row_counts, blocks, low_key, k, p, floor,
                    total, row_max, temperature, seed, position, SHIFT, MAX_PER_BLOCK, BLOCK,
                    MAX_CANDIDATES,
                )  # fmt: skip
            else:
                row_logits = logits + row.to(tl.int64) * stride
                token = _sample_from_row(
                    row_logits, vocab, low_key, k, p, floor, total, row_max, temperature, seed,
                    position, SHIFT, ROW_CHUNK, BLOCK,
                )  # fmt: skip
        _store_sample(row, token, sampled, last_token, slots, WRITE_LAST)


@triton.jit
def _row_kind(row, temperatures, top_k, top_p, min_p, vocab, TRUNCATE: tl.constexpr):
    """Returns the kind of the row: 0: greedy; 1: random over the whole row; _TRUNCATED: by top-k,
    top-p or min-p.
    """
    temperature = tl.load(temperatures + row)
    kind = (temperature >= _GREEDY).to(tl.int32)
    if TRUNCATE:
        truncated = _is_truncated(
            temperature, top_k + row, top_p + row, min_p + row, vocab, _GREEDY
        )
        kind += truncated.to(tl.int32)
    return kind


@triton.jit
def _scan_blocks(
    logits, temperatures, top_k, top_p, min_p, seeds, positions, block_max, block_sums, block_best,
    stride, vocab, blocks, num_skipped, start, BLOCK: tl.constexpr, TRUNCATE: tl.constexpr,
    SHARDED: tl.constexpr,
):  # fmt: skip
    """Program (row, block): writes one number of each block [rows, blocks].

    - block_max: the greatest logit
    - block_best: the packed key of the best score (logit - max) / temperature + noise with its id;
      greedy rows without noise
    - block_sums: of truncated rows instead of block_best: the sum of exp((logit - max) /
      temperature)
    - SHARDED: the row has a shard of the vocabulary, see load_shard_quads
    """
    row = tl.program_id(0)
    first = tl.program_id(1) * BLOCK
    kind = _row_kind(row, temperatures, top_k, top_p, min_p, vocab, TRUNCATE)
    row_logits = logits + row.to(tl.int64) * stride
    if SHARDED:
        l0, l1, l2, l3, counters = load_shard_quads(
            row_logits, first, num_skipped, start, vocab, BLOCK
        )
    else:
        l0, l1, l2, l3, counters = load_quads(row_logits, first, vocab, BLOCK)
    none = tl.zeros_like(l0)
    g0, g1, g2, g3 = none, none, none, none
    if kind == 1:  # before the maximum: made while the logits are being loaded
        w0, w1, w2, w3 = philox_words(tl.load(seeds + row), tl.load(positions + row), counters)
        g0, g1, g2, g3 = gumbel_noise(w0), gumbel_noise(w1), gumbel_noise(w2), gumbel_noise(w3)
    row_max = max_logit(l0, l1, l2, l3)
    base = tl.where(row_max > float("-inf"), row_max, 0.0)
    scale = 1.0 / tl.where(kind == 0, 1.0, tl.load(temperatures + row))
    l0, l1 = (l0 - base) * scale, (l1 - base) * scale
    l2, l3 = (l2 - base) * scale, (l3 - base) * scale
    at = row * blocks + tl.program_id(1)
    tl.store(block_max + at, row_max)
    if kind == _TRUNCATED:
        total = tl.exp(l0) + tl.exp(l1) + tl.exp(l2) + tl.exp(l3)
        tl.store(block_sums + at, tl.sum(total, axis=0))
    else:
        tl.store(block_best + at, best_quad_key(l0 + g0, l1 + g1, l2 + g2, l3 + g3, counters))


@triton.jit
def _reduce_blocks(
    temperatures, top_k, top_p, min_p, block_max, block_best, sampled, last_token, slots, vocab,
    blocks, BLOCKS: tl.constexpr, TRUNCATE: tl.constexpr, WRITE_LAST: tl.constexpr,
):  # fmt: skip
    """Program (row): samples the best id of the row's blocks. Does nothing for truncated rows."""
    row = tl.program_id(0)
    kind = _row_kind(row, temperatures, top_k, top_p, min_p, vocab, TRUNCATE)
    if kind != _TRUNCATED:
        at = row * blocks + tl.arange(0, BLOCKS)
        inside = tl.arange(0, BLOCKS) < blocks
        maxima = tl.load(block_max + at, mask=inside, other=float("-inf"))
        best = tl.load(block_best + at, mask=inside, other=_NO_KEY)
        row_max = tl.max(maxima, axis=0)
        score = key_score(best)
        score += (maxima - row_max) / tl.where(kind == 0, 1.0, tl.load(temperatures + row))
        packed = pack_logit_key(tl.where(inside, score, float("-inf")), key_token(best))
        token = key_token(tl.max(packed, axis=0))
        token = tl.where(tl.abs(row_max) < float("inf"), token, -1)
        _store_sample(row, token, sampled, last_token, slots, WRITE_LAST)


def sample(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor,
    min_p: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, *, truncate: bool = True,
    out: torch.Tensor | None = None, last_token: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Returns int64 [L, 2], the number of tokens of each row, and the sampled id. No
    synchronisation.

    - logits: float32, bfloat16 or float16 [L, vocab], unit last stride
    - temperature, top_k, top_p, min_p, positions: [L], as in interface.py
    - seeds: int64 [L], the bits of the uint64
    - truncate: False leaves top_k, top_p and min_p out, and saves two launches
    - out: int64 [L, 2], the result if given
    - last_token, slots: int64 [slots] and int [L]; last_token[slots[r]] becomes row r's id

    A row with a NaN, or whose maximum is not finite, gives 0 tokens, and its id is 0.
    """
    rows, vocab = logits.shape
    sampled = logits.new_empty(rows, 2, dtype=torch.int64) if out is None else out
    if rows == 0:
        return sampled
    blocks = triton.cdiv(vocab, SAMPLING_BLOCK)
    block_max, block_sums = logits.new_empty(2, rows, blocks, dtype=torch.float32)
    block_best = logits.new_empty(rows, blocks, dtype=torch.int64)
    parameters = (temperature, top_k, top_p, min_p)
    _scan_blocks[(rows, blocks)](
        logits, *parameters, seeds, positions, block_max, block_sums, block_best, logits.stride(0),
        vocab, blocks, 0, 0, BLOCK=SAMPLING_BLOCK, TRUNCATE=truncate, SHARDED=False,
        num_warps=SCAN_WARPS, **ROUNDING,
    )  # fmt: skip
    options = {"BLOCKS": triton.next_power_of_2(blocks), "WRITE_LAST": last_token is not None}
    outputs = (sampled, last_token, slots)
    _reduce_blocks[(rows,)](
        *parameters,
        block_max,
        block_best,
        *outputs,
        vocab,
        blocks,
        TRUNCATE=truncate,
        num_warps=1,
        **options,
        **ROUNDING,
    )
    if truncate:
        _launch_truncated(
            logits, parameters, seeds, positions, block_max, block_sums, outputs, options
        )
    return sampled


def _launch_truncated(
    logits: torch.Tensor, parameters: tuple[torch.Tensor, ...], seeds: torch.Tensor,
    positions: torch.Tensor, block_max: torch.Tensor, block_sums: torch.Tensor,
    outputs: tuple[torch.Tensor | None, ...], options: dict[str, int],
) -> None:  # fmt: skip
    """Samples the truncated rows.

    - parameters: temperature, top_k, top_p, min_p
    - outputs: sampled, last_token, slots
    - options: as of _reduce_blocks
    """
    rows, vocab = logits.shape
    blocks, padded = block_max.shape[1], options["BLOCKS"]
    per_block = min(MAX_PER_BLOCK, SAMPLING_BLOCK)
    candidates = logits.new_empty(rows, blocks * per_block)
    local_ids = logits.new_empty(rows, blocks * per_block, dtype=torch.int16)
    counts = logits.new_empty(rows, blocks, dtype=torch.int32)
    if TRUNCATED_MAX_REGISTERS:
        options = options | {"maxnreg": TRUNCATED_MAX_REGISTERS}
    sizes = (logits.stride(0), vocab, blocks)
    _collect_candidates[(rows, blocks)](
        logits, *parameters, block_max, block_sums, candidates, local_ids, counts, *sizes,
        BLOCKS=padded, BLOCK=SAMPLING_BLOCK, MAX_PER_BLOCK=per_block, GREEDY=GREEDY_BELOW,
        num_warps=4, **ROUNDING,
    )  # fmt: skip
    _sample_truncated_rows[(rows,)](
        logits, *parameters, seeds, positions, block_max, block_sums, candidates, local_ids, counts,
        *outputs, *sizes, MAX_PER_BLOCK=per_block, MAX_CANDIDATES=MAX_CANDIDATES,
        ROW_CHUNK=ROW_CHUNK, BLOCK=SAMPLING_BLOCK, GREEDY=GREEDY_BELOW,
        SHIFT=_unused_bits(logits.dtype), num_warps=TRUNCATED_WARPS, **options, **ROUNDING,
    )  # fmt: skip


def _unused_bits(dtype: torch.dtype) -> int:
    """Low bits of the float32 that no value of `dtype` uses."""
    return {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}[dtype]


def sample_reference(logits: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
    """`sample`, but for near ties, by sorting each row on the host in float64."""
    ids = [
        _row_reference(values, *[parameter[row].item() for parameter in parameters])
        for row, values in enumerate(logits.double().cpu())
    ]
    rows = [[int(token >= 0), max(token, 0)] for token in ids]
    return torch.tensor(rows, dtype=torch.int64, device=logits.device).reshape(-1, 2)


def _row_reference(
    values: torch.Tensor,
    temperature: float,
    k: int,
    p: float,
    min_p: float,
    seed: int,
    position: int,
) -> int:
    if not torch.isfinite(values.max()):
        return -1
    if temperature < GREEDY_BELOW:
        return int(values.argmax())
    x = (values - values.max()) / temperature
    ranked = x.sort(descending=True).values
    if 0 < k < len(x):
        x[x < ranked[k - 1]] = -torch.inf
        ranked[ranked < ranked[k - 1]] = -torch.inf
    if p < 1:
        mass = ranked.exp().cumsum(0)
        x[x < ranked[int((mass < p * mass[-1]).sum())]] = -torch.inf
    x[x.exp() < min_p] = -torch.inf
    seeds = np.array([seed], dtype=np.int64).view(np.uint64)
    sampled = host.gumbel_noise(seeds, np.array([position]), len(x))[0]
    return int((x + torch.from_numpy(sampled).double()).argmax())


# Candidates of a rank, int64 [L, 2]: | packed key of score and id | greatest logit, float32 bits |
#
# A score is relative to the rank's own greatest logit. To compare scores of several ranks, the
# difference of this logit and the greatest of all, over the temperature, is added first: 0 for the
# rank that has the greatest, so that the greedy choice is exact.


@triton.jit
def _best_key(temperatures, maxima, keys):
    """Returns (packed key of the best candidate, greatest logit) of candidates with scores that are
    relative to their own maxima.
    """
    temperature = tl.load(temperatures)
    row_max = tl.max(maxima, axis=0)
    score = key_score(keys) + (maxima - row_max) / tl.where(temperature < _GREEDY, 1.0, temperature)
    # -inf less -inf is NaN, which would sort above all.
    score = tl.where(maxima > float("-inf"), score, float("-inf"))
    return tl.max(pack_logit_key(score, key_token(keys)), axis=0), row_max


@triton.jit
def _local_argmax(temperatures, block_max, block_best, candidates, blocks, BLOCKS: tl.constexpr):
    """Program (row): writes the best candidate of the row's blocks."""
    row = tl.program_id(0)
    at = row * blocks + tl.arange(0, BLOCKS)
    inside = tl.arange(0, BLOCKS) < blocks
    maxima = tl.load(block_max + at, mask=inside, other=float("-inf"))
    keys = tl.load(block_best + at, mask=inside, other=_NO_KEY)
    best, row_max = _best_key(temperatures + row, maxima, keys)
    tl.store(candidates + 2 * row, best)
    tl.store(candidates + 2 * row + 1, row_max.to(tl.int32, bitcast=True).to(tl.int64))


@triton.jit
def _global_argmax(
    candidates, temperatures, sampled, last_token, slots, rows, ranks, RANKS: tl.constexpr,
    WRITE_LAST: tl.constexpr,
):  # fmt: skip
    """Program (row): samples the best candidate of all ranks."""
    row = tl.program_id(0)
    rank = tl.arange(0, RANKS)
    at = candidates + (rank * rows + row) * 2
    keys = tl.load(at, mask=rank < ranks, other=_NO_KEY)
    bits = tl.load(at + 1, mask=rank < ranks, other=0)
    maxima = bits.to(tl.int32).to(tl.float32, bitcast=True)
    best, row_max = _best_key(
        temperatures + row, tl.where(rank < ranks, maxima, float("-inf")), keys
    )
    token = tl.where(tl.abs(row_max) < float("inf"), key_token(best), -1)
    _store_sample(row, token, sampled, last_token, slots, WRITE_LAST)


def local_argmax(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor,
    start: int,
) -> torch.Tensor:  # fmt: skip
    """Returns int64 [L, 2], this rank's candidates for rows that nothing truncates. No
    synchronisation.

    - logits: [L, width], those of the ids from `start` on

    Other arguments: as for `sample`.
    """
    rows, width = logits.shape
    candidates = logits.new_empty(rows, 2, dtype=torch.int64)
    if rows == 0:
        return candidates
    num_skipped = start % 4  # a counter makes the noise of four ids
    blocks = max(triton.cdiv(width + num_skipped, SAMPLING_BLOCK), 1)
    block_max = logits.new_empty(rows, blocks, dtype=torch.float32)
    block_best = logits.new_empty(rows, blocks, dtype=torch.int64)
    unused = (temperature,) * 3
    _scan_blocks[(rows, blocks)](
        logits, temperature, *unused, seeds, positions, block_max, block_max, block_best,
        logits.stride(0), width, blocks, num_skipped, start - num_skipped, BLOCK=SAMPLING_BLOCK,
        TRUNCATE=False, SHARDED=True, num_warps=SCAN_WARPS, **ROUNDING,
    )  # fmt: skip
    _local_argmax[(rows,)](
        temperature, block_max, block_best, candidates, blocks,
        BLOCKS=triton.next_power_of_2(blocks), num_warps=1,
    )  # fmt: skip
    return candidates


def global_argmax(
    candidates: torch.Tensor, temperature: torch.Tensor, last_token: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Samples as `sample` does, from the candidates of all ranks [ranks, L, 2], in any order of
    ranks.

    For equal scores the lowest id wins.
    """
    ranks, rows, _ = candidates.shape
    sampled = candidates.new_empty(rows, 2)
    if rows:
        _global_argmax[(rows,)](
            candidates.contiguous(), temperature, sampled, last_token, slots, rows, ranks,
            RANKS=triton.next_power_of_2(ranks), WRITE_LAST=last_token is not None, num_warps=1,
        )  # fmt: skip
    return sampled
