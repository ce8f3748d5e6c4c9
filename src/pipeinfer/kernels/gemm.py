"""GEMMs of few rows (small M) with weights of 16 bits, FP8 or 4 bits, and with FP8 block scales;
and the products of low-rank adapters.

A GEMM of few rows takes as long as its weights take to read. These kernels start reading while the
kernel before still ends, and save the kernel after a library's GEMM: SwiGLU, or the sum of a
split-K GEMM, which the following norm makes. Weights of 4 bits cost three instructions at most: the
bits of two weights become mantissas in one register, and lie where a tensor core wants them. GEMMs
of many rows are a library's business (weights of 4 bits are dequantized for it), except where
weights have a scale for each block of 128 x 128; source: https://arxiv.org/abs/2412.19437, 3.3.2.

Low-rank products of many adapters in one step are two kernels, shrink and expand (`LowRankGemm`;
layers/lora.py has the same for the host):

    low[t] = A[a] x[t]          [T, modules * rank], in parts of the depth (shrink)
    y[t] += B[a] low[t]         (expand)

a is the adapter slot of token t, read on the device. Once a step, tokens are sorted by adapter into
blocks of one adapter each, as those of experts are; a program has a block, and reads its adapter's
matrices once. Tokens without an adapter are in no block. Each token's sums are its own, whatever
other tokens there are.

Needs triton. Knows rows and weights, no layer and no file; formats.py has the layout of 4 bits,
tile_configs.py says which tiles, and where a library is the faster.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pipeinfer.kernels.formats import INT4_PER_WORD, INT4_TILE_K, SCALE_BLOCK, WORDS_PER_THREAD
from pipeinfer.kernels.interface import LowRankMatrices
from pipeinfer.kernels.moe import MoeAlignment, moe_align_block_size
from pipeinfer.kernels.tile_configs import GemmConfig, Int4GemmConfig
from pipeinfer.kernels.triton_support import (
    BLOCK_SCALES,
    L2_LINE_ELEMENTS,
    NO_SCALES,
    ROW_SCALES,
    SCALE_BLOCK_CE,
    dot_a_bt,
    pdl_options,
    prefetch_l2,
    zeros_accumulator,
)

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false


PREFETCHED_STEPS = 1  # steps of BLOCK_K whose weights are prefetched before the rows are there
LOW_TILE_ROWS = 64  # up to so many rows, tiles of block-scaled GEMMs are so high; else 128
GROUP_M = 8  # row blocks of a block-scaled GEMM that share columns of the weight in the L2 cache


@triton.jit
def _times_scales(total, by_row, by_column, SWAP_AB: tl.constexpr):
    """`total`, an accumulator, times the scales of rows and of columns."""
    if not SWAP_AB:
        total *= by_row[:, None] * by_column[None, :]
    else:
        total *= by_row[None, :] * by_column[:, None]
    return total


@triton.jit
def _small_m_kernel(
    x, x_scale, weight, scale, bias, out, rows, x_stride, N: tl.constexpr,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr, SWIGLU: tl.constexpr, HAS_BIAS: tl.constexpr, SCALES: tl.constexpr,
    PREFETCH_STEPS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program (columns, split of K, rows): one tile of out [SPLIT_K, rows, N].

    - SWIGLU: weight is [2 N, K], and out = silu(x @ first.T) * (x @ second.T)
    - SCALES: of x and weight in FP8. ROW_SCALES: x_scale [rows], scale [N]; BLOCK_SCALES: x_scale
      [rows, K / 128], scale [N / 128, K / 128]
    """
    share: tl.constexpr = K // SPLIT_K
    swap_ab: tl.constexpr = BLOCK_M < 64
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    depth = split * share + tl.arange(0, BLOCK_K)
    right = weight + column.to(tl.int64)[:, None] * K + depth[None, :]
    if USE_PDL:
        lines = tl.arange(0, PREFETCH_STEPS * BLOCK_K // L2_LINE_ELEMENTS) * L2_LINE_ELEMENTS
        first = weight + column.to(tl.int64)[:, None] * K + split * share + lines[None, :]
        prefetch_l2(first)
        if SWIGLU:
            prefetch_l2(first + N * K)
        gdc_wait()  # for all that the kernel before it writes
        gdc_launch_dependents()
    left = x + row[:, None] * x_stride + depth[None, :]
    inside = row < rows
    real = inside[:, None]
    total = zeros_accumulator(BLOCK_M, BLOCK_N, swap_ab)
    gate = zeros_accumulator(BLOCK_M, BLOCK_N, swap_ab)
    for begin in range(0, share, BLOCK_K):
        w = tl.load(right + begin)
        a = tl.load(left + begin, mask=real, other=0.0)
        if SCALES == BLOCK_SCALES:
            part = dot_a_bt(a, w, zeros_accumulator(BLOCK_M, BLOCK_N, swap_ab), swap_ab)
            block = (split * share + begin) // SCALE_BLOCK_CE
            by_row = tl.load(x_scale + row * (K // SCALE_BLOCK_CE) + block, mask=inside, other=0.0)
            by_column = tl.load(scale + column // SCALE_BLOCK_CE * (K // SCALE_BLOCK_CE) + block)
            total += _times_scales(part, by_row, by_column, swap_ab)
        else:
            total = dot_a_bt(a, w, total, swap_ab)
        if SWIGLU:
            w = tl.load(right + begin + N * K)
            gate = dot_a_bt(a, w, gate, swap_ab)
    if SCALES == ROW_SCALES:
        by_row = tl.load(x_scale + row, mask=inside, other=0.0)
        total = _times_scales(total, by_row, tl.load(scale + column), swap_ab)
    if SWIGLU:
        total = total * tl.sigmoid(total) * gate
    if swap_ab:
        total = tl.trans(total)
    if HAS_BIAS:
        total += tl.where(split == 0, tl.load(bias + column).to(tl.float32), 0.0)[None, :]
    tl.store(out + (split * rows + row)[:, None] * N + column[None, :], total, mask=real)


class GemmScales(NamedTuple):
    """float32 scales of x [T, depth] and weight [width, depth] in e4m3.

    Attributes:
    - x: [T, 1], or [T, depth / 128] for blocks
    - weight: [width, 1], or [width / 128, depth / 128] for blocks, which must be whole
    """

    x: torch.Tensor
    weight: torch.Tensor


def _launch_small_m(
    config: GemmConfig,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    gated: bool = False,
    scales: GemmScales | None = None,
) -> None:
    (rows, depth), width = x.shape, out.shape[-1]
    grid = width // config.block_n, config.split_k, triton.cdiv(rows, config.block_m)
    kind = NO_SCALES
    if scales is not None:
        kind = ROW_SCALES if scales.x.shape[1] == 1 else BLOCK_SCALES
    x_scale, scale = scales or (None, None)
    _small_m_kernel[grid](
        x, x_scale, weight, scale, bias, out, rows, x.stride(0), N=width, K=depth,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        SPLIT_K=config.split_k, SWIGLU=gated, HAS_BIAS=bias is not None, SCALES=kind.value,
        PREFETCH_STEPS=min(PREFETCHED_STEPS, depth // (config.split_k * config.block_k)),
        num_warps=config.num_warps, num_stages=config.num_stages, **pdl_options(x.device),
    )  # fmt: skip


def small_m_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    config: GemmConfig,
    bias: torch.Tensor | None = None,
    scales: GemmScales | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Returns x @ weight.T + bias, [T, width] of `dtype`, by default x's dtype. float32 inside,
    rounded once.

    - x: [T, depth]; rows may be strided, all else is contiguous
    - weight: [width, depth]
    - config: split_k is 1; the tile divides the shape. Block scales want a block_k of at most 128
    - bias: [width]
    - scales: of x and weight in e4m3
    """
    out = torch.empty(x.shape[0], weight.shape[0], dtype=dtype or x.dtype, device=x.device)
    _launch_small_m(config, x, weight, bias, out, scales=scales)
    return out


def small_m_gemm_swiglu(x: torch.Tensor, weight: torch.Tensor, config: GemmConfig) -> torch.Tensor:
    """silu(x @ gate.T) * (x @ up.T): [T, width], of weight [2 width, depth], gate first.

    As `small_m_gemm` otherwise, without scales. Source: https://arxiv.org/abs/2002.05202.
    """
    out = x.new_empty(x.shape[0], weight.shape[0] // 2)
    _launch_small_m(config, x, weight, None, out, gated=True)
    return out


def split_k_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    config: GemmConfig,
    bias: torch.Tensor | None = None,
    scales: GemmScales | None = None,
) -> torch.Tensor:
    """Returns float32 [split_k, T, width], whose sum over the first dimension is x @ weight.T +
    bias.

    As `small_m_gemm` otherwise.
    """
    size = config.split_k, x.shape[0], weight.shape[0]
    out = torch.empty(size, dtype=torch.float32, device=x.device)
    _launch_small_m(config, x, weight, bias, out, scales=scales)
    return out


def gemm_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns the result of `small_m_gemm`, or the sum of the result of `split_k_gemm`, in plain
    torch: float32.
    """
    wide = None if bias is None else bias.float()
    return torch.nn.functional.linear(x.float(), weight.float(), wide)


def gemm_swiglu_reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`small_m_gemm_swiglu` in plain torch: float32."""
    gate, up = gemm_reference(x, weight).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@triton.jit
def _block_scaled_kernel(
    x, x_scale, weight, scale, bias, out, rows, row_blocks, N: tl.constexpr,
    K: tl.constexpr, BLOCK_M: tl.constexpr, SCALE_BLOCK: tl.constexpr, GROUP_M: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Computes one tile of out [rows, N]: BLOCK_M rows, and the columns of a scale block."""
    program = tl.program_id(0)
    column_blocks: tl.constexpr = N // SCALE_BLOCK
    band = program // (GROUP_M * column_blocks)
    height = tl.minimum(row_blocks - band * GROUP_M, GROUP_M)
    within = program % (GROUP_M * column_blocks)
    row = (band * GROUP_M + within % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    block = within // height
    column = block * SCALE_BLOCK + tl.arange(0, SCALE_BLOCK)
    depth = tl.arange(0, SCALE_BLOCK)
    real = row < rows
    parts: tl.constexpr = K // SCALE_BLOCK
    left = x + row.to(tl.int64)[:, None] * K + depth[None, :]
    right = weight + column.to(tl.int64)[None, :] * K + depth[:, None]
    total = tl.zeros((BLOCK_M, SCALE_BLOCK), tl.float32)
    for part in range(parts):
        a = tl.load(left + part * SCALE_BLOCK, mask=real[:, None], other=0.0)
        b = tl.load(right + part * SCALE_BLOCK)
        by_row = tl.load(x_scale + row * parts + part, mask=real, other=0.0)
        by_block = tl.load(scale + block * parts + part)
        total += tl.dot(a, b) * (by_row * by_block)[:, None]
    if HAS_BIAS:
        total += tl.load(bias + column).to(tl.float32)[None, :]
    at = out + row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=real[:, None])


def block_scaled_gemm(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns x @ weight.T + bias: [T, width] of `dtype`. All operands are contiguous.

    - x: e4m3 [T, depth]
    - x_scale: float32 [T, depth / 128]
    - weight: e4m3 [width, depth]
    - scale: float32 [width / 128, depth / 128]
    - bias: [width]

    Sums are float32; each 128 of the depth are scaled and added in order.
    """
    (rows, depth), width = x.shape, weight.shape[0]
    out = torch.empty(rows, width, dtype=dtype, device=x.device)
    block_m = SCALE_BLOCK if rows > LOW_TILE_ROWS else LOW_TILE_ROWS
    blocks = triton.cdiv(rows, block_m)
    if rows:
        _block_scaled_kernel[(blocks * (width // SCALE_BLOCK),)](
            x, x_scale, weight, scale, bias, out, rows, blocks, N=width, K=depth, BLOCK_M=block_m,
            SCALE_BLOCK=SCALE_BLOCK, GROUP_M=GROUP_M, HAS_BIAS=bias is not None,
            num_warps=8 if block_m > LOW_TILE_ROWS else 4, num_stages=3,
        )  # fmt: skip
    return out


def block_scaled_gemm_reference(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """`block_scaled_gemm` in plain torch: float32."""
    left = x.float() * x_scale.repeat_interleave(SCALE_BLOCK, 1)
    right = weight.float() * scale.repeat_interleave(SCALE_BLOCK, 0).repeat_interleave(
        SCALE_BLOCK, 1
    )
    return torch.nn.functional.linear(left, right, None if bias is None else bias.float())


_TILE_K = tl.constexpr(INT4_TILE_K)
_TILE_WORDS = tl.constexpr(INT4_TILE_K // INT4_PER_WORD)
_THREAD_WORDS = tl.constexpr(WORDS_PER_THREAD)
DEQUANTIZE_BLOCK_N = 32  # columns of the product that a program of `int4_dequantize` has


@triton.jit
def _integer_at(words, PLACE: tl.constexpr):
    """float32 of the numbers at PLACE of `words`. As the bits of a mantissa from P on they are
    2 ** (23 - P) too large, which a subtraction takes off exactly."""
    P: tl.constexpr = 4 * PLACE if PLACE < 5 else 4 * PLACE - 12
    if PLACE >= 5:
        words = words >> 12
    bits = (words & (15 << P)) | ((150 - P) << 23)
    return bits.to(tl.float32, bitcast=True) - 2.0 ** (23 - P)


@triton.jit
def _load_zeros_scales(scales_zeros, at, dtype: tl.constexpr, PAIRS: tl.constexpr):
    """Returns (zeros, scales) of scales_zeros [.., 2] at `at`, in the form of _dequantize_pair.

    float32; if PAIRS, int32 that hold a value twice. Integers made from mantissas are 128 too large
    in bfloat16, 1,024 in float16; so are the zeros then.
    """
    if PAIRS:
        both = tl.load(scales_zeros + at)
        if dtype == tl.bfloat16:
            zero = tl.inline_asm_elementwise(
                "{ .reg .b32 t, u; prmt.b32 t, $1, 0, 0x3232; mov.b32 u, 0x43004300;"
                " add.rn.bf16x2 $0, t, u; }",
                "=r,r", [both], dtype=tl.int32, is_pure=True, pack=1,
            )  # fmt: skip
        else:
            zero = tl.inline_asm_elementwise(
                "{ .reg .b32 t, u; prmt.b32 t, $1, 0, 0x3232; mov.b32 u, 0x64006400;"
                " add.rn.f16x2 $0, t, u; }",
                "=r,r", [both], dtype=tl.int32, is_pure=True, pack=1,
            )  # fmt: skip
        scale = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, 0x1010;", "=r,r", [both], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        scale = tl.load(scales_zeros + 2 * at).to(tl.float32)
        zero = tl.load(scales_zeros + 2 * at + 1).to(tl.float32)
    return zero, scale


@triton.jit
def _dequantize_pair(words, zero, scale, P: tl.constexpr, dtype: tl.constexpr, PAIRS: tl.constexpr):
    """Returns [.., 2] of dtype: (number - zero) * scale, of numbers P and P + 4 of each of
    `words`.
    """
    if PAIRS:
        shifted = words >> (4 * P)
        if dtype == tl.bfloat16:
            first, second = tl.inline_asm_elementwise(
                "{ .reg .b32 t; lop3.b32 t, $2, 0x000F000F, 0x43004300, 0xEA;"
                " sub.rn.bf16x2 t, t, $3; mul.rn.bf16x2 t, t, $4; mov.b32 {$0, $1}, t; }",
                "=h,=h,r,r,r", [shifted, zero, scale], dtype=(tl.bfloat16, tl.bfloat16),
                is_pure=True, pack=1,
            )  # fmt: skip
        else:
            first, second = tl.inline_asm_elementwise(
                "{ .reg .b32 t; lop3.b32 t, $2, 0x000F000F, 0x64006400, 0xEA;"
                " sub.rn.f16x2 t, t, $3; mul.rn.f16x2 t, t, $4; mov.b32 {$0, $1}, t; }",
                "=h,=h,r,r,r", [shifted, zero, scale], dtype=(tl.float16, tl.float16),
                is_pure=True, pack=1,
            )  # fmt: skip
    else:
        first = ((_integer_at(words, P) - zero) * scale).to(dtype)
        second = ((_integer_at(words, P + 4) - zero) * scale).to(dtype)
    return tl.join(first, second)


@triton.jit
def _group_zeros_scales(
    scales_zeros, column, k_tile, P: tl.constexpr, BLOCK_N: tl.constexpr, N: tl.constexpr,
    GROUP_SIZE: tl.constexpr, dtype: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Zeros and scales [BLOCK_N, _TILE_WORDS] of pair P of a tile's words."""
    first = k_tile * _TILE_K + P * (2 * _TILE_WORDS)
    if GROUP_SIZE >= 2 * _TILE_WORDS:
        zero, scale = _load_zeros_scales(
            scales_zeros, first // GROUP_SIZE * N + column, dtype, PAIRS
        )
        zero, scale = zero[:, None], scale[:, None]
    else:  # 16 columns: the upper half of a thread's words has the next group
        word = tl.arange(0, _TILE_WORDS)
        at = first // GROUP_SIZE + word % _THREAD_WORDS // 2
        zero, scale = _load_zeros_scales(
            scales_zeros, at[None, :] * N + column[:, None], dtype, PAIRS
        )
    zero = tl.broadcast_to(zero, (BLOCK_N, _TILE_WORDS))
    return zero, tl.broadcast_to(scale, (BLOCK_N, _TILE_WORDS))


@triton.jit
def _dequantize_tile(
    words, scales_zeros, column, k_tile, BLOCK_N: tl.constexpr, N: tl.constexpr,
    GROUP_SIZE: tl.constexpr, dtype: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Returns [BLOCK_N, _TILE_K] of dtype, of words [BLOCK_N, _TILE_WORDS]: one tile of each
    column.
    """
    zero, scale = _group_zeros_scales(
        scales_zeros, column, k_tile, 0, BLOCK_N, N, GROUP_SIZE, dtype, PAIRS
    )
    a = _dequantize_pair(words, zero, scale, 0, dtype, PAIRS)
    if GROUP_SIZE < _TILE_K:
        zero, scale = _group_zeros_scales(
            scales_zeros, column, k_tile, 1, BLOCK_N, N, GROUP_SIZE, dtype, PAIRS
        )
    b = _dequantize_pair(words, zero, scale, 1, dtype, PAIRS)
    if GROUP_SIZE < _TILE_K:
        zero, scale = _group_zeros_scales(
            scales_zeros, column, k_tile, 2, BLOCK_N, N, GROUP_SIZE, dtype, PAIRS
        )
    c = _dequantize_pair(words, zero, scale, 2, dtype, PAIRS)
    if GROUP_SIZE < _TILE_K:
        zero, scale = _group_zeros_scales(
            scales_zeros, column, k_tile, 3, BLOCK_N, N, GROUP_SIZE, dtype, PAIRS
        )
    d = _dequantize_pair(words, zero, scale, 3, dtype, PAIRS)
    # column, thread of four, its word, neighbour, pair's upper and lower bit
    all_four = tl.join(tl.join(a, c), tl.join(b, d))
    all_four = tl.reshape(all_four, (BLOCK_N, _TILE_WORDS // _THREAD_WORDS, _THREAD_WORDS, 2, 2, 2))
    return tl.reshape(tl.permute(all_four, (0, 4, 5, 2, 1, 3)), (BLOCK_N, _TILE_K))


@triton.jit
def _int4_small_m_kernel(
    x, packed, scales_zeros, bias, parts, out, counters, rows, x_stride, N: tl.constexpr,
    K: tl.constexpr, GROUP_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    K_TILES: tl.constexpr, SPLIT_K: tl.constexpr, HAS_BIAS: tl.constexpr,
    MERGE_SPLITS: tl.constexpr, PAIRS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK_N columns, split of K, BLOCK_M rows): one tile of parts [SPLIT_K, rows, N].

    - MERGE_SPLITS: the last program of a tile, by `counters`, adds its parts in order into `out`
    - PAIRS: two weights are dequantized at once
    """
    tiles_per_split: tl.constexpr = K // _TILE_K // SPLIT_K
    dtype: tl.constexpr = x.dtype.element_ty
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = (row < rows)[:, None]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    right = packed + (split * tiles_per_split).to(tl.int64) * (N * _TILE_WORDS)
    right += column[:, None] * _TILE_WORDS
    left = x + row[:, None] * x_stride + split * (tiles_per_split * _TILE_K)
    if USE_PDL:
        prefetch_l2(right + tl.arange(0, K_TILES)[None, :] * (N * _TILE_WORDS))
        gdc_wait()  # for all that the kernel before it writes
        gdc_launch_dependents()
    right += tl.arange(0, _TILE_WORDS)[None, :]
    left += tl.arange(0, _TILE_K)[None, :]
    for first_tile in range(0, tiles_per_split, K_TILES):
        for inner in tl.static_range(K_TILES):
            k_tile = first_tile + inner
            words = tl.load(right + k_tile * (N * _TILE_WORDS))
            a = tl.load(left + k_tile * _TILE_K, mask=real, other=0.0)
            of_all = split * tiles_per_split + k_tile
            w = _dequantize_tile(
                words, scales_zeros, column, of_all, BLOCK_N, N, GROUP_SIZE, dtype, PAIRS
            )
            total = tl.dot(w, tl.trans(a), total, input_precision="ieee")
    total = tl.trans(total)
    if HAS_BIAS:
        total += tl.where(split == 0, tl.load(bias + column).to(tl.float32), 0.0)[None, :]
    to = row[:, None] * N + column[None, :]
    tl.store(parts + split * rows * N + to, total, mask=real)
    if MERGE_SPLITS:
        tl.debug_barrier()
        tile = counters + tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        before = tl.atomic_add(tile, 1, sem="acq_rel", scope="gpu")
        if before == SPLIT_K - 1:
            whole = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for part in tl.static_range(SPLIT_K):
                whole += tl.load(
                    parts + part * rows * N + to, mask=real, other=0.0, cache_modifier=".cg"
                )
            tl.store(out + to, whole, mask=real)
            tl.store(tile, 0)


@triton.jit
def _int4_dequantize_kernel(
    packed, scales_zeros, out, N: tl.constexpr, K: tl.constexpr, GROUP_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK_N columns of the product, tile of K)."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k_tile = tl.program_id(1)
    row = column.to(tl.int64)[:, None]
    words = tl.load(packed + (k_tile * N + row) * _TILE_WORDS + tl.arange(0, _TILE_WORDS)[None, :])
    w = _dequantize_tile(
        words, scales_zeros, column, k_tile, BLOCK_N, N, GROUP_SIZE, out.dtype.element_ty, PAIRS
    )
    tl.store(out + row * K + k_tile * _TILE_K + tl.arange(0, _TILE_K)[None, :], w)


def int4_small_m_gemm(
    x: torch.Tensor,
    packed: torch.Tensor,
    scales_zeros: torch.Tensor,
    config: Int4GemmConfig,
    bias: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns x @ weight.T + bias, for weights of four bits, which are rounded to x's dtype; sums
    are float32.

    - x: [T, depth]; rows may be strided
    - packed: int32 [tiles, width, 16], see formats.py
    - scales_zeros: [depth / group, width, 2] of x's dtype, scales and zeros; a group is whole
      tiles, or 16, 32 or 64 columns
    - config: block_n divides width, and split_k * k_tiles the tiles of the depth
    - bias: [width]
    - counters: int32, a zero for each tile of the result if there are splits; zeros again
      afterwards

    With counters the result is [1, T, width] of x's dtype; without them float32 [split_k, T,
    width], whose sum over the first dimension remains to be made.
    """
    (height, depth), width = x.shape, packed.shape[1]
    merged = counters is not None and config.split_k > 1
    parts = torch.empty(
        config.split_k, height, width, device=x.device,
        dtype=x.dtype if counters is not None and not merged else torch.float32,
    )  # fmt: skip
    out = torch.empty(1, height, width, dtype=x.dtype, device=x.device) if merged else parts
    if height:
        pairs = _pairs_at_once(x.dtype, x.device)
        grid = width // config.block_n, config.split_k, triton.cdiv(height, config.block_m)
        _int4_small_m_kernel[grid](
            x, packed, scales_zeros.view(torch.int32) if pairs else scales_zeros, bias, parts, out,
            counters, height, x.stride(0), N=width, K=depth,
            GROUP_SIZE=depth // scales_zeros.shape[0], BLOCK_M=config.block_m,
            BLOCK_N=config.block_n, K_TILES=config.k_tiles, SPLIT_K=config.split_k,
            HAS_BIAS=bias is not None, MERGE_SPLITS=merged, PAIRS=pairs,
            num_warps=config.num_warps, num_stages=config.num_stages, **pdl_options(x.device),
        )  # fmt: skip
    return out


def int4_dequantize(
    packed: torch.Tensor, scales_zeros: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The weights [width, depth] in `dtype`; arguments as for `int4_small_m_gemm`."""
    tiles, width, _ = packed.shape
    depth = tiles * INT4_TILE_K
    out = torch.empty(width, depth, dtype=dtype, device=packed.device)
    pairs = _pairs_at_once(dtype, packed.device)
    _int4_dequantize_kernel[(width // DEQUANTIZE_BLOCK_N, tiles)](
        packed, scales_zeros.view(torch.int32) if pairs else scales_zeros, out, N=width, K=depth,
        GROUP_SIZE=depth // scales_zeros.shape[0], BLOCK_N=DEQUANTIZE_BLOCK_N, PAIRS=pairs,
        num_warps=4,
    )  # fmt: skip
    return out


def _pairs_at_once(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether two weights are dequantized at once, by instructions that the interpreter lacks."""
    return device.type == "cuda" and dtype != torch.float32


BLOCK_TOKENS = 16  # tokens of a program: the fewest that tensor cores take
LARGE_RANK = 64  # above it blocks of A and B are smaller, so that they fit into shared memory
MIN_RANK = 16  # columns that tensor cores take at least; smaller ranks are padded
SPLIT_DEPTH = 1024  # depth of one part of shrink's sums
MAX_SPLITS = 16
MAX_MODULES = 3  # modules of one launch of expand


@triton.jit
def _block_rows(sorted_tokens, block, tokens, BLOCK_T: tl.constexpr):
    """Returns (the tokens of a block, whether each is one and not padding)."""
    row = tl.load(sorted_tokens + block * BLOCK_T + tl.arange(0, BLOCK_T))
    return row.to(tl.int64), row < tokens


@triton.jit(do_not_specialize=["tokens"])
def _shrink_kernel(
    x, a, sorted_tokens, block_adapters, num_padded, low, tokens, x_stride, DEPTH: tl.constexpr,
    RANK: tl.constexpr, MODULES: tl.constexpr, SPLITS: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program (block of tokens, module, part of the depth): low [SPLITS, T, MODULES * RANK]."""
    block, module, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if USE_PDL:
        gdc_wait()  # for x, and in the first layer for the blocks
        gdc_launch_dependents()
    if block * BLOCK_T >= tl.load(num_padded):
        return
    row, real = _block_rows(sorted_tokens, block, tokens, BLOCK_T)
    line = (tl.load(block_adapters + block) * MODULES + module).to(tl.int64) * RANK
    rank, depth = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_K)
    per_split: tl.constexpr = (DEPTH + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
    total = tl.zeros((BLOCK_T, BLOCK_R), dtype=tl.float32)
    for begin in range(0, per_split, BLOCK_K):
        at = split * per_split + begin + depth
        inside = at < DEPTH
        left = tl.load(
            x + row[:, None] * x_stride + at[None, :],
            mask=real[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        right = tl.load(
            a + (line + rank)[:, None] * DEPTH + at[None, :],
            mask=(rank < RANK)[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    place = (split * tokens + row)[:, None] * (MODULES * RANK) + module * RANK + rank[None, :]
    tl.store(low + place, total, mask=real[:, None] & (rank < RANK)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def _expand_kernel(
    low, b, sorted_tokens, block_adapters, num_padded, y, tokens, y_stride, first_module, first_0,
    end_0, first_1, end_1, first_2, end_2, WIDTH: tl.constexpr, RANK: tl.constexpr,
    MODULES: tl.constexpr, SPLITS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program (block of tokens, block of the columns of one module in y [T, WIDTH]). first_n,
    end_n: columns of module first_module + n."""
    block, part = tl.program_id(0), tl.program_id(1)
    # All programs of shrink waited for the blocks before they let this kernel start.
    if block * BLOCK_T >= tl.load(num_padded):
        return
    row, real = _block_rows(sorted_tokens, block, tokens, BLOCK_T)
    until_1 = tl.cdiv(end_0 - first_0, BLOCK_N)
    until_2 = until_1 + tl.cdiv(end_1 - first_1, BLOCK_N)
    here = (part >= until_1).to(tl.int32) + (part >= until_2).to(tl.int32)
    first = tl.where(here == 0, first_0, tl.where(here == 1, first_1, first_2))
    end = tl.where(here == 0, end_0, tl.where(here == 1, end_1, end_2))
    part -= tl.where(here == 0, 0, tl.where(here == 1, until_1, until_2))
    rank, column = tl.arange(0, BLOCK_R), first + part * BLOCK_N + tl.arange(0, BLOCK_N)
    there = column < end
    line = tl.load(block_adapters + block).to(tl.int64) * WIDTH + column
    # No kernel writes B: it comes while shrink still runs.
    right = tl.load(
        b + line[:, None] * RANK + rank[None, :],
        mask=there[:, None] & (rank < RANK)[None, :], other=0.0,
    )  # fmt: skip
    if USE_PDL:
        gdc_wait()  # for low and y
        gdc_launch_dependents()
    place = y + row[:, None] * y_stride + column[None, :]
    mask = real[:, None] & there[None, :]
    before = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    sums = tl.zeros((BLOCK_T, BLOCK_R), dtype=tl.float32)
    for split in tl.static_range(SPLITS):  # all parts are on their way at once
        at = (split * tokens + row)[:, None] * (MODULES * RANK)
        sums += tl.load(
            low + at + (first_module + here) * RANK + rank[None, :],
            mask=real[:, None] & (rank < RANK)[None, :], other=0.0,
        )  # fmt: skip
    rounded = sums.to(b.dtype.element_ty)
    added = tl.dot(rounded, tl.trans(right), input_precision="ieee")
    tl.store(place, (before + added).to(y.dtype.element_ty), mask=mask)


def block_sizes(rank: int) -> tuple[int, int]:
    """Returns (columns of x and A that shrink takes at a time, rows of B that expand takes)."""
    return (32, 32) if rank > LARGE_RANK else (128, 256)


class LowRankGemm:
    """Low-rank products on a GPU, see layers/lora.py's AddLowRank."""

    def __init__(self) -> None:
        self._blocks: MoeAlignment | None = None

    def begin_step(self, token_adapters: torch.Tensor, adapter_slots: int) -> None:
        """Sorts the tokens of a step by adapter, on the device; see AddLowRank."""
        self._blocks = moe_align_block_size(
            token_adapters[:, None], adapter_slots, BLOCK_TOKENS, first_expert=1
        )

    def __call__(self, x: torch.Tensor, matrices: LowRankMatrices, y: torch.Tensor) -> None:
        """Adds the products of the step's adapters to y; see AddLowRank."""
        a, b, parts = matrices
        (tokens, depth), (_, width, rank), modules = x.shape, b.shape, len(parts)
        if not tokens:
            return
        if self._blocks is None:
            raise RuntimeError("no step has begun")
        blocks = self._blocks.expert_ids.shape[0]
        listed = (
            self._blocks.sorted_pair_ids,
            self._blocks.expert_ids,
            self._blocks.num_padded_pairs,
        )
        splits = min(triton.cdiv(depth, SPLIT_DEPTH), MAX_SPLITS)
        low = torch.empty(splits, tokens, modules * rank, dtype=torch.float32, device=x.device)
        block_k, block_n = block_sizes(rank)
        shared = {
            "RANK": rank, "MODULES": modules, "SPLITS": splits, "BLOCK_T": BLOCK_TOKENS,
            "BLOCK_R": max(triton.next_power_of_2(rank), MIN_RANK), **pdl_options(x.device),
        }  # fmt: skip
        _shrink_kernel[(blocks, modules, splits)](
            x, a, *listed, low, tokens, x.stride(0), DEPTH=depth, BLOCK_K=block_k,
            num_stages=2 if rank > LARGE_RANK else 3, **shared,
        )  # fmt: skip
        for first in range(0, modules, MAX_MODULES):
            some = parts[first : first + MAX_MODULES]
            bounds = [bound for part in some for bound in (part.start, part.stop)]
            bounds += [0] * (2 * MAX_MODULES - len(bounds))
            columns = sum(triton.cdiv(part.stop - part.start, block_n) for part in some)
            _expand_kernel[(blocks, columns)](
                low, b, *listed, y, tokens, y.stride(0), first, *bounds, WIDTH=width,
                BLOCK_N=block_n, **shared,
            )  # fmt: skip
