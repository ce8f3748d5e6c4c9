"""Functions that several Triton kernels share: launch options, prefetch, e4m3, logits by fours, dot
products.

Needs triton. Knows no layer, no request, and no layout of weights.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from pipeinfer.kernels import formats
from pipeinfer.kernels.formats import E4M3

FIRST_PDL_CAPABILITY = (9, 0)  # Hopper
L2_LINE_ELEMENTS = tl.constexpr(64)  # elements of 2 bytes in a line of the L2 cache
# Decided when triton is imported. The interpreter knows no instruction of a GPU, so kernels that
# name one have another way there.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

SCALE_BLOCK_CE = tl.constexpr(formats.SCALE_BLOCK)  # as a constant of kernels
# The scales of a GEMM's weights: none, one a row, one a block of SCALE_BLOCK x SCALE_BLOCK, or
# those of MXFP4: e2m1, two columns a byte, and an exponent for each MXFP4_GROUP columns of a row.
NO_SCALES = tl.constexpr(0)
ROW_SCALES = tl.constexpr(1)
BLOCK_SCALES = tl.constexpr(2)
MXFP4_SCALES = tl.constexpr(3)
MXFP4_GROUP = tl.constexpr(32)


@lru_cache
def pdl_options(device: torch.device) -> dict[str, bool]:
    """Returns further arguments of a launch on `device`, for programmatic dependent launch (PDL).

    With PDL a kernel starts while the kernel before it still ends, which saves the time between two
    short kernels of a graph. USE_PDL: the kernel waits by itself, before it reads results of the
    kernel before. launch_pdl: Triton's own option, on GPUs that have PDL. Source: CUDA C++
    Programming Guide, "Programmatic Dependent Launch and Synchronization".
    """
    cuda = device.type == "cuda"
    if cuda and torch.cuda.get_device_capability(device) >= FIRST_PDL_CAPABILITY:
        return {"USE_PDL": True, "launch_pdl": True}
    return {"USE_PDL": False}


@triton.jit
def prefetch_l2(at):
    """Fetches the lines of the L2 cache in which the addresses `at` lie. On GPUs only."""
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at],
                              dtype=tl.int32, is_pure=False, pack=1)  # fmt: skip


# e4m3 inside of kernels: by the GPU's own conversions, or bit by bit in Triton's interpreter, which
# rounds ties the wrong way and turns NaN into a number. So kernels see pages as bytes there
# (`as_kernel_arg`), and do what a GPU of capability 8.9 does.


def as_kernel_arg(cache: torch.Tensor) -> torch.Tensor:
    """Returns `cache` in the form of a kernel's argument: e4m3 on the CPU as bytes, other tensors
    unchanged.
    """
    bits = cache.dtype == E4M3 and cache.device.type == "cpu"
    return cache.view(torch.uint8) if bits else cache


def as_int16_pairs(cache: torch.Tensor) -> torch.Tensor:
    """Returns `cache` with pairs of e4m3 neighbours as one int16, for `e4m3_pairs_to_fp16`; other
    dtypes unchanged. Values that are read by 16 bits can be transposed on the way out of shared
    memory.
    """
    return cache.view(torch.int16) if cache.dtype == E4M3 else cache


@triton.jit
def scale_to_e4m3(values, scale, kind: tl.constexpr):
    """float32 `values` over `scale`, as elements of `kind`: e4m3, or bytes of e4m3."""
    return to_e4m3(tl.math.div_rn(values, scale), kind)


@triton.jit
def to_e4m3(values, kind: tl.constexpr):
    """Returns float32 `values` as elements of kind; values beyond the largest number become the
    largest number.
    """
    if kind != tl.float8e4nv:
        values = tl.where(values > 448.0, 448.0, values)  # comparisons leave NaN as it is
        values = tl.where(values < -448.0, -448.0, values)
        return _e4m3_bits(values)
    return values.to(kind)  # the GPU's own conversion is bounded


@triton.jit
def _e4m3_bits(values):
    """float32 of at most 448 as bytes: the nearest e4m3, ties to even."""
    bits = values.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    large = (bits & 0x7FFFFFFF).to(tl.int32)
    # Below 2^-6 numbers lie 2^-9 apart: 1.5 * 2^14 is so large that adding it rounds to those.
    small = (large.to(tl.float32, bitcast=True) + 24576.0).to(tl.int32, bitcast=True) & 0x3FFFFF
    rounded = (large + 0x7FFFF + ((large >> 20) & 1)) >> 20
    magnitude = tl.where(large < 0x3C800000, small, rounded - (120 << 3))
    magnitude = tl.where(values != values, 0x7F, magnitude)
    return (sign.to(tl.int32) | magnitude).to(tl.uint8)


@triton.jit
def from_e4m3(stored, kind: tl.constexpr):
    """Stored e4m3, or bytes of e4m3, as elements of `kind`, exactly; without scales."""
    if stored.dtype == tl.uint8:
        # As a half, the bits stand for a number 2^8 times too small.
        magnitude = (stored & 0x7F).to(tl.uint16)
        half = (((stored & 0x80).to(tl.uint16) << 8) | (magnitude << 7)).to(
            tl.float16, bitcast=True
        )
        wide = half.to(tl.float32) * 256.0
        stored = tl.where(magnitude == 0x7F, float("nan"), wide).to(kind)
    elif stored.dtype == tl.float8e4nv and kind == tl.bfloat16:
        # The direct way takes an instruction that a Hopper has for 16 values a cycle only.
        stored = stored.to(tl.float16).to(tl.float32).to(kind)
    elif stored.dtype == tl.float8e4nv:
        stored = stored.to(kind)
    return stored


@triton.jit
def e4m3_pairs_to_fp16(pairs):
    """Returns (first numbers, second numbers) as float16, of `pairs`, int16 that hold two of e4m3
    each.
    """
    if INTERPRETED:
        first = from_e4m3((pairs & 0xFF).to(tl.uint8), tl.float16)
        second = from_e4m3((pairs >> 8 & 0xFF).to(tl.uint8), tl.float16)
    else:
        # Two pairs at a time: the instruction takes two neighbours to two.
        first, second = tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $2, 0, 0x3120; mov.b32 {a, b}, t;"
            " cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
            "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return first, second


# Logits by fours ("quads"): quad c has ids 4 c .. 4 c + 3, because one call of the noise generator,
# with counter c, serves four ids. Tensor i of a quad's four has ids 4 c + i.
#
# A packed logit key is an int64: the score in the high word, as `ordered_bits`; in the low one the
# id's 31 bits, inverted.


@triton.jit
def load_quads(row, begin, vocab, BLOCK: tl.constexpr):
    """float32 logits of the ids from `begin` on as four tensors [BLOCK / 4], and their counters."""
    # Four logits per thread at a time, because that many share a counter: a thread then makes the
    # noise of what it loaded, and nothing travels through shared memory.
    index = begin + tl.max_contiguous(tl.arange(0, BLOCK), 4)
    flat = tl.load(row + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
    even, odd = tl.split(tl.reshape(flat, (BLOCK // 4, 2, 2)))
    l0, l2 = tl.split(even)
    l1, l3 = tl.split(odd)
    return l0, l1, l2, l3, begin // 4 + tl.arange(0, BLOCK // 4)


@triton.jit
def load_shard_quads(row, begin, num_skipped, start, count, BLOCK: tl.constexpr):
    """Loads logits as `load_quads` does, for a row that has only the ids of a shard of the
    vocabulary.

    The ids are start + num_skipped .. start + num_skipped + count - 1; `start` is a multiple of 4,
    `num_skipped` less than 4, and `begin` counts from `start`.
    """
    index = begin - num_skipped + tl.max_contiguous(tl.arange(0, BLOCK), 4)
    on_rank = (index >= 0) & (index < count)
    flat = tl.load(row + index, mask=on_rank, other=float("-inf")).to(tl.float32)
    even, odd = tl.split(tl.reshape(flat, (BLOCK // 4, 2, 2)))
    l0, l2 = tl.split(even)
    l1, l3 = tl.split(odd)
    return l0, l1, l2, l3, (start + begin) // 4 + tl.arange(0, BLOCK // 4)


@triton.jit
def ordered_bits(values):
    """int32 that sorts as the float32 `values` do; both zeros are one."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def pack_logit_key(score, token):
    """int64 whose largest is the best score, and of equals the lowest token."""
    return (ordered_bits(score).to(tl.int64) << 32) | (token ^ 0x7FFFFFFF).to(tl.int64)


