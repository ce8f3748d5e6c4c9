"""GEMMs with weights of four bits: of small M by tensor cores; for others the weights are
dequantized.

A GEMM of few rows takes as long as its weights take to read, if a weight costs three instructions
at
most: the bits of two weights become mantissas in one register, and lie where a tensor core wants
them. Needs triton. Knows rows and weights, no layer and no file; formats.py has the layout.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pipeinfer.kernels.formats import INT4_PER_WORD, INT4_TILE_K, WORDS_PER_THREAD
from pipeinfer.kernels.tile_configs import Int4GemmConfig
from pipeinfer.kernels.triton_support import pdl_options, prefetch_l2

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
    """(zeros, scales) of scales_zeros [.., 2] at `at`, as _dequantize_pair wants them.

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
    """[.., 2] of dtype: (number - zero) * scale, of numbers P and P + 4 of each of `words`."""
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
    """[BLOCK_N, _TILE_K] of dtype, of words [BLOCK_N, _TILE_WORDS]: one tile of each column."""
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

    MERGE_SPLITS: the last program of a tile, by `counters`, adds its parts in order into `out`.
    PAIRS: two weights are dequantized at once.
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
    """x @ weight.T + bias, for weights of four bits, which are rounded to x's dtype; sums are
    float32.

    x: [T, depth]; rows may be strided.
    packed: int32 [tiles, width, 16], see formats.py.
    scales_zeros: [depth / group, width, 2] of x's dtype, scales and zeros; a group is whole tiles,
        or 16, 32 or 64 columns.
    config: block_n divides width, and split_k * k_tiles the tiles of the depth.
    bias: [width].
    counters: int32, a zero for each tile of the result if there are splits; zeros again afterwards.

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
