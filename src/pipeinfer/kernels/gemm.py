"""GEMMs with a weight matrix: of few rows (small M), in 16 bits or FP8, and with FP8 block scales.

A GEMM of few rows takes as long as its weights take to read. These kernels start reading while the
kernel before still ends, and save the kernel after a library's GEMM: SwiGLU, or the sum of a
split-K GEMM, which the following norm makes. GEMMs of many rows are a library's business, except
where weights have a scale for each block of 128 x 128; source: https://arxiv.org/abs/2412.19437,
3.3.2. Needs triton. Knows rows and weights, no layer; tile_configs.py says which tiles, and where
a library is the faster.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pipeinfer.kernels.formats import SCALE_BLOCK
from pipeinfer.kernels.tile_configs import GemmConfig
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

    SWIGLU: weight is [2 N, K], and out = silu(x @ first.T) * (x @ second.T).
    SCALES: of x and weight in FP8. ROW_SCALES: x_scale [rows], scale [N]; BLOCK_SCALES: x_scale
        [rows, K / 128], scale [N / 128, K / 128].
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

    x: [T, 1], or [T, depth / 128] for blocks.
    weight: [width, 1], or [width / 128, depth / 128] for blocks, which must be whole.
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
    """x @ weight.T + bias: [T, width] of `dtype`, by default x's. float32 inside, rounded once.

    x: [T, depth]; rows may be strided, all else is contiguous.
    weight: [width, depth].
    config: split_k is 1; the tile divides the shape. Block scales want a block_k of at most 128.
    bias: [width].
    scales: of x and weight in e4m3.
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
    """float32 [split_k, T, width], whose sum over the first dimension is x @ weight.T + bias.

    As `small_m_gemm` otherwise.
    """
    size = config.split_k, x.shape[0], weight.shape[0]
    out = torch.empty(size, dtype=torch.float32, device=x.device)
    _launch_small_m(config, x, weight, bias, out, scales=scales)
    return out


def gemm_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`small_m_gemm`, or the sum of what `split_k_gemm` returns, in plain torch: float32."""
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
    """One tile of out [rows, N]: BLOCK_M rows, and the columns of a scale block."""
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
    """x @ weight.T + bias: [T, width] of `dtype`. All operands are contiguous.

    x: e4m3 [T, depth]; x_scale: float32 [T, depth / 128].
    weight: e4m3 [width, depth]; scale: float32 [width / 128, depth / 128].
    bias: [width].

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
