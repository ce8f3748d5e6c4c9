"""The experts of a mixture as two grouped matrix products, with all that is theirs fused in.

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

# [tokens] -gate and up, SwiGLU-> [pairs, intermediate] -down, times weight-> [pairs, hidden]
# -sum over a token's pairs-> [tokens, hidden]
# Products and SwiGLU are float32; the two intermediates are rounded to the tokens' dtype, and the
# sum is float32 again, in the router's order. No atomics: a token's result is always the same.


@dataclass(frozen=True)
class ClampedSwiglu:
    """What experts have whose SwiGLU is (up + 1) * gate * sigmoid(slope * gate), gate at most
    `limit` and up within it on both sides.

    gate_up_bias [experts, 2 n], gate first; down_bias [experts, hidden], before the router's weight
    multiplies; None: another rank adds it. Source: https://arxiv.org/abs/2508.10925.
    """

    slope: float
    limit: float
    gate_up_bias: torch.Tensor
    down_bias: torch.Tensor | None


@triton.jit
def grouped_tile(row_blocks, column_blocks, GROUP: tl.constexpr):
    """(row block, column block) of this program; GROUP row blocks share columns in the L2 cache."""
    program = tl.program_id(0)
    band = program // (GROUP * column_blocks)
    height = tl.minimum(row_blocks - band * GROUP, GROUP)
    within = program % (GROUP * column_blocks)
    return band * GROUP + within % height, within // height


@triton.jit
def _weights(
    at, column, depth, WIDTH: tl.constexpr, DEEP: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """[COLUMNS, DEPTH] of an expert's [WIDTH, DEEP]; zeros outside."""
    if WIDTH % COLUMNS == 0 and DEEP % DEPTH == 0:
        w = tl.load(at)
    else:
        inside = (column < WIDTH)[:, None] & (depth < DEEP)[None, :]
        w = tl.load(at, mask=inside, other=0.0)
    return w


@triton.jit
def _scales(
    scale, column, part, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    """The address of a matrix's first scale by block for the columns of `part`; or addresses
    [COLUMNS] of their first four exponents. BLOCKS: of a row."""
    if SCALES == MXFP4_SCALES:
        at = scale + tl.minimum(column, WIDTH - 1) * BLOCKS
    else:
        at = scale + part * COLUMNS // SCALE_BLOCK_CE * BLOCKS
    return at


@triton.jit
def _rows(at, real, depth, DEEP: tl.constexpr, DEPTH: tl.constexpr):
    """[ROWS, DEPTH] of those that are real; zeros outside."""
    mask = real[:, None]
    if DEEP % DEPTH != 0:
        mask = mask & (depth < DEEP)[None, :]
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def _swiglu(gate, up, SLOPE: tl.constexpr, LIMIT: tl.constexpr):
    """The usual one where LIMIT is 0, else that of `Bounded`; NaN stays NaN."""
    if LIMIT > 0:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, up)
        up = tl.where(up < -LIMIT, -LIMIT, up) + 1.0
    return gate * tl.sigmoid(gate * SLOPE) * up


@triton.jit
def _of_columns(at, column, WIDTH: tl.constexpr, ROWS_FIRST: tl.constexpr):
    """float32 of a number for each column, so that it broadcasts to a sum."""
    return broadcast_columns(tl.load(at + column, mask=column < WIDTH, other=0.0), ROWS_FIRST).to(
        tl.float32
    )