@triton.jit
def key_token(packed):
    return (packed & 0x7FFFFFFF).to(tl.int32) ^ 0x7FFFFFFF


@triton.jit
def key_score(packed):
    bits = (packed >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _larger(a, a_index, b, b_index):
    """Elementwise the larger and its index; of equals the first."""
    return tl.where(b > a, b, a), tl.where(b > a, b_index, a_index)


@triton.jit
def best_quad_key(v0, v1, v2, v3, counters):
    """The packed key of the best score and its id."""
    low, low_index = _larger(v0, 0, v1, 1)
    high, high_index = _larger(v2, 2, v3, 3)
    score, index_in_quad = _larger(low, low_index, high, high_index)
    return tl.max(pack_logit_key(score, counters * 4 + index_in_quad), axis=0)


@triton.jit
def max_logit(l0, l1, l2, l3):
    """Returns the largest logit; infinity if there is a NaN."""
    low = tl.maximum(l0, l1, propagate_nan=tl.PropagateNan.ALL)
    high = tl.maximum(l2, l3, propagate_nan=tl.PropagateNan.ALL)
    peaks = tl.maximum(low, high, propagate_nan=tl.PropagateNan.ALL)
    return tl.max(tl.where(peaks != peaks, float("inf"), peaks), axis=0)


# One step of a GEMM a @ w.T, where w may have fewer bits than a: weights become a's dtype in
# registers, and their scales are float32. SWAP_AB: the transpose w @ a.T is computed, because
# tensor cores want 64 rows of the first operand.


@triton.jit
def zeros_accumulator(ROWS: tl.constexpr, COLUMNS: tl.constexpr, SWAP_AB: tl.constexpr):
    """Returns float32 [ROWS, COLUMNS], or its transpose if SWAP_AB."""
    if not SWAP_AB:
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
    else:
        total = tl.zeros((COLUMNS, ROWS), tl.float32)
    return total


@triton.jit
def dot_a_bt(a, w, total, SWAP_AB: tl.constexpr):
    """total + a @ w.T, or its transpose."""
    if not SWAP_AB:
        total = tl.dot(a, tl.trans(w), total, input_precision="ieee")
    else:
        total = tl.dot(w, tl.trans(a), total, input_precision="ieee")
    return total


@triton.jit
def dequantizing_dot(a, w, total, at, SWAP_AB: tl.constexpr, SCALES: tl.constexpr, first=0):
    """total + a @ w.T of rows a [ROWS, DEPTH] and weights w [COLUMNS, DEPTH], or its transpose.

    - SCALES: BLOCK_SCALES: `at` is the address of the scale, or addresses that broadcast to total.
      MXFP4_SCALES: a has 16 bits, w is [COLUMNS, DEPTH / 2], and `at` are the addresses [COLUMNS]
      of int32 with four exponents each, of which `first` is that of the first column. Others:
      scales are applied after the last step
    """
    if SCALES == MXFP4_SCALES:
        total = _mxfp4_dot(a, w, tl.load(at), first, total, SWAP_AB)
    elif SCALES == BLOCK_SCALES:
        part = dot_a_bt(a, from_e4m3(w, a.dtype), tl.zeros_like(total), SWAP_AB)
        total += part * tl.load(at)
    else:
        total = dot_a_bt(a, from_e4m3(w, a.dtype), total, SWAP_AB)
    return total


@triton.jit
def fp8_dot(a, w, SWAP_AB: tl.constexpr):
    """float32 a [ROWS, DEPTH] @ w [COLUMNS, DEPTH].T, both e4m3, or its transpose; without scales.
    Tensor cores add with 14 bits or more."""
    if a.dtype == tl.uint8:  # in the interpreter
        a, w = from_e4m3(a, tl.float32), from_e4m3(w, tl.float32)
    return dot_a_bt(a, w, zeros_accumulator(a.shape[0], w.shape[0], SWAP_AB), SWAP_AB)


@triton.jit
def _mxfp4_dot(a, w, words, first, total, SWAP_AB: tl.constexpr):
    """Exact but for the sum, since two bits times a power of two is a number of 16 bits. Exponents
    that stand for NaN are not recognised."""
    kind: tl.constexpr = "bf16" if a.dtype == tl.bfloat16 else "fp16"
    group = first + tl.arange(0, 2 * w.shape[1] // MXFP4_GROUP)
    exponents = (words[:, None] >> (8 * group)[None, :]).to(tl.uint8)
    if not SWAP_AB:
        w = tl.trans(w)
        total = tl.dot_scaled(a, None, kind, w, exponents, "e2m1", total, fast_math=True)
    else:
        a = tl.trans(a)
        total = tl.dot_scaled(w, exponents, "e2m1", a, None, kind, total, fast_math=True)
    return total


@triton.jit
def broadcast_rows(vector, SWAP_AB: tl.constexpr):
    """A vector [ROWS] in the shape that broadcasts to an accumulator."""
    return vector[None, :] if SWAP_AB else vector[:, None]


@triton.jit
def broadcast_columns(vector, SWAP_AB: tl.constexpr):
    """A vector [COLUMNS] in the shape that broadcasts to an accumulator."""
    return vector[:, None] if SWAP_AB else vector[None, :]
