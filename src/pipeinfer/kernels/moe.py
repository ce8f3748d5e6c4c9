"""The experts of a mixture (MoE) as two grouped GEMMs, with SwiGLU, biases and weights fused in.

Needs triton. Knows tokens, chosen experts and stacked weights; no router and no layer.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pipeinfer.kernels.moe_routing import MoeAlignment, moe_align_block_size
from pipeinfer.kernels.tile_configs import MoeConfig, MoeGemmConfig, moe_config
from pipeinfer.kernels.triton_support import (
    BLOCK_SCALES,
    L2_LINE_ELEMENTS,
    MXFP4_GROUP,
    MXFP4_SCALES,
    NO_SCALES,
    ROW_SCALES,
    SCALE_BLOCK_CE,
    as_kernel_arg,
    broadcast_columns,
    dequantizing_dot,
    pdl_options,
    prefetch_l2,
    zeros_accumulator,
)

# A pair is a token and one of its top_k experts.
#
# [tokens, hidden] -gate and up, SwiGLU-> [pairs, intermediate] -down, times weight-> [pairs,
# hidden] -sum over a token's pairs-> [tokens, hidden]
#
# GEMMs and SwiGLU are float32; the two intermediates are rounded to the tokens' dtype, and the sum
# is float32 again, in the router's order. No atomics: a token's result is always the same.


@dataclass(frozen=True)
class ClampedSwiglu:
    """SwiGLU with bounds and biases, as gpt-oss has it: (up + 1) * gate * sigmoid(slope * gate).

    slope: of the sigmoid.
    limit: gate is at most `limit`, and up between -limit and limit.
    gate_up_bias: [experts, 2 n], gate first.
    down_bias: [experts, hidden], added before the router's weight multiplies; None: another rank
        adds it.

    Source: https://arxiv.org/abs/2508.10925.
    """

    slope: float
    limit: float
    gate_up_bias: torch.Tensor
    down_bias: torch.Tensor | None


@triton.jit
def grouped_tile(row_blocks, column_blocks, GROUP_M: tl.constexpr):
    """(row block, column block) of this program. GROUP_M: row blocks that share columns in the L2
    cache."""
    program = tl.program_id(0)
    band = program // (GROUP_M * column_blocks)
    height = tl.minimum(row_blocks - band * GROUP_M, GROUP_M)
    within = program % (GROUP_M * column_blocks)
    return band * GROUP_M + within % height, within // height


@triton.jit
def _load_weights(
    at, column, depth, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile [BLOCK_N, BLOCK_K] of an expert's weights [N, K]; zeros outside."""
    if N % BLOCK_N == 0 and K % BLOCK_K == 0:
        w = tl.load(at)
    else:
        inside = (column < N)[:, None] & (depth < K)[None, :]
        w = tl.load(at, mask=inside, other=0.0)
    return w


