"""Mixtures of experts (MoE): routing, and the experts as two grouped GEMMs.

Routing: top-k softmax of router logits, then the pairs of a token and an expert sorted by expert
and padded to whole blocks, as grouped GEMMs want them. A token's experts depend on its own logits
alone; source: https://arxiv.org/abs/2101.03961. One launch each, deterministic: pairs of one expert
keep their order. The grouped GEMMs have SwiGLU, biases and weights fused in. Needs triton. Knows
tokens, logits and stacked weights; no layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

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

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false


TOKENS_PER_PROGRAM = 4  # tokens of a program, each with a warp of its own
PAIRS_PER_CHUNK = 16384  # pairs that a program looks at in one go
LOWEST_KEY = tl.constexpr(-(1 << 63))


@triton.jit
def _score_key(score, expert):
    """int64 that sorts as the float32 scores do; of equal scores the lower expert's is greater."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)  # -0.0 is 0.0
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(score != score, 0x7FC00000, bits)  # before all numbers, whatever its sign
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - expert)


@triton.jit(do_not_specialize=["rows", "partial_stride"])
def _topk_softmax_kernel(
    router_logits, topk_weights, topk_ids, rows, stride, partial_stride, PARTIALS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr, TOP_K_PADDED: tl.constexpr,
    RENORMALIZE: tl.constexpr, TOKENS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program i has the tokens from i * TOKENS on. PARTIALS: partial sums of the logits; 0:
    none."""
    if USE_PDL:
        gdc_wait()  # for the router's logits
        gdc_launch_dependents()
    row = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))[:, None]
    expert, choice = tl.arange(0, BLOCK)[None, :], tl.arange(0, TOP_K_PADDED)[None, :]
    here, real = expert < NUM_EXPERTS, row < rows
    at = router_logits + row.to(tl.int64) * stride + expert
    score = tl.load(at, mask=here & real, other=0.0).to(tl.float32)
    for partial in tl.static_range(1, PARTIALS):
        score += tl.load(at + partial * partial_stride, mask=here & real, other=0.0)
    if PARTIALS > 0:
        score = score.to(topk_weights.dtype.element_ty).to(
            tl.float32
        )  # as a product would be rounded
    keys = tl.where(here, _score_key(score, expert), LOWEST_KEY)
    best = tl.zeros((TOKENS, TOP_K_PADDED), tl.int64)
    for index in tl.static_range(TOP_K):
        first = tl.max(keys, axis=1)[:, None]
        best = tl.where(choice == index, first, best)
        keys = tl.where(keys == first, LOWEST_KEY, keys)
    most = tl.max(tl.where(here, score, float("-inf")), axis=1)[:, None]
    bits = (best >> 32).to(tl.int32)
    value = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)
    part = tl.where(choice < TOP_K, tl.exp(value - most), 0.0)
    if RENORMALIZE:
        whole = tl.sum(part, axis=1)[:, None]
    else:
        whole = tl.sum(tl.where(here, tl.exp(score - most), 0.0), axis=1)[:, None]
    at = row.to(tl.int64) * TOP_K + choice
    kept = real & (choice < TOP_K)
    tl.store(topk_weights + at, tl.math.div_rn(part, whole), mask=kept)
    tl.store(topk_ids + at, 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32), mask=kept)


def topk_softmax(
    router_logits: torch.Tensor, top_k: int, renormalize: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (weights of `dtype`, experts int32), both [T, top_k], the best first.

    - router_logits: any float dtype [T, experts], rows may be strided; or float32 [P, T, experts],
      partial sums whose total is rounded to `dtype`
    - renormalize: weights add up to one, in float32

    Softmax over all experts in float32; of equal logits the lower expert's comes first. NaN gives
    weights of NaN, and experts that exist.
    """
    rows, experts = router_logits.shape[-2:]
    weights = torch.empty(rows, top_k, dtype=dtype, device=router_logits.device)
    chosen = torch.empty(rows, top_k, dtype=torch.int32, device=router_logits.device)
    if rows:
        _topk_softmax_kernel[(triton.cdiv(rows, TOKENS_PER_PROGRAM),)](
            router_logits, weights, chosen, rows, router_logits.stride(-2), router_logits.stride(0),
            PARTIALS=router_logits.shape[0] if router_logits.dim() == 3 else 0, NUM_EXPERTS=experts,
            BLOCK=triton.next_power_of_2(experts), TOP_K=top_k,
            TOP_K_PADDED=triton.next_power_of_2(top_k), RENORMALIZE=renormalize,
            TOKENS=TOKENS_PER_PROGRAM, num_warps=TOKENS_PER_PROGRAM,
            **pdl_options(router_logits.device),
        )  # fmt: skip
    return weights, chosen


def topk_softmax_reference(
    router_logits: torch.Tensor, top_k: int, renormalize: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """`topk_softmax` in plain torch."""
    wide = (
        router_logits.float()
        if router_logits.dim() == 2
        else router_logits.sum(0).to(dtype).float()
    )
    chosen = wide.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = wide.softmax(-1).gather(1, chosen)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(dtype), chosen.int()


@dataclass(frozen=True)
class MoeAlignment:
    """Pairs sorted by expert, in blocks of one expert each.

    Attributes:
    - sorted_pair_ids: int32 [capacity]; pair t * top_k + j is choice j of token t; entries that pad
      a block hold the number of pairs
    - expert_ids: int32 [capacity / block_m], the expert of each block
    - num_padded_pairs: int32 [1], entries of sorted_pair_ids that count; later blocks are undefined
    - block_m: entries of a block
    """

    sorted_pair_ids: torch.Tensor
    expert_ids: torch.Tensor
    num_padded_pairs: torch.Tensor
    block_m: int


@triton.jit(do_not_specialize=["num_pairs", "num_experts", "first_expert"])
def _align_kernel(
    topk_ids, sorted_pair_ids, expert_ids, num_padded_pairs, num_pairs, num_experts, first_expert,
    NUM_EXPERTS: tl.constexpr, BLOCK: tl.constexpr, PAIRS_PER_CHUNK: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program (expert): counts the pairs of all experts, and writes the blocks of its expert after
    those of lower experts. Counting everything costs less than a second launch or other programs'
    counts.
    """
    if USE_PDL:
        gdc_wait()  # for topk_ids
        gdc_launch_dependents()
    expert = tl.program_id(0)
    index = tl.arange(0, NUM_EXPERTS)
    counts = tl.zeros((NUM_EXPERTS,), tl.int32)
    for begin in range(0, num_pairs, PAIRS_PER_CHUNK):
        pair = begin + tl.arange(0, PAIRS_PER_CHUNK)
        expert_id = tl.load(topk_ids + pair, mask=pair < num_pairs, other=-1).to(tl.int32)
        local_id = expert_id - first_expert
        counted = (pair < num_pairs) & (local_id >= 0) & (local_id < num_experts)
        counts += tl.histogram(local_id, NUM_EXPERTS, mask=counted)
    blocks = (counts + BLOCK - 1) // BLOCK
    first = tl.sum(tl.where(index < expert, blocks, 0), axis=0)
    mine = tl.sum(tl.where(index == expert, blocks, 0), axis=0)
    if expert == 0:
        tl.store(num_padded_pairs, tl.sum(blocks, axis=0) * BLOCK)
    for block in range(first, first + mine):
        tl.store(expert_ids + block, expert)
    at = first * BLOCK
    for begin in range(0, num_pairs, PAIRS_PER_CHUNK):
        pair = begin + tl.arange(0, PAIRS_PER_CHUNK)
        expert_id = tl.load(topk_ids + pair, mask=pair < num_pairs, other=-1).to(tl.int32)
        local_id = expert_id - first_expert
        found = (pair < num_pairs) & (local_id == expert)
        rank = tl.cumsum(found.to(tl.int32), axis=0)
        tl.store(sorted_pair_ids + at + rank - 1, pair, mask=found)
        at += tl.sum(found.to(tl.int32), axis=0)
    rest = at + tl.arange(0, BLOCK)
    tl.store(sorted_pair_ids + rest, rest * 0 + num_pairs, mask=rest < (first + mine) * BLOCK)


def moe_align_block_size(
    topk_ids: torch.Tensor, num_experts: int, block_m: int, first_expert: int = 0
) -> MoeAlignment:
    """Groups the pairs by expert, without synchronisation.

    - topk_ids: int [T, top_k]
    - num_experts, first_expert: expert e of the result is first_expert + e of topk_ids; pairs of
      experts outside of first_expert .. first_expert + num_experts - 1 are left out
    - block_m: entries of a block
    """
    num_pairs = topk_ids.numel()
    topk_ids = topk_ids.contiguous()
    blocks = min(num_pairs, num_experts + num_pairs // block_m)
    result = MoeAlignment(
        sorted_pair_ids=torch.empty(blocks * block_m, dtype=torch.int32, device=topk_ids.device),
        expert_ids=torch.empty(blocks, dtype=torch.int32, device=topk_ids.device),
        num_padded_pairs=torch.empty(1, dtype=torch.int32, device=topk_ids.device),
        block_m=block_m,
    )
    chunk = min(PAIRS_PER_CHUNK, max(triton.next_power_of_2(num_pairs), 16))
    _align_kernel[(num_experts,)](
        topk_ids, result.sorted_pair_ids, result.expert_ids, result.num_padded_pairs, num_pairs,
        num_experts, first_expert, NUM_EXPERTS=triton.next_power_of_2(num_experts), BLOCK=block_m,
        PAIRS_PER_CHUNK=chunk, num_warps=16 if chunk > 4096 else 8, **pdl_options(topk_ids.device),
    )  # fmt: skip
    return result


def moe_align_block_size_reference(
    topk_ids: torch.Tensor, num_experts: int, block_m: int, first_expert: int = 0
) -> MoeAlignment:
    """`moe_align_block_size`, expert by expert on the host, without unused capacity."""
    flat = topk_ids.flatten().cpu() - first_expert
    pairs, experts = [], []
    for expert in range(num_experts):
        mine = torch.nonzero(flat == expert).flatten()
        blocks = -(-len(mine) // block_m)
        filling = mine.new_full((blocks * block_m - len(mine),), len(flat))
        pairs.append(torch.cat((mine, filling)))
        experts += [expert] * blocks
    ordered = torch.cat(pairs).to(torch.int32)
    used = torch.tensor([len(ordered)], dtype=torch.int32)
    return MoeAlignment(ordered, torch.tensor(experts, dtype=torch.int32), used, block_m)


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

    Attributes:
    - slope: of the sigmoid
    - limit: gate is at most `limit`, and up between -limit and limit
    - gate_up_bias: [experts, 2 n], gate first
    - down_bias: [experts, hidden], added before the router's weight multiplies; None: another rank
      adds it

    Source: https://arxiv.org/abs/2508.10925.
    """

    slope: float
    limit: float
    gate_up_bias: torch.Tensor
    down_bias: torch.Tensor | None


@triton.jit
def grouped_tile(row_blocks, column_blocks, GROUP_M: tl.constexpr):
    """Returns (row block, column block) of this program. GROUP_M: row blocks that share columns in
    the L2 cache.
    """
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

    - scale: of an expert
    - SCALES_PER_ROW: words of scales in a row
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

    - scale: ROW_SCALES: [experts, 2 INTERMEDIATE]; BLOCK_SCALES: [experts, 2 INTERMEDIATE / 128,
      SCALES_PER_ROW]; MXFP4_SCALES: int32 [experts, 2 INTERMEDIATE, SCALES_PER_ROW], four exponents
      each
    - bias: [experts, 2 INTERMEDIATE]
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

    - scale: as for _gate_up_kernel, with HIDDEN in place of 2 INTERMEDIATE
    - bias: [experts, HIDDEN]
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
    """Adds up the rows of a token's pairs. LOCAL_ONLY: only pairs of this rank's experts."""
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
    """Returns [T, hidden], the weighted sum of each token's experts.

    - x: [T, hidden]; rows may be strided
    - gate_up: [experts, 2 n, hidden], gate first, contiguous
    - down: [experts, hidden, n], contiguous
    - topk_weights: any float dtype [T, top_k]
    - topk_ids: int [T, top_k]
    - config: tiles; None: those of tile_configs.py
    - first_expert, num_global_experts: gate_up and down are those of experts first_expert and
      following, out of num_global_experts (0: of all). Pairs of other experts add nothing
    - gate_up_scale, down_scale: of weights in FP8, which become x's dtype, float32: [experts, rows,
      1], or of blocks of 128 x 128 [experts, rows / 128, columns / 128]
    - clamped: another SwiGLU, with biases

    In MXFP4, for x of 16 bits, weights are uint8 [experts, rows, columns / 2], the first of two in
    the lower bits, and scales are exponents, uint8 [experts, rows, groups]: one for each 32
    columns, filled up with others (no NaN) to a multiple of 4.

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
    """Returns [T, top_k, hidden], whose sum over the second dimension is `fused_experts` of the
    same arguments. Pairs of other ranks' experts are not written.
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
    """Returns [T * top_k, n], SwiGLU of each pair's token, by its expert.

    - x, weight [experts, 2 n, hidden], scale, clamped: as for `fused_experts`
    - alignment: of blocks of config.block_m. Pairs outside of it are not written
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
    """Returns [pairs, hidden]: topk_weights[pair] * (x[pair] @ weight.T + bias), by the pair's
    expert.

    - x: [pairs, n], contiguous
    - weight: [experts, hidden, n]
    - topk_weights: as many as pairs, contiguous
    - bias: [experts, hidden]

    Other arguments: as for `gate_up_gemm`.
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
    """Returns (weight, scale, bias) as kernels take them; the weight again in place of None."""
    if weight.dtype == torch.uint8 and scale is not None:
        scale = scale.view(torch.int32)
    return as_kernel_arg(weight), *(weight if one is None else one for one in (scale, bias))


def _weight_bits(weight: torch.Tensor) -> int:
    """Returns the bits of a weight as it is stored; 16 for dtypes of more bits."""
    return 4 if weight.dtype == torch.uint8 else min(8 * weight.element_size(), 16)


def _scale_options(weight: torch.Tensor, scale: torch.Tensor | None) -> dict[str, int]:
    """Returns the options of kernels for the scales of `weight`: SCALES, the parts that have a
    scale of their own, and SCALES_PER_ROW, words of scales in a row of the matrix.

    Raises ValueError if the scales do not divide the weights.
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
    """Returns [T, hidden], the sum of by_pair [T, top_k, hidden] over the second dimension.

    - topk_ids: [T, top_k], contiguous
    - first_expert, num_local_experts: only pairs of these experts are added; None: all
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
