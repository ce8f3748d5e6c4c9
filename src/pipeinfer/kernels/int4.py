"""Products with weights of four bits: of few rows by tensor cores, of many behind decoding.

A product of few rows takes as long as its weights take to read, if one costs three instructions
at most: the bits of two become mantissas in one register, and lie where a tensor core wants them.
Needs triton. Knows rows and weights, no layer and no file; int4_layout.py has the layout.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pipeinfer.kernels.early import pdl_options
from pipeinfer.kernels.int4_layout import INT4_PER_WORD, INT4_TILE_K, WORDS_PER_THREAD
from pipeinfer.kernels.int4_tiles import Int4GemmConfig
from pipeinfer.kernels.prefetch import prefetch_l2

COLUMNS = tl.constexpr(INT4_TILE_K)
WORDS = tl.constexpr(INT4_TILE_K // INT4_PER_WORD)  # of a run
BLOCKS = tl.constexpr(WORDS_PER_THREAD)  # words that a thread of a tensor core has side by side


@triton.jit
def _number(words, PLACE: tl.constexpr):
    """float32 of the numbers at PLACE of `words`. As the mantissa's bits from P on they are
    2 ** (23 - P) too much, which a subtraction takes off exactly."""
    P: tl.constexpr = 4 * PLACE if PLACE < 5 else 4 * PLACE - 12
    if PLACE >= 5:
        words = words >> 12
    bits = (words & (15 << P)) | ((150 - P) << 23)
    return bits.to(tl.float32, bitcast=True) - 2.0 ** (23 - P)


@triton.jit
def _ready(kept, at, kind: tl.constexpr, HALVES: tl.constexpr):
    """(zeros, scales) of kept [.., 2] at pair `at`, as _pair wants them: float32, or int32 of a
    value twice. The numbers have 128 too much as bfloat16, 1,024 as float16, the zeros so, too."""
    if HALVES:
        both = tl.load(kept + at)
        if kind == tl.bfloat16:
            low = tl.inline_asm_elementwise(
                "{ .reg .b32 t, u; prmt.b32 t, $1, 0, 0x3232; mov.b32 u, 0x43004300;"
                " add.rn.bf16x2 $0, t, u; }",
                "=r,r", [both], dtype=tl.int32, is_pure=True, pack=1,
            )  # fmt: skip
        else:
            low = tl.inline_asm_elementwise(
                "{ .reg .b32 t, u; prmt.b32 t, $1, 0, 0x3232; mov.b32 u, 0x64006400;"
                " add.rn.f16x2 $0, t, u; }",
                "=r,r", [both], dtype=tl.int32, is_pure=True, pack=1,
            )  # fmt: skip
        wide = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, 0x1010;", "=r,r", [both], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        wide = tl.load(kept + 2 * at).to(tl.float32)
        low = tl.load(kept + 2 * at + 1).to(tl.float32)
    return low, wide


@triton.jit
def _pair(words, low, wide, P: tl.constexpr, kind: tl.constexpr, HALVES: tl.constexpr):
    """[.., 2] of kind: (number - low) * wide, of numbers P and P + 4 of each of `words`."""
    if HALVES:
        shifted = words >> (4 * P)
        if kind == tl.bfloat16:
            first, second = tl.inline_asm_elementwise(
                "{ .reg .b32 t; lop3.b32 t, $2, 0x000F000F, 0x43004300, 0xEA;"
                " sub.rn.bf16x2 t, t, $3; mul.rn.bf16x2 t, t, $4; mov.b32 {$0, $1}, t; }",
                "=h,=h,r,r,r", [shifted, low, wide], dtype=(tl.bfloat16, tl.bfloat16),
                is_pure=True, pack=1,
            )  # fmt: skip
        else:
            first, second = tl.inline_asm_elementwise(
                "{ .reg .b32 t; lop3.b32 t, $2, 0x000F000F, 0x64006400, 0xEA;"
                " sub.rn.f16x2 t, t, $3; mul.rn.f16x2 t, t, $4; mov.b32 {$0, $1}, t; }",
                "=h,=h,r,r,r", [shifted, low, wide], dtype=(tl.float16, tl.float16),
                is_pure=True, pack=1,
            )  # fmt: skip
    else:
        first = ((_number(words, P) - low) * wide).to(kind)
        second = ((_number(words, P + 4) - low) * wide).to(kind)
    return tl.join(first, second)


@triton.jit
def _group(
    kept, column, run, P: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr,
    GROUP: tl.constexpr, kind: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Zeros and scales [COUNT, WORDS] of pair P of a run's words."""
    first = run * COLUMNS + P * (2 * WORDS)
    if GROUP >= 2 * WORDS:
        low, wide = _ready(kept, first // GROUP * WIDTH + column, kind, HALVES)
        low, wide = low[:, None], wide[:, None]
    else:  # 16 columns: the upper half of a thread's words has the next group
        word = tl.arange(0, WORDS)
        at = first // GROUP + word % BLOCKS // 2
        low, wide = _ready(kept, at[None, :] * WIDTH + column[:, None], kind, HALVES)
    return tl.broadcast_to(low, (COUNT, WORDS)), tl.broadcast_to(wide, (COUNT, WORDS))


@triton.jit
def _weights(
    words, kept, column, run, COUNT: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    kind: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """[COUNT, COLUMNS] of kind: those of words [COUNT, WORDS], one run of each column."""
    low, wide = _group(kept, column, run, 0, COUNT, WIDTH, GROUP, kind, HALVES)
    a = _pair(words, low, wide, 0, kind, HALVES)
    if GROUP < COLUMNS:
        low, wide = _group(kept, column, run, 1, COUNT, WIDTH, GROUP, kind, HALVES)
    b = _pair(words, low, wide, 1, kind, HALVES)
    if GROUP < COLUMNS:
        low, wide = _group(kept, column, run, 2, COUNT, WIDTH, GROUP, kind, HALVES)
    c = _pair(words, low, wide, 2, kind, HALVES)
    if GROUP < COLUMNS:
        low, wide = _group(kept, column, run, 3, COUNT, WIDTH, GROUP, kind, HALVES)
    d = _pair(words, low, wide, 3, kind, HALVES)
    # column, thread of four, its word, neighbour, pair's upper and lower bit
    all_four = tl.join(tl.join(a, c), tl.join(b, d))
    all_four = tl.reshape(all_four, (COUNT, WORDS // BLOCKS, BLOCKS, 2, 2, 2))
    return tl.reshape(tl.permute(all_four, (0, 4, 5, 2, 1, 3)), (COUNT, COLUMNS))


@triton.jit
def _few_rows(
    x, numbers, kept, bias, parts, out, arrived, rows, x_stride, WIDTH: tl.constexpr,
    DEPTH: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, COUNT: tl.constexpr,
    RUNS: tl.constexpr, SPLITS: tl.constexpr, BIASED: tl.constexpr, MERGED: tl.constexpr,
    HALVES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (COUNT columns, split of the depth, rows): one tile of parts [SPLITS, rows, WIDTH].

    MERGED: who comes last to a tile, by `arrived`, adds its parts in their order into `out`.
    """
    share: tl.constexpr = DEPTH // COLUMNS // SPLITS  # runs
    kind: tl.constexpr = x.dtype.element_ty
    column = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    split = tl.program_id(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    real = (row < rows)[:, None]
    total = tl.zeros((COUNT, ROWS), tl.float32)
    right = numbers + (split * share).to(tl.int64) * (WIDTH * WORDS) + column[:, None] * WORDS
    left = x + row[:, None] * x_stride + split * (share * COLUMNS)
    if EARLY:
        prefetch_l2(right + tl.arange(0, RUNS)[None, :] * (WIDTH * WORDS))
        gdc_wait()  # for all that the kernel before it writes
        gdc_launch_dependents()
    right += tl.arange(0, WORDS)[None, :]
    left += tl.arange(0, COLUMNS)[None, :]
    for begin in range(0, share, RUNS):
        for inner in tl.static_range(RUNS):
            run = begin + inner
            words = tl.load(right + run * (WIDTH * WORDS))
            a = tl.load(left + run * COLUMNS, mask=real, other=0.0)
            w = _weights(
                words, kept, column, split * share + run, COUNT, WIDTH, GROUP, kind, HALVES
            )
            total = tl.dot(w, tl.trans(a), total, input_precision="ieee")
    total = tl.trans(total)
    if BIASED:
        total += tl.where(split == 0, tl.load(bias + column).to(tl.float32), 0.0)[None, :]
    to = row[:, None] * WIDTH + column[None, :]
    tl.store(parts + split * rows * WIDTH + to, total, mask=real)
    if MERGED:
        tl.debug_barrier()
        tile = arrived + tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        before = tl.atomic_add(tile, 1, sem="acq_rel", scope="gpu")
        if before == SPLITS - 1:
            whole = tl.zeros((ROWS, COUNT), tl.float32)
            for part in tl.static_range(SPLITS):
                whole += tl.load(
                    parts + part * rows * WIDTH + to, mask=real, other=0.0, cache_modifier=".cg"
                )
            tl.store(out + to, whole, mask=real)
            tl.store(tile, 0)


@triton.jit
def _decode(
    numbers, kept, out, WIDTH: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    COUNT: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Program (COUNT columns of the product, run of the depth)."""
    column = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    run = tl.program_id(1)
    row = column.to(tl.int64)[:, None]
    words = tl.load(numbers + (run * WIDTH + row) * WORDS + tl.arange(0, WORDS)[None, :])
    w = _weights(words, kept, column, run, COUNT, WIDTH, GROUP, out.dtype.element_ty, HALVES)
    tl.store(out + row * DEPTH + run * COLUMNS + tl.arange(0, COLUMNS)[None, :], w)


def int4_small_m_gemm(
    x: torch.Tensor,
    packed: torch.Tensor,
    scales_zeros: torch.Tensor,
    config: Int4GemmConfig,
    bias: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product of x [T, depth] with the weights' transpose, plus bias [width].

    numbers: int32 [runs, width, 16]; kept: [depth / group, width, 2] of x's dtype, scales and
    zeros; groups are whole runs, or 16, 32 or 64 columns. The cut's columns divide width, and its
    splits * runs the runs of the depth. Rows of x may be strided. Weights are rounded to x's dtype;
    sums are float32.

    arrived: int32, a zero for each tile of a cut with splits, zeros again afterwards; the result is
    [1, T, width] of x's dtype. Without it [splits, T, width] float32, a sum to be made.
    """
    (height, depth), width = x.shape, packed.shape[1]
    merged = counters is not None and config.split_k > 1
    parts = torch.empty(
        config.split_k, height, width, device=x.device,
        dtype=x.dtype if counters is not None and not merged else torch.float32,
    )  # fmt: skip
    out = torch.empty(1, height, width, dtype=x.dtype, device=x.device) if merged else parts
    if height:
        halves = _pairs_at_once(x.dtype, x.device)
        _few_rows[(width // config.block_n, config.split_k, triton.cdiv(height, config.block_m))](
            x, packed, scales_zeros.view(torch.int32) if halves else scales_zeros, bias, parts, out, counters,
            height, x.stride(0), WIDTH=width, DEPTH=depth, GROUP=depth // scales_zeros.shape[0],
            ROWS=config.block_m, COUNT=config.block_n, RUNS=config.k_tiles, SPLITS=config.split_k,
            BIASED=bias is not None, MERGED=merged, HALVES=halves,
            num_warps=config.num_warps, num_stages=config.num_stages, **pdl_options(x.device),
        )  # fmt: skip
    return out


def int4_dequantize(
    packed: torch.Tensor, scales_zeros: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The weights as they are, [width, depth] of `dtype`; arguments as for `few_rows`."""
    (runs, width, _), columns = packed.shape, 32
    depth = runs * INT4_TILE_K
    out = torch.empty(width, depth, dtype=dtype, device=packed.device)
    halves = _pairs_at_once(dtype, packed.device)
    _decode[(width // columns, runs)](
        packed, scales_zeros.view(torch.int32) if halves else scales_zeros, out, WIDTH=width, DEPTH=depth,
        GROUP=depth // scales_zeros.shape[0], COUNT=columns, HALVES=halves, num_warps=4,
    )  # fmt: skip
    return out


def _pairs_at_once(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether two weights are made at once: by instructions that the interpreter has not."""
    return device.type == "cuda" and dtype != torch.float32