@triton.jit
def _scale_pointers(
    scale, column, part, SCALES_PER_ROW: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    """The address of the first block scale for the columns of `part`; in MXFP4 the addresses
    [BLOCK_N] of their first four exponents.

    scale: of an expert. SCALES_PER_ROW: words of scales in a row.
    """
    if SCALES == MXFP4_SCALES:
        at = scale + tl.minimum(column, N - 1) * SCALES_PER_ROW
    else:
        at = scale + part * BLOCK_N // SCALE_BLOCK_CE * SCALES_PER_ROW
    return at


@triton.jit
def _load_rows(at, real, depth, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """A tile [BLOCK_M, BLOCK_K] of the rows that are real; zeros outside."""
    mask = real[:, None]
    if K % BLOCK_K != 0:
        mask = mask & (depth < K)[None, :]
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def _swiglu(gate, up, SLOPE: tl.constexpr, LIMIT: tl.constexpr):
    """silu(gate) * up where LIMIT is 0, else that of ClampedSwiglu. NaN stays NaN."""
    if LIMIT > 0:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, up)
        up = tl.where(up < -LIMIT, -LIMIT, up) + 1.0
    return gate * tl.sigmoid(gate * SLOPE) * up


@triton.jit
def _load_per_column(at, column, N: tl.constexpr, SWAP_AB: tl.constexpr):
    """float32 numbers, one a column, in the shape that broadcasts to an accumulator."""
    values = tl.load(at + column, mask=column < N, other=0.0)
    return broadcast_columns(values, SWAP_AB).to(tl.float32)


@triton.jit(do_not_specialize=["num_pairs", "row_blocks"])
def _gate_up_kernel(
    x, weight, scale, bias, out, sorted_pair_ids, expert_ids, num_padded_pairs, num_pairs, x_stride,
    row_blocks, TOP_K: tl.constexpr, HIDDEN: tl.constexpr, INTERMEDIATE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP_AB: tl.constexpr,
    SCALES: tl.constexpr, SCALES_PER_ROW: tl.constexpr, GROUP_M: tl.constexpr,
    HAS_BIAS: tl.constexpr, SLOPE: tl.constexpr, LIMIT: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """out[pair] = swiglu(x[token] @ gate.T, x[token] @ up.T) for one tile of pairs and columns.

    scale: ROW_SCALES: [experts, 2 INTERMEDIATE]; BLOCK_SCALES: [experts, 2 INTERMEDIATE / 128,
        SCALES_PER_ROW]; MXFP4_SCALES: int32 [experts, 2 INTERMEDIATE, SCALES_PER_ROW], four
        exponents each.
    bias: [experts, 2 INTERMEDIATE].
    """
    tl.static_assert(SCALES != BLOCK_SCALES or SCALE_BLOCK_CE % BLOCK_N == 0)
    tl.static_assert(
        (SCALES != BLOCK_SCALES and SCALES != MXFP4_SCALES) or SCALE_BLOCK_CE % BLOCK_K == 0
    )
    EACH: tl.constexpr = 2 if SCALES == MXFP4_SCALES else 1  # weights in an element
    block, part = grouped_tile(row_blocks, tl.cdiv(INTERMEDIATE, BLOCK_N), GROUP_M)
    if USE_PDL:
        gdc_wait()  # for tokens and their order
        gdc_launch_dependents()
    if block * BLOCK_M >= tl.load(num_padded_pairs):
        return
    pair = tl.load(sorted_pair_ids + block * BLOCK_M + tl.arange(0, BLOCK_M))
    real = pair < num_pairs
    column, depth = part * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    expert = tl.load(expert_ids + block).to(tl.int64)
    left = x + (pair // TOP_K).to(tl.int64)[:, None] * x_stride + depth[None, :]
    packed_k: tl.constexpr = HIDDEN // EACH
    element = tl.arange(0, BLOCK_K // EACH)
    right = (
        weight
        + expert * (2 * INTERMEDIATE * packed_k)
        + column[:, None] * packed_k
        + element[None, :]
    )
    shared: tl.constexpr = 1 if SCALES == MXFP4_SCALES else SCALE_BLOCK_CE  # rows with one scale
    blocks: tl.constexpr = INTERMEDIATE // shared * SCALES_PER_ROW  # of gate, and as many of up
    scales = scale + expert * (2 * blocks)
    scales = _scale_pointers(scales, column, part, SCALES_PER_ROW, INTERMEDIATE, BLOCK_N, SCALES)
    gate = zeros_accumulator(BLOCK_M, BLOCK_N, SWAP_AB)
    up = zeros_accumulator(BLOCK_M, BLOCK_N, SWAP_AB)
    for begin in range(0, HIDDEN, BLOCK_K):
        a = _load_rows(left + begin, real, begin + depth, HIDDEN, BLOCK_K)
        at, begun = right + begin // EACH, begin // EACH + element
        w = _load_weights(at, column, begun, INTERMEDIATE, packed_k, BLOCK_N, BLOCK_K // EACH)
        first = scales + begin // SCALE_BLOCK_CE
        group = begin // MXFP4_GROUP % (SCALE_BLOCK_CE // MXFP4_GROUP)
        gate = dequantizing_dot(a, w, gate, first, SWAP_AB, SCALES, group)
        w = _load_weights(
            at + INTERMEDIATE * packed_k, column, begun, INTERMEDIATE, packed_k, BLOCK_N,
            BLOCK_K // EACH,
        )  # fmt: skip
        up = dequantizing_dot(a, w, up, first + blocks, SWAP_AB, SCALES, group)
    if SCALES == ROW_SCALES:
        at = scale + expert * (2 * INTERMEDIATE)
        gate *= _load_per_column(at, column, INTERMEDIATE, SWAP_AB)
        up *= _load_per_column(at + INTERMEDIATE, column, INTERMEDIATE, SWAP_AB)
    if HAS_BIAS:
        at = bias + expert * (2 * INTERMEDIATE)
        gate += _load_per_column(at, column, INTERMEDIATE, SWAP_AB)
        up += _load_per_column(at + INTERMEDIATE, column, INTERMEDIATE, SWAP_AB)
    value = _swiglu(gate, up, SLOPE, LIMIT)
    if SWAP_AB:
        value = tl.trans(value)
    target = out + pair.to(tl.int64)[:, None] * INTERMEDIATE + column[None, :]
    tl.store(target, value, mask=real[:, None] & (column < INTERMEDIATE)[None, :])


@triton.jit
def prefetch_weights(
    weight, expert_ids, num_padded_pairs, block, column, num_local_experts, HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Prefetches the weights that a program of `_down_kernel` will read first.

    The alignment was written before the kernel before, whose programs all waited for it. Nothing
    depends on that: a wrong expert would only prefetch other weights, and never outside of them.
    """
    if block * BLOCK_M < tl.load(num_padded_pairs, volatile=True):
        expert = tl.load(expert_ids + block, volatile=True)
        expert = tl.minimum(tl.maximum(expert, 0), num_local_experts - 1).to(tl.int64)
        row = expert * HIDDEN + tl.minimum(column, HIDDEN - 1)
        line = tl.arange(0, (BLOCK_K + L2_LINE_ELEMENTS - 1) // L2_LINE_ELEMENTS) * L2_LINE_ELEMENTS
        prefetch_l2(
            weight + row[:, None] * INTERMEDIATE + tl.minimum(line, INTERMEDIATE - 1)[None, :]
        )


@triton.jit(do_not_specialize=["num_pairs", "row_blocks", "num_local_experts"])
def _down_kernel(
    hidden, weight, scale, bias, topk_weights, out, sorted_pair_ids, expert_ids, num_padded_pairs,
    num_pairs, row_blocks, num_local_experts, HIDDEN: tl.constexpr, INTERMEDIATE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP_AB: tl.constexpr,
    SCALES: tl.constexpr, SCALES_PER_ROW: tl.constexpr, GROUP_M: tl.constexpr,
    HAS_BIAS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """out[pair] = topk_weights[pair] * (hidden[pair] @ weight.T + bias), for one tile of pairs and
    columns.

    scale: as for _gate_up_kernel, with HIDDEN in place of 2 INTERMEDIATE.
    bias: [experts, HIDDEN].
    """
    tl.static_assert(SCALES != BLOCK_SCALES or SCALE_BLOCK_CE % BLOCK_N == 0)
    tl.static_assert(
        (SCALES != BLOCK_SCALES and SCALES != MXFP4_SCALES) or SCALE_BLOCK_CE % BLOCK_K == 0
    )
    EACH: tl.constexpr = 2 if SCALES == MXFP4_SCALES else 1  # weights in an element
    packed_k: tl.constexpr = INTERMEDIATE // EACH
    block, part = grouped_tile(row_blocks, tl.cdiv(HIDDEN, BLOCK_N), GROUP_M)
    column, depth = part * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    if USE_PDL:
        prefetch_weights(
            weight, expert_ids, num_padded_pairs, block, column, num_local_experts, HIDDEN,
            packed_k, BLOCK_M, BLOCK_K // EACH,
        )  # fmt: skip
        gdc_wait()  # for gate and up
        gdc_launch_dependents()
    if block * BLOCK_M >= tl.load(num_padded_pairs):
        return
    pair = tl.load(sorted_pair_ids + block * BLOCK_M + tl.arange(0, BLOCK_M))
    real = pair < num_pairs
    expert = tl.load(expert_ids + block).to(tl.int64)
    left = hidden + pair.to(tl.int64)[:, None] * INTERMEDIATE + depth[None, :]
    element = tl.arange(0, BLOCK_K // EACH)
    right = weight + expert * (HIDDEN * packed_k) + column[:, None] * packed_k + element[None, :]
    shared: tl.constexpr = 1 if SCALES == MXFP4_SCALES else SCALE_BLOCK_CE  # rows with one scale
    scales = scale + expert * (HIDDEN // shared * SCALES_PER_ROW)
    scales = _scale_pointers(scales, column, part, SCALES_PER_ROW, HIDDEN, BLOCK_N, SCALES)
    total = zeros_accumulator(BLOCK_M, BLOCK_N, SWAP_AB)
    for begin in range(0, INTERMEDIATE, BLOCK_K):
        a = _load_rows(left + begin, real, begin + depth, INTERMEDIATE, BLOCK_K)
        at, begun = right + begin // EACH, begin // EACH + element
        w = _load_weights(at, column, begun, HIDDEN, packed_k, BLOCK_N, BLOCK_K // EACH)
        first = scales + begin // SCALE_BLOCK_CE
        group = begin // MXFP4_GROUP % (SCALE_BLOCK_CE // MXFP4_GROUP)
        total = dequantizing_dot(a, w, total, first, SWAP_AB, SCALES, group)
    if SCALES == ROW_SCALES:
        total *= _load_per_column(scale + expert * HIDDEN, column, HIDDEN, SWAP_AB)
    if HAS_BIAS:
        total += _load_per_column(bias + expert * HIDDEN, column, HIDDEN, SWAP_AB)
    if SWAP_AB:
        total = tl.trans(total)
    total *= tl.load(topk_weights + pair, mask=real, other=0.0).to(tl.float32)[:, None]
    target = out + pair.to(tl.int64)[:, None] * HIDDEN + column[None, :]
    tl.store(target, total, mask=real[:, None] & (column < HIDDEN)[None, :])


@triton.jit(do_not_specialize=["first_expert", "num_local_experts"])
def _moe_sum_kernel(
    by_pair, topk_ids, out, first_expert, num_local_experts, TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, LOCAL_ONLY: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Adds up the rows of a token's pairs. LOCAL_ONLY: those of this rank's experts only."""
    if USE_PDL:
        gdc_wait()  # for the pairs
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        width = HIDDEN
        if LOCAL_ONLY:  # the rows of other pairs are not written
            expert = tl.load(topk_ids + pair)
            local = (expert >= first_expert) & (expert < first_expert + num_local_experts)
            width = tl.where(local, HIDDEN, 0)
        at = by_pair + pair * HIDDEN + column
        total += tl.load(at, mask=column < width, other=0.0).to(tl.float32)
    tl.store(out + token * HIDDEN + column, total, mask=column < HIDDEN)


def fused_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    config: MoeConfig | None = None,
    first_expert: int = 0,
    num_global_experts: int = 0,
    gate_up_scale: torch.Tensor | None = None,
    down_scale: torch.Tensor | None = None,
    clamped: ClampedSwiglu | None = None,
) -> torch.Tensor:
    """[T, hidden]: the weighted sum of each token's experts.

    x: [T, hidden]; rows may be strided.
    gate_up: [experts, 2 n, hidden], gate first, contiguous.
    down: [experts, hidden, n], contiguous.
    topk_weights: any float dtype [T, top_k].
    topk_ids: int [T, top_k].
    config: tiles; None: those of tile_configs.py.
    first_expert, num_global_experts: gate_up and down are those of experts first_expert and
        following, out of num_global_experts (0: of all). Pairs of others add nothing.
    gate_up_scale, down_scale: of weights in FP8, which become x's dtype, float32: [experts, rows,
        1], or of blocks of 128 x 128 [experts, rows / 128, columns / 128].
    clamped: another SwiGLU, with biases.

    In MXFP4, for x of 16 bits, weights are uint8 [experts, rows, columns / 2], the first of two in
    the lower bits, and scales are exponents, uint8 [experts, rows, groups]: one for each 32
        columns,
    filled up with others (no NaN) to a multiple of 4.

    Raises ValueError for scales that do not divide the weights.
    """
    by_pair = fused_experts_by_pair(
        x,
        gate_up,
        down,
        topk_weights,
        topk_ids,
        config,
        first_expert,
        num_global_experts,
        gate_up_scale,
        down_scale,
        clamped,
    )
    num_experts = down.shape[0]
    return moe_sum(
        by_pair,
        topk_ids.contiguous(),
        first_expert if num_experts < num_global_experts else None,
        num_experts,
    )


def fused_experts_by_pair(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    config: MoeConfig | None = None,
    first_expert: int = 0,
    num_global_experts: int = 0,
    gate_up_scale: torch.Tensor | None = None,
    down_scale: torch.Tensor | None = None,
    clamped: ClampedSwiglu | None = None,
) -> torch.Tensor:
    """[T, top_k, hidden], whose sum over the second dimension is `fused_experts` of the same
    arguments. Pairs of other ranks' experts are not written.
    """
    (tokens, hidden), num_experts, top_k = x.shape, down.shape[0], topk_ids.shape[1]
    if tokens == 0:
        return x.new_empty(0, top_k, hidden)
    config = config or moe_config(
        topk_ids.numel(), num_global_experts or num_experts, _weight_bits(gate_up)
    )
    alignment = moe_align_block_size(topk_ids, num_experts, config.block_m, first_expert)
    bias = None if clamped is None else clamped.down_bias
    middle = gate_up_gemm(x, gate_up, gate_up_scale, alignment, top_k, config, clamped)
    factors = topk_weights.contiguous()
    by_pair = down_gemm(middle, down, down_scale, factors, alignment, config, bias)
    return by_pair.view(tokens, top_k, hidden)


def gate_up_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    alignment: MoeAlignment,
    top_k: int,
    config: MoeConfig,
    clamped: ClampedSwiglu | None = None,
) -> torch.Tensor:
    """[T * top_k, n]: SwiGLU of each pair's token, by its expert.

    x, weight [experts, 2 n, hidden], scale, clamped: as for `fused_experts`.
    alignment: of blocks of config.block_m. Pairs outside of it are not written.
    """
    slope, limit = (1.0, 0.0) if clamped is None else (clamped.slope, clamped.limit)
    bias = None if clamped is None else clamped.gate_up_bias
    hidden, inter, gemm = x.shape[1], weight.shape[1] // 2, config.gate_up
    out, scaled = x.new_empty(x.shape[0] * top_k, inter), _scale_options(weight, scale)
    blocks = alignment.expert_ids.shape[0]
    _gate_up_kernel[(blocks * triton.cdiv(inter, gemm.block_n),)](
        x, *_kernel_weights(weight, scale, bias), out, alignment.sorted_pair_ids,
        alignment.expert_ids, alignment.num_padded_pairs, out.shape[0], x.stride(0), blocks,
        TOP_K=top_k, HIDDEN=hidden, INTERMEDIATE=inter, BLOCK_M=alignment.block_m, **scaled,
        GROUP_M=config.group_m, HAS_BIAS=bias is not None, SLOPE=slope, LIMIT=limit,
        **launch_options(gemm), **pdl_options(x.device),
    )  # fmt: skip
    return out


def down_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    topk_weights: torch.Tensor,
    alignment: MoeAlignment,
    config: MoeConfig,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """[pairs, hidden]: topk_weights[pair] * (x[pair] @ weight.T + bias), by the pair's expert.

    x: [pairs, n], contiguous.
    weight: [experts, hidden, n].
    topk_weights: as many as pairs, contiguous.
    bias: [experts, hidden].
    The rest as for `gate_up_gemm`.
    """
    (size, inter), (num_local_experts, hidden, _), gemm = x.shape, weight.shape, config.down
    out, scaled = x.new_empty(size, hidden), _scale_options(weight, scale)
    blocks = alignment.expert_ids.shape[0]
    _down_kernel[(blocks * triton.cdiv(hidden, gemm.block_n),)](
        x, *_kernel_weights(weight, scale, bias), topk_weights, out, alignment.sorted_pair_ids,
        alignment.expert_ids, alignment.num_padded_pairs, size, blocks, num_local_experts,
        HIDDEN=hidden, INTERMEDIATE=inter, BLOCK_M=alignment.block_m, **scaled,
        GROUP_M=config.group_m, HAS_BIAS=bias is not None, **launch_options(gemm),
        **pdl_options(x.device),
    )  # fmt: skip
    return out


def launch_options(gemm: MoeGemmConfig) -> dict[str, int]:
    """The launch options of one GEMM."""
    options = {"BLOCK_N": gemm.block_n, "BLOCK_K": gemm.block_k, "SWAP_AB": gemm.swap_ab}
    return options | {"num_warps": gemm.num_warps, "num_stages": gemm.num_stages}


def _kernel_weights(
    weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """(weight, scale, bias) as kernels take them; the weight again in place of None."""
    if weight.dtype == torch.uint8 and scale is not None:
        scale = scale.view(torch.int32)
    return as_kernel_arg(weight), *(weight if one is None else one for one in (scale, bias))


def _weight_bits(weight: torch.Tensor) -> int:
    """Bits of a weight as it is stored; 16 for those that have more."""
    return 4 if weight.dtype == torch.uint8 else min(8 * weight.element_size(), 16)


def _scale_options(weight: torch.Tensor, scale: torch.Tensor | None) -> dict[str, int]:
    """SCALES: what has a scale of its own; SCALES_PER_ROW: words of scales in a row of the matrix.

    Raises ValueError if these do not divide the weights.
    """
    if scale is None:
        return {"SCALES": NO_SCALES.value, "SCALES_PER_ROW": 0}
    if weight.dtype == torch.uint8:
        runs = scale.shape[2]
        if runs % 4 or MXFP4_GROUP.value * runs < 2 * weight.shape[2]:
            raise ValueError(f"{tuple(scale.shape)} exponents for {tuple(weight.shape)} bytes")
        return {"SCALES": MXFP4_SCALES.value, "SCALES_PER_ROW": runs // 4}
    if scale.shape[1:] == (weight.shape[1], 1):
        return {"SCALES": ROW_SCALES.value, "SCALES_PER_ROW": 0}
    if any(
        size != blocks * SCALE_BLOCK_CE.value
        for size, blocks in zip(weight.shape[1:], scale.shape[1:], strict=True)
    ):
        raise ValueError(
            f"scales {tuple(scale.shape)} are not those of rows, nor of whole blocks of "
            f"{SCALE_BLOCK_CE.value} x {SCALE_BLOCK_CE.value}, of weights {tuple(weight.shape)}"
        )
    return {"SCALES": BLOCK_SCALES.value, "SCALES_PER_ROW": scale.shape[2]}


def moe_sum(
    by_pair: torch.Tensor, topk_ids: torch.Tensor, first_expert: int | None, num_local_experts: int
) -> torch.Tensor:
    """[T, hidden], the sum of by_pair [T, top_k, hidden] over the second dimension.

    topk_ids: [T, top_k], contiguous.
    first_expert, num_local_experts: only pairs of these experts are added; None: all.
    """
    tokens, top_k, hidden = by_pair.shape
    out = by_pair.new_empty(tokens, hidden)
    block = min(1024, triton.next_power_of_2(hidden))
    if tokens:
        _moe_sum_kernel[(tokens, triton.cdiv(hidden, block))](
            by_pair, topk_ids, out, first_expert or 0, num_local_experts, TOP_K=top_k,
            HIDDEN=hidden, BLOCK=block, LOCAL_ONLY=first_expert is not None, num_warps=4,
            **pdl_options(by_pair.device),
        )  # fmt: skip
    return out


def fused_experts_reference(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    clamped: ClampedSwiglu | None = None,
) -> torch.Tensor:
    """`fused_experts` in float32, expert by expert, rounded at the end."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in topk_ids.unique().tolist():
        token, choice = torch.nonzero(topk_ids == expert, as_tuple=True)
        both = x[token].float() @ gate_up[expert].float().T
        if clamped is None:
            gate, up = both.chunk(2, dim=-1)
            one = (torch.nn.functional.silu(gate) * up) @ down[expert].float().T
        else:
            gate, up = (both + clamped.gate_up_bias[expert].float()).chunk(2, dim=-1)
            gate, up = gate.clamp(max=clamped.limit), up.clamp(-clamped.limit, clamped.limit)
            middle = (up + 1) * gate * torch.sigmoid(clamped.slope * gate)
            one = middle @ down[expert].float().T
            if clamped.down_bias is not None:
                one += clamped.down_bias[expert].float()
        out.index_add_(0, token, one * topk_weights[token, choice, None].float())
    return out.to(x.dtype)
