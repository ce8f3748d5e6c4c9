"""Sampling from what top-k, top-p and min-p leave: a search for each threshold, then a choice.

Needs triton. Knows a row's logits and what one pass has already said about each block of them.
The order is vLLM's: top-k, then top-p of what is left, then min-p; equal logits stand or fall
together. The definition is host/truncation.py.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from pipeinfer.kernels.lanes import best_of_lanes, load_lanes, pack, sortable, token_of
from pipeinfer.kernels.triton_noise import gumbel, gumbel_at, words

# From the maxima and sums of a row's blocks follows a logit that the threshold cannot lie below.
# collect(), a program per block, copies the few candidates from there up; choose(), a program per
# row, searches and draws among these alone, in registers. Where there are too many (flat logits, a
# top_k above the number of blocks) it reads the whole row for every step of the search: the same
# result, slowly. How many a block may have matters as much as how many a row may: vocabularies are
# sorted by frequency, so that candidates stand together.
#
# A key is a logit as an integer that sorts like it. 16 bits are enough for bfloat16.

CANDIDATES = 4096  # of a row, at most; a power of two
PER_BLOCK = 1024  # for the candidates of a block; no more than the block has logits
CHUNK = 8192  # logits of the whole row that are read at a time
_LOWEST = tl.constexpr(-(2**31))


@triton.jit
def is_truncated(temperature, top_k, top_p, min_p, vocab, GREEDY: tl.constexpr):
    """Whether anything restricts the row; top_k, top_p and min_p are pointers to its values."""
    k = tl.load(top_k)
    some = ((k > 0) & (k < vocab)) | (tl.load(top_p) < 1.0) | (tl.load(min_p) > 0.0)
    return some & (temperature >= GREEDY)


@triton.jit
def settle(row, token, drawn, last_token, slots, KEEP: tl.constexpr):
    """Writes that the row gave one token, and which; `token` -1, of a row without a finite maximum:
    that it gave none. A bad row may be part of one more step, and goes on from an id that exists.
    """
    found = tl.maximum(token, 0).to(tl.int64)
    tl.store(drawn + 2 * row, (token >= 0).to(tl.int64))
    tl.store(drawn + 2 * row + 1, found)
    if KEEP:
        tl.store(last_token + tl.load(slots + row), found)


@triton.jit
def _scaled(logits, peak, temperature):
    """Logits after temperature as the definition rounds them; the peak is 0."""
    return tl.div_rn(logits - peak, temperature)


@triton.jit
def _above(
    keys, weights, row, vocab, key, peak, temperature, WEIGH: tl.constexpr, FEW: tl.constexpr,
    SHIFT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """How many candidates have a key >= `key` (exact below 2^24), or their sum of exp(x).

    FEW: the candidates are `keys` with `weights`; else they are the whole row.
    """
    if FEW:
        total = tl.where(keys >= key, weights if WEIGH else 1.0, 0.0)
    else:
        total = tl.zeros((CHUNK,), tl.float32)
        for begin in tl.range(0, vocab, CHUNK, num_stages=4):
            index = begin + tl.arange(0, CHUNK)
            logits = tl.load(row + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
            weight = tl.exp(_scaled(logits, peak, temperature)) if WEIGH else 1.0
            total += tl.where(((sortable(logits) >> SHIFT) >= key) & (index < vocab), weight, 0.0)
    return tl.sum(total, axis=0)


@triton.jit
def _largest_key(
    keys, weights, row, vocab, low, high, need, peak, temperature, WEIGH: tl.constexpr,
    FEW: tl.constexpr, SHIFT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The largest key in low .. high - 1 such that what _above counts from it on reaches `need`."""
    while high - low > 1:
        middle = low + (high - low) // 2
        key = middle.to(tl.int32)
        found = _above(keys, weights, row, vocab, key, peak, temperature, WEIGH, FEW, SHIFT, CHUNK)
        if found >= need:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _threshold(
    keys, weights, row, vocab, low, k, p, total, peak, temperature, FEW: tl.constexpr,
    SHIFT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The key of the last candidate that top-k and top-p leave. `total`: the whole row's weight."""
    high = (sortable(peak) >> SHIFT).to(tl.int64) + 1
    if k > 0:
        low = _largest_key(keys, weights, row, vocab, low, high, k.to(tl.float32), peak,
                           temperature, False, FEW, SHIFT, CHUNK)  # fmt: skip
        if p < 1.0:
            total = _above(keys, weights, row, vocab, low.to(tl.int32), peak, temperature, True,
                           FEW, SHIFT, CHUNK)  # fmt: skip
    if p < 1.0:
        low = _largest_key(keys, weights, row, vocab, low, high, total * p, peak, temperature,
                           True, FEW, SHIFT, CHUNK)  # fmt: skip
    return low.to(tl.int32)


@triton.jit
def _of_few(
    logits, names, counts, blocks, low, k, p, floor, total, peak, temperature, seed, position,
    SHIFT: tl.constexpr, PER_BLOCK: tl.constexpr, BLOCK: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Gumbel-max over those of the collected candidates that the threshold leaves."""
    index = tl.arange(0, CANDIDATES)
    block = tl.zeros_like(index)  # of each candidate, and where the block's begin
    first = tl.zeros_like(index)
    end = low.to(tl.int32) * 0
    for one in range(0, blocks):
        end += tl.load(counts + one)
        block += (index >= end).to(tl.int32)
        first = tl.where(index >= end, end, first)
    inside = index < end
    at = block * PER_BLOCK + index - first
    value = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
    ids = block * BLOCK + tl.load(names + at, mask=inside, other=0).to(tl.int32)
    x = _scaled(value, peak, temperature)
    keys = tl.where(inside, sortable(value) >> SHIFT, _LOWEST)
    weights = tl.exp(x)
    key = _threshold(keys, weights, logits, 0, low, k, p, total, peak, temperature, True, SHIFT,
                     CANDIDATES)  # fmt: skip
    kept = inside & (keys >= key) & (x >= floor)
    score = tl.where(kept, x + gumbel_at(seed, position, ids), float("-inf"))
    return token_of(tl.max(pack(score, ids), axis=0))


@triton.jit
def _kept_score(logits, word, key, floor, peak, temperature, SHIFT: tl.constexpr):
    x = _scaled(logits, peak, temperature)
    kept = ((sortable(logits) >> SHIFT) >= key) & (x >= floor)
    return tl.where(kept, x + gumbel(word), float("-inf"))


@triton.jit
def _of_all(
    row, vocab, low, k, p, floor, total, peak, temperature, seed, position, SHIFT: tl.constexpr,
    CHUNK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Gumbel-max over what the threshold leaves of the whole row."""
    key = _threshold(low, low, row, vocab, low, k, p, total, peak, temperature, False, SHIFT, CHUNK)
    best = tl.full((), -(2**63), tl.int64)
    for first in range(0, vocab, LANES):
        l0, l1, l2, l3, counters = load_lanes(row, first, vocab, LANES)
        w0, w1, w2, w3 = words(seed, position, counters)
        l0 = _kept_score(l0, w0, key, floor, peak, temperature, SHIFT)
        l1 = _kept_score(l1, w1, key, floor, peak, temperature, SHIFT)
        l2 = _kept_score(l2, w2, key, floor, peak, temperature, SHIFT)
        l3 = _kept_score(l3, w3, key, floor, peak, temperature, SHIFT)
        best = tl.maximum(best, best_of_lanes(l0, l1, l2, l3, counters))
    return token_of(best)


@triton.jit
def _lower_bound(maxima, total, peak, temperature, k, p, min_p, vocab, blocks):
    """A logit that no threshold of the row lies below; -inf if nothing is known.

    top-k: k blocks have a maximum from here on. top-p: what lies below weighs less than 1 - p of
    the row even if it is all of the vocabulary. min-p: its floor. Less a margin for rounding.
    """
    rank = tl.sum((maxima[None, :] >= maxima[:, None]).to(tl.int32), axis=1)
    by_k = tl.max(tl.where(rank >= k, maxima, float("-inf")), axis=0)
    weight = tl.maximum((1.0 - p) * total / vocab, min_p)
    by_p = peak + temperature * (tl.log(weight) - 0.01) - 1e-5 * tl.abs(peak)
    return tl.where(k > blocks, float("-inf"), tl.where(k > 0, by_k, by_p))


@triton.jit
def _statistics(
    row, temperature, top_k, top_p, min_p, peaks, sums, vocab, blocks, BLOCKS: tl.constexpr
):  # fmt: skip
    """(peak, weight of the whole row, lower bound of the threshold, k) of a row."""
    at = row * blocks + tl.arange(0, BLOCKS)
    inside = tl.arange(0, BLOCKS) < blocks
    maxima = tl.load(peaks + at, mask=inside, other=float("-inf"))
    weights = tl.load(sums + at, mask=inside, other=0.0)
    peak = tl.max(maxima, axis=0)
    total = tl.sum(weights * tl.exp((maxima - peak) / temperature), axis=0)
    k, p, least = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    k = tl.where(k < vocab, k, 0)
    bound = _lower_bound(maxima, total, peak, temperature, k, p, least, vocab, blocks)
    return peak, total, bound, k


@triton.jit
def collect(
    logits, temperatures, top_k, top_p, min_p, peaks, sums, candidates, names, counts, stride,
    vocab, blocks, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, PER_BLOCK: tl.constexpr,
    GREEDY: tl.constexpr,
):  # fmt: skip
    """Program (row, block) copies the block's candidates, and in `names` their ids less the first
    of the block, in order. Leaves how many there are, also where that is more than PER_BLOCK.
    """
    row = tl.program_id(0)
    block = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    if is_truncated(temperature, top_k + row, top_p + row, min_p + row, vocab, GREEDY):
        _, _, bound, _ = _statistics(row, temperature, top_k, top_p, min_p, peaks, sums, vocab,
                                     blocks, BLOCKS)  # fmt: skip
        at = row * blocks + block
        size = row * 0
        if tl.load(peaks + at) >= bound:
            name = tl.arange(0, BLOCK)
            index = block * BLOCK + name
            whole = logits + row.to(tl.int64) * stride
            value = tl.load(whole + index, mask=index < vocab, other=float("-inf"))
            found = (value.to(tl.float32) >= bound) & (index < vocab)
            nth = tl.cumsum(found.to(tl.int32), axis=0) - 1
            target = at * PER_BLOCK + nth
            tl.store(candidates + target, value, mask=found & (nth < PER_BLOCK))
            tl.store(names + target, name.to(tl.int16), mask=found & (nth < PER_BLOCK))
            size = tl.sum(found.to(tl.int32), axis=0)
        tl.store(counts + at, size)


@triton.jit
def choose(
    logits, temperatures, top_k, top_p, min_p, seeds, positions, peaks, sums, candidates, names,
    counts, drawn, last_token, slots, stride, vocab, blocks, BLOCKS: tl.constexpr,
    PER_BLOCK: tl.constexpr, CANDIDATES: tl.constexpr, CHUNK: tl.constexpr, LANES: tl.constexpr,
    SHIFT: tl.constexpr, GREEDY: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """One program per row, after collect(); does nothing for rows without restriction."""
    row = tl.program_id(0)
    temperature = tl.load(temperatures + row)
    if is_truncated(temperature, top_k + row, top_p + row, min_p + row, vocab, GREEDY):
        peak, total, bound, k = _statistics(row, temperature, top_k, top_p, min_p, peaks, sums,
                                            vocab, blocks, BLOCKS)  # fmt: skip
        token = row * 0 - 1
        if tl.abs(peak) < float("inf"):
            p, floor = tl.load(top_p + row), tl.log(tl.load(min_p + row))
            seed, position = tl.load(seeds + row), tl.load(positions + row)
            low = (sortable(bound) >> SHIFT).to(tl.int64)
            block = tl.arange(0, BLOCKS)
            mine = counts + row * blocks
            found = tl.load(mine + block, mask=block < blocks, other=0)
            if (tl.max(found, axis=0) <= PER_BLOCK) & (tl.sum(found, axis=0) <= CANDIDATES):
                first = row * blocks * PER_BLOCK
                token = _of_few(candidates + first, names + first, mine, blocks, low, k, p, floor,
                                total, peak, temperature, seed, position, SHIFT, PER_BLOCK, LANES,
                                CANDIDATES)  # fmt: skip
            else:
                whole = logits + row.to(tl.int64) * stride
                token = _of_all(whole, vocab, low, k, p, floor, total, peak, temperature, seed,
                                position, SHIFT, CHUNK, LANES)  # fmt: skip
        settle(row, token, drawn, last_token, slots, KEEP)
