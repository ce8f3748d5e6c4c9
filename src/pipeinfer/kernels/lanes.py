"""A block of one row's logits inside a Triton kernel, as four lanes: what noise is made for.

Functions for other kernels to call; needs triton. Knows ids and scores, no parameters.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

# Lane l of counter c is id 4 c + l, because one call of the generator serves four ids.
# A packed int64: the score in the high word, sortable; in the low one the id's 31 bits, inverted.


@triton.jit
def load_lanes(row, first, vocab, BLOCK: tl.constexpr):
    """float32 logits of ids from `first` on as four lanes, and their counters, id / 4."""
    # Four logits per thread at a time, because that many share a counter: a thread then makes the
    # noise of what it loaded, and nothing travels through shared memory.
    index = first + tl.max_contiguous(tl.arange(0, BLOCK), 4)
    flat = tl.load(row + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
    even, odd = tl.split(tl.reshape(flat, (BLOCK // 4, 2, 2)))
    l0, l2 = tl.split(even)
    l1, l3 = tl.split(odd)
    return l0, l1, l2, l3, first // 4 + tl.arange(0, BLOCK // 4)


@triton.jit
def load_share(row, first, skipped, start, count, BLOCK: tl.constexpr):
    """As load_lanes of a row that has ids start + skipped .. start + skipped + count - 1 only;

    `start` is a multiple of 4, `skipped` less than 4, and `first` counts from `start`.
    """
    index = first - skipped + tl.max_contiguous(tl.arange(0, BLOCK), 4)
    there = (index >= 0) & (index < count)
    flat = tl.load(row + index, mask=there, other=float("-inf")).to(tl.float32)
    even, odd = tl.split(tl.reshape(flat, (BLOCK // 4, 2, 2)))
    l0, l2 = tl.split(even)
    l1, l3 = tl.split(odd)
    return l0, l1, l2, l3, (start + first) // 4 + tl.arange(0, BLOCK // 4)


@triton.jit
def sortable(values):
    """int32 that sorts as the float32 `values` do; both zeros are one."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def pack(score, token):
    """int64 whose largest is the best score, and of equals the lowest token."""
    return (sortable(score).to(tl.int64) << 32) | (token ^ 0x7FFFFFFF).to(tl.int64)


@triton.jit
def token_of(packed):
    return (packed & 0x7FFFFFFF).to(tl.int32) ^ 0x7FFFFFFF


@triton.jit
def score_of(packed):
    bits = (packed >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _larger(a, a_lane, b, b_lane):
    """Elementwise the larger and its lane; of equals the first."""
    return tl.where(b > a, b, a), tl.where(b > a, b_lane, a_lane)


@triton.jit
def best_of_lanes(v0, v1, v2, v3, counters):
    """The best score of all lanes with its id, packed."""
    low, low_lane = _larger(v0, 0, v1, 1)
    high, high_lane = _larger(v2, 2, v3, 3)
    score, lane = _larger(low, low_lane, high, high_lane)
    return tl.max(pack(score, counters * 4 + lane), axis=0)


@triton.jit
def peak_of_lanes(l0, l1, l2, l3):
    """The largest logit; infinity if there is a NaN."""
    low = tl.maximum(l0, l1, propagate_nan=tl.PropagateNan.ALL)
    high = tl.maximum(l2, l3, propagate_nan=tl.PropagateNan.ALL)
    peaks = tl.maximum(low, high, propagate_nan=tl.PropagateNan.ALL)
    return tl.max(tl.where(peaks != peaks, float("inf"), peaks), axis=0)
