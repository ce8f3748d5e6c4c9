"""The sampling noise of kernels/noise.py inside Triton kernels: the same words, the same uniforms.

Functions for other kernels to call; needs triton. Knows seeds, positions and vocabulary ids only.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from pipeinfer.kernels.interpreted import INTERPRETED

# Words and uniforms are bit for bit those of noise.py. The Gumbel variates are made with the
# device's quick logarithm and differ from noise.py by at most 6e-6: less than the rounding of a
# score of 64 or more, so a different token needs two scores that close.


@triton.jit
def _product(word, FACTOR: tl.constexpr):
    """(high, low) word of a product: one wide multiplication."""
    product = word.to(tl.uint64) * FACTOR
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def words(seed, position, counters):
    """Four uint32 tensors: the words of ids 4 c, 4 c + 1, 4 c + 2, 4 c + 3 for each counter c.

    seed int64 (the bits of the uint64) and position int64 or int32, scalars.
    """
    position = position.to(tl.int64)
    c0 = counters.to(tl.uint32)
    c1 = (position & 0xFFFFFFFF).to(tl.uint32)
    c2 = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c3 = c2 * 0
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(10):
        high, low = _product(c0, 0xD2511F53)
        other_high, other_low = _product(c2, 0xCD9E8D57)
        c0, c1 = other_high ^ c1 ^ k0, other_low
        c2, c3 = high ^ c3 ^ k1, low
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def uniform(word):
    """float32 in (0, 1) of uint32 words, exactly as noise.py defines it."""
    v = word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    return tl.minimum(v, 0.9999999403953552)


@triton.jit
def _log2(x):
    """The device's quick logarithm of normal numbers: absolute error 2^-22 near 1."""
    if INTERPRETED:
        return tl.log2(x)
    else:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def gumbel(word):
    """Standard Gumbel variates, float32, of uint32 words: -log(-log1p(-uniform))."""
    v = uniform(word)
    # -log2(1 - v), by its series where 1 - v would lose the bits of v. All in powers of two, which
    # is what the device computes: the natural logarithm's factor comes in once, at the end.
    series = v * 0.36067376022224085 + 0.4808983469629878
    series = v * series + 0.7213475204444817
    series = v * series + 1.4426950408889634
    exponential = tl.where(v < 0.03125, v * series, -_log2(1.0 - v))
    return _log2(exponential) * -0.6931471805599453 + 0.36651292058166435


@triton.jit
def gumbel_at(seed, position, ids):
    """The noise of single ids; four times the work of `words` for whole runs of ids."""
    w0, w1, w2, w3 = words(seed, position, ids // 4)
    lane = ids % 4
    low = tl.where(lane == 0, w0, w1)
    high = tl.where(lane == 2, w2, w3)
    return gumbel(tl.where(lane < 2, low, high))