@triton.jit(do_not_specialize=["size", "row_blocks"])
def _gate_up(
    x, weight, scale, bias, out, pairs, experts, used, size, x_stride, row_blocks,
    TOP_K: tl.constexpr, HIDDEN: tl.constexpr, INTER: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SWAP_AB: tl.constexpr, SCALES: tl.constexpr,
    BLOCKS: tl.constexpr, GROUP: tl.constexpr, BIASED: tl.constexpr, SLOPE: tl.constexpr,
    LIMIT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out[pair] = swiglu(x[token] @ gate.T, x[token] @ up.T) for one tile of pairs and columns.
    scale [experts, 2 INTER], or [experts, 2 INTER / SCALE_BLOCK_CE, BLOCKS], or of MXFP4_SCALES int32 [experts,
    2 INTER, BLOCKS], four exponents each; bias [experts, 2 INTER]."""
    tl.static_assert(SCALES != BLOCK_SCALES or SCALE_BLOCK_CE % COLUMNS == 0)
    tl.static_assert(
        (SCALES != BLOCK_SCALES and SCALES != MXFP4_SCALES) or SCALE_BLOCK_CE % DEPTH == 0
    )
    rows_first: tl.constexpr = SWAP_AB == 0
    EACH: tl.constexpr = 2 if SCALES == MXFP4_SCALES else 1  # weights in an element
    block, part = grouped_tile(row_blocks, tl.cdiv(INTER, COLUMNS), GROUP)
    if EARLY:
        gdc_wait()  # for tokens and their order
        gdc_launch_dependents()
    if block * ROWS >= tl.load(used):
        return
    pair = tl.load(pairs + block * ROWS + tl.arange(0, ROWS))
    real = pair < size
    column, depth = part * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    expert = tl.load(experts + block).to(tl.int64)
    left = x + (pair // TOP_K).to(tl.int64)[:, None] * x_stride + depth[None, :]
    deep: tl.constexpr = HIDDEN // EACH
    element = tl.arange(0, DEPTH // EACH)
    right = weight + expert * (2 * INTER * deep) + column[:, None] * deep + element[None, :]
    shared: tl.constexpr = 1 if SCALES == MXFP4_SCALES else SCALE_BLOCK_CE  # rows with one scale
    blocks: tl.constexpr = INTER // shared * BLOCKS  # of gate, and as many of up
    scales = scale + expert * (2 * blocks)
    scales = _scales(scales, column, part, BLOCKS, INTER, COLUMNS, SCALES)
    gate, up = (
        zeros_accumulator(ROWS, COLUMNS, rows_first),
        zeros_accumulator(ROWS, COLUMNS, rows_first),
    )
    for begin in range(0, HIDDEN, DEPTH):
        a = _rows(left + begin, real, begin + depth, HIDDEN, DEPTH)
        at, begun = right + begin // EACH, begin // EACH + element
        w = _weights(at, column, begun, INTER, deep, COLUMNS, DEPTH // EACH)
        first, run = (
            scales + begin // SCALE_BLOCK_CE,
            begin // MXFP4_GROUP % (SCALE_BLOCK_CE // MXFP4_GROUP),
        )
        gate = dequantizing_dot(a, w, gate, first, rows_first, SCALES, run)
        w = _weights(at + INTER * deep, column, begun, INTER, deep, COLUMNS, DEPTH // EACH)
        up = dequantizing_dot(a, w, up, first + blocks, rows_first, SCALES, run)
    if SCALES == ROW_SCALES:
        at = scale + expert * (2 * INTER)
        gate *= _of_columns(at, column, INTER, rows_first)
        up *= _of_columns(at + INTER, column, INTER, rows_first)
    if BIASED:
        at = bias + expert * (2 * INTER)
        gate += _of_columns(at, column, INTER, rows_first)
        up += _of_columns(at + INTER, column, INTER, rows_first)
    value = _swiglu(gate, up, SLOPE, LIMIT)
    if SWAP_AB:
        value = tl.trans(value)
    target = out + pair.to(tl.int64)[:, None] * INTER + column[None, :]
    tl.store(target, value, mask=real[:, None] & (column < INTER)[None, :])


@triton.jit
def prefetch_weights(
    weight, experts, used, block, column, held, HIDDEN: tl.constexpr, INTER: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Asks for the weights that a program of `_down` will read first.

    Which these are was written before the kernel before, whose programs all waited for it. Nothing
    depends on that: what is read here says only what to ask for, and is held within the weights.
    """
    if block * ROWS < tl.load(used, volatile=True):
        expert = tl.load(experts + block, volatile=True)
        expert = tl.minimum(tl.maximum(expert, 0), held - 1).to(tl.int64)
        row = expert * HIDDEN + tl.minimum(column, HIDDEN - 1)
        line = tl.arange(0, (DEPTH + L2_LINE_ELEMENTS - 1) // L2_LINE_ELEMENTS) * L2_LINE_ELEMENTS
        prefetch_l2(weight + row[:, None] * INTER + tl.minimum(line, INTER - 1)[None, :])


@triton.jit(do_not_specialize=["size", "row_blocks", "held"])
def _down(
    hidden, weight, scale, bias, factors, out, pairs, experts, used, size, row_blocks, held,
    HIDDEN: tl.constexpr, INTER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, SWAP_AB: tl.constexpr, SCALES: tl.constexpr, BLOCKS: tl.constexpr,
    GROUP: tl.constexpr, BIASED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out[pair] = factors[pair] * (hidden[pair] @ weight.T + bias) for one tile of pairs, columns.
    scale [experts, HIDDEN], or [experts, HIDDEN / SCALE_BLOCK_CE, BLOCKS], or of MXFP4_SCALES int32 [experts,
    HIDDEN, BLOCKS], four exponents each; bias [experts, HIDDEN]; held: experts."""
    tl.static_assert(SCALES != BLOCK_SCALES or SCALE_BLOCK_CE % COLUMNS == 0)
    tl.static_assert(
        (SCALES != BLOCK_SCALES and SCALES != MXFP4_SCALES) or SCALE_BLOCK_CE % DEPTH == 0
    )
    rows_first: tl.constexpr = SWAP_AB == 0
    EACH: tl.constexpr = 2 if SCALES == MXFP4_SCALES else 1  # weights in an element
    deep: tl.constexpr = INTER // EACH
    block, part = grouped_tile(row_blocks, tl.cdiv(HIDDEN, COLUMNS), GROUP)
    column, depth = part * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    if EARLY:
        prefetch_weights(
            weight, experts, used, block, column, held, HIDDEN, deep, ROWS, DEPTH // EACH
        )
        gdc_wait()  # for gate and up
        gdc_launch_dependents()
    if block * ROWS >= tl.load(used):
        return
    pair = tl.load(pairs + block * ROWS + tl.arange(0, ROWS))
    real = pair < size
    expert = tl.load(experts + block).to(tl.int64)
    left = hidden + pair.to(tl.int64)[:, None] * INTER + depth[None, :]
    element = tl.arange(0, DEPTH // EACH)
    right = weight + expert * (HIDDEN * deep) + column[:, None] * deep + element[None, :]
    shared: tl.constexpr = 1 if SCALES == MXFP4_SCALES else SCALE_BLOCK_CE  # rows with one scale
    scales = scale + expert * (HIDDEN // shared * BLOCKS)
    scales = _scales(scales, column, part, BLOCKS, HIDDEN, COLUMNS, SCALES)
    total = zeros_accumulator(ROWS, COLUMNS, rows_first)
    for begin in range(0, INTER, DEPTH):
        a = _rows(left + begin, real, begin + depth, INTER, DEPTH)
        at, begun = right + begin // EACH, begin // EACH + element
        w = _weights(at, column, begun, HIDDEN, deep, COLUMNS, DEPTH // EACH)
        first, run = (
            scales + begin // SCALE_BLOCK_CE,
            begin // MXFP4_GROUP % (SCALE_BLOCK_CE // MXFP4_GROUP),
        )
        total = dequantizing_dot(a, w, total, first, rows_first, SCALES, run)
    if SCALES == ROW_SCALES:
        total *= _of_columns(scale + expert * HIDDEN, column, HIDDEN, rows_first)
    if BIASED:
        total += _of_columns(bias + expert * HIDDEN, column, HIDDEN, rows_first)
    if SWAP_AB:
        total = tl.trans(total)
    total *= tl.load(factors + pair, mask=real, other=0.0).to(tl.float32)[:, None]
    target = out + pair.to(tl.int64)[:, None] * HIDDEN + column[None, :]
    tl.store(target, total, mask=real[:, None] & (column < HIDDEN)[None, :])


@triton.jit(do_not_specialize=["first", "held"])
def _combine(
    by_pair, chosen, out, first, held, TOP_K: tl.constexpr, HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr, SOME: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Sums the rows of one token's pairs; SOME: those of experts first .. first + held - 1 only."""
    if EARLY:
        gdc_wait()  # for the pairs
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        width = HIDDEN
        if SOME:  # nobody has written the others
            expert = tl.load(chosen + pair)
            width = tl.where((expert >= first) & (expert < first + held), HIDDEN, 0)
        at = by_pair + pair * HIDDEN + lane
        total += tl.load(at, mask=lane < width, other=0.0).to(tl.float32)
    tl.store(out + token * HIDDEN + lane, total, mask=lane < HIDDEN)


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

    x [T, hidden], rows may be strided; gate_up [experts, 2 n, hidden], gate first; down [experts,
    hidden, n]; both contiguous. weights, any float dtype, and chosen int, [T, top_k]. The weights
    given are those of experts `first` and following, out of `of` (0: these are all); the choices
    of others count zeros_accumulator. Scales: float32, of matrices in FP8, which become x's dtype: [experts,
    rows, 1], or of blocks of 128 x 128, [experts, rows / 128, columns / 128], with n and hidden
    whole blocks (ValueError). bounded: for another SwiGLU, and biases.

    In MXFP4_SCALES, for x of 16 bits, matrices are uint8 [experts, rows, columns / 2], the first of two in
    the lower bits, and scales are exponents, uint8 [experts, rows, blocks]: one for each 32 columns
    and others, no NaN, that fill them up to a multiple of 4 (ValueError).
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
    """[T, top_k, hidden], whose sum over the second dimension `experts_mlp` is, of the same
    arguments. Pairs of experts that are not given are not written.
    """
    (tokens, hidden), num_experts, top_k = x.shape, down.shape[0], topk_ids.shape[1]
    if tokens == 0:
        return x.new_empty(0, top_k, hidden)
    tile = config or moe_config(topk_ids.numel(), num_global_experts or num_experts, _bits(gate_up))
    plan = moe_align_block_size(topk_ids, num_experts, tile.block_m, first_expert)
    bias = None if clamped is None else clamped.down_bias
    middle = gate_up_gemm(x, gate_up, gate_up_scale, plan, top_k, tile, clamped)
    by_pair = down_gemm(middle, down, down_scale, topk_weights.contiguous(), plan, tile, bias)
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
    """[T * top_k, n]: SwiGLU of each pair's token, by its expert; x, weight [experts, 2 n, hidden]
    and scale as `experts_mlp` has them, plan in blocks of tile.rows. Pairs of experts that are not
    in the plan are not written.
    """
    slope, limit = (1.0, 0.0) if clamped is None else (clamped.slope, clamped.limit)
    bias = None if clamped is None else clamped.gate_up_bias
    hidden, inter, cut = x.shape[1], weight.shape[1] // 2, config.gate_up
    out, scaled = x.new_empty(x.shape[0] * top_k, inter), _scaled(weight, scale)
    blocks = alignment.expert_ids.shape[0]
    _gate_up[(blocks * triton.cdiv(inter, cut.block_n),)](
        x, *_seen(weight, scale, bias), out, alignment.sorted_pair_ids, alignment.expert_ids, alignment.num_padded_pairs, out.shape[0],
        x.stride(0), blocks, TOP_K=top_k, HIDDEN=hidden, INTER=inter, ROWS=alignment.block_m,
        **scaled, GROUP=config.group_m, BIASED=bias is not None, SLOPE=slope,
        LIMIT=limit, **launch_options(cut), **pdl_options(x.device),
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
    """[pairs, hidden]: factors[pair] times the product of x[pair] with its expert's matrix, and
    times its bias.

    x [pairs, n] and factors, as many, contiguous; weight [experts, hidden, n]; bias [experts,
    hidden]; the rest as for `gated_products`.
    """
    (size, inter), (held, hidden, _), cut = x.shape, weight.shape, config.down
    out, scaled = x.new_empty(size, hidden), _scaled(weight, scale)
    blocks = alignment.expert_ids.shape[0]
    _down[(blocks * triton.cdiv(hidden, cut.block_n),)](
        x, *_seen(weight, scale, bias), topk_weights, out, alignment.sorted_pair_ids, alignment.expert_ids, alignment.num_padded_pairs, size,
        blocks, held, HIDDEN=hidden, INTER=inter, ROWS=alignment.block_m, **scaled,
        GROUP=config.group_m, BIASED=bias is not None, **launch_options(cut), **pdl_options(x.device),
    )  # fmt: skip
    return out


def launch_options(cut: MoeGemmConfig) -> dict[str, int]:
    """The options of one product."""
    options = {"COLUMNS": cut.block_n, "DEPTH": cut.block_k, "SWAP_AB": cut.swap_ab}
    return options | {"num_warps": cut.num_warps, "num_stages": cut.num_stages}


def _seen(
    weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """Weights, scales and biases as kernels are given them; weights again where there are none."""
    if weight.dtype == torch.uint8 and scale is not None:
        scale = scale.view(torch.int32)
    return as_kernel_arg(weight), *(weight if one is None else one for one in (scale, bias))


def _bits(weight: torch.Tensor) -> int:
    """Of a weight as it is stored; 16 for those that have more."""
    return 4 if weight.dtype == torch.uint8 else min(8 * weight.element_size(), 16)


def _scaled(weight: torch.Tensor, scale: torch.Tensor | None) -> dict[str, int]:
    """What has a scale of its own, and how many a row has; ValueError if that does not divide the
    weights."""
    if scale is None:
        return {"SCALES": NO_SCALES.value, "BLOCKS": 0}
    if weight.dtype == torch.uint8:
        runs = scale.shape[2]
        if runs % 4 or MXFP4_GROUP.value * runs < 2 * weight.shape[2]:
            raise ValueError(f"{tuple(scale.shape)} exponents for {tuple(weight.shape)} bytes")
        return {"SCALES": MXFP4_SCALES.value, "BLOCKS": runs // 4}
    if scale.shape[1:] == (weight.shape[1], 1):
        return {"SCALES": ROW_SCALES.value, "BLOCKS": 0}
    if any(
        size != blocks * SCALE_BLOCK_CE.value
        for size, blocks in zip(weight.shape[1:], scale.shape[1:], strict=True)
    ):
        raise ValueError(
            f"scales {tuple(scale.shape)} are not those of rows, nor of whole blocks of "
            f"{SCALE_BLOCK_CE.value} x {SCALE_BLOCK_CE.value}, of weights {tuple(weight.shape)}"
        )
    return {"SCALES": BLOCK_SCALES.value, "BLOCKS": scale.shape[2]}


def moe_sum(
    by_pair: torch.Tensor, topk_ids: torch.Tensor, first_expert: int | None, num_local_experts: int
) -> torch.Tensor:
    """[T, hidden] of `by_pair` [T, top_k, hidden]; with `first`, of the held experts only. chosen
    [T, top_k] is contiguous."""
    tokens, top_k, hidden = by_pair.shape
    out = by_pair.new_empty(tokens, hidden)
    block = min(1024, triton.next_power_of_2(hidden))
    if tokens:
        _combine[(tokens, triton.cdiv(hidden, block))](
            by_pair, topk_ids, out, first_expert or 0, num_local_experts, TOP_K=top_k, HIDDEN=hidden, BLOCK=block,
            SOME=first_expert is not None, num_warps=4, **pdl_options(by_pair.device),
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
    """The same in float32, expert by expert, rounded at the end."""
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
