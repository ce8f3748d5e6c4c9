"""The experts of a mixture where both operands of a product are FP8 (e4m3), which the tensor cores
of a Hopper multiply as they are: no weight is widened.

Needs triton. Knows tokens, chosen experts and stacked weights; no router and no layer. Source:
https://arxiv.org/abs/2412.19437, 3.3.2.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pipeinfer.kernels import formats
from pipeinfer.kernels.activations import Fp8Output, quantize_groups_reference, store_quantized_tile
from pipeinfer.kernels.formats import E4M3_MAX, MIN_SCALE
from pipeinfer.kernels.moe import grouped_tile, launch_options, prefetch_weights
from pipeinfer.kernels.moe_routing import MoeAlignment, moe_align_block_size
from pipeinfer.kernels.tile_configs import MoeConfig, MoeGemmConfig, moe_w8a8_config
from pipeinfer.kernels.triton_support import (
    SCALE_BLOCK_CE,
    as_kernel_arg,
    broadcast_columns,
    broadcast_rows,
    fp8_dot,
    pdl_options,
    zeros_accumulator,
)

# [tokens] -gate and up, SwiGLU-> [pairs, intermediate] -down, times weight-> [pairs, hidden]
# Tokens have a scale for each SCALE_BLOCK_CE of their values, what is between the products one for each
# MIDDLE, so that tiles of so few columns can round it. A product of so many values is a sum of the
# tensor cores; these are scaled and added in float32, in order. No atomics.
INTERMEDIATE_GROUP = 64


# Values in e4m3 and their scales, float32; both contiguous. Of rows [rows, n]: [rows, parts]. Of
# matrices [experts, rows, columns]: [experts, rows, 1], or of blocks of 128 x 128, [experts,
# rows / 128, columns / 128].
Fp8Scaled = tuple[torch.Tensor, torch.Tensor]


@triton.jit
def _swiglu_halves(both, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """[BLOCK_M, BLOCK_N] of gate and up side by side."""
    gate, up = tl.split(tl.permute(tl.reshape(both, (BLOCK_M, 2, BLOCK_N)), (0, 2, 1)))
    return gate * tl.sigmoid(gate) * up


@triton.jit(do_not_specialize=["num_pairs", "row_blocks"])
def _gate_up_w8a8_kernel(
    x, x_scale, weight, scale, out, out_scale, sorted_pair_ids, expert_ids, num_padded_pairs,
    num_pairs, row_blocks, TOP_K: tl.constexpr, HIDDEN: tl.constexpr, INTERMEDIATE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP_AB: tl.constexpr,
    SCALES_PER_ROW: tl.constexpr, GROUP_SIZE: tl.constexpr, GROUP_M: tl.constexpr,
    E4M3_MAX: tl.constexpr, MIN_SCALE: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """out[pair] = swiglu(x[token] @ gate.T, x[token] @ up.T), for a tile of sorted_pair_ids and columns.
    x_scale [tokens, HIDDEN / BLOCK_K]; out_scale [sorted_pair_ids, INTERMEDIATE / GROUP_SIZE]; scale [expert_ids, 2 INTERMEDIATE], or
    [expert_ids, 2 INTERMEDIATE / SCALE_BLOCK_CE, SCALES_PER_ROW]."""
    parts: tl.constexpr = HIDDEN // BLOCK_K
    ups: tl.constexpr = (
        INTERMEDIATE // SCALE_BLOCK_CE * SCALES_PER_ROW
    )  # scales of gate, before those of up
    block, part = grouped_tile(row_blocks, INTERMEDIATE // BLOCK_N, GROUP_M)
    if USE_PDL:
        gdc_wait()  # for tokens and their order
        gdc_launch_dependents()
    if block * BLOCK_M >= tl.load(num_padded_pairs):
        return
    pair = tl.load(sorted_pair_ids + block * BLOCK_M + tl.arange(0, BLOCK_M))
    real = pair < num_pairs
    expert = tl.load(expert_ids + block).to(tl.int64)
    token, depth = pair // TOP_K, tl.arange(0, BLOCK_K)
    both = tl.arange(0, 2 * BLOCK_N)  # columns of gate, and the same of up
    column = both // BLOCK_N * INTERMEDIATE + part * BLOCK_N + both % BLOCK_N
    left = x + token.to(tl.int64)[:, None] * HIDDEN + depth[None, :]
    right = (
        weight + expert * (2 * INTERMEDIATE * HIDDEN) + column[:, None] * HIDDEN + depth[None, :]
    )
    total = zeros_accumulator(BLOCK_M, 2 * BLOCK_N, SWAP_AB)
    of_row = tl.load(x_scale + token * parts, mask=real, other=0.0)
    by_block = scale + expert * (2 * ups) + part * BLOCK_N // SCALE_BLOCK_CE * SCALES_PER_ROW
    for step in range(parts):
        factor = broadcast_rows(of_row, SWAP_AB)
        more = real & (step + 1 < parts)  # asked for a step ahead
        of_row = tl.load(x_scale + token * parts + step + 1, mask=more, other=0.0)
        a = tl.load(left + step * BLOCK_K, mask=real[:, None], other=0.0)
        if SCALES_PER_ROW > 0:
            at = by_block + step * BLOCK_K // SCALE_BLOCK_CE
            of_block = tl.where(both < BLOCK_N, tl.load(at), tl.load(at + ups))
            factor *= broadcast_columns(of_block, SWAP_AB)
        total += fp8_dot(a, tl.load(right + step * BLOCK_K), SWAP_AB) * factor
    if SCALES_PER_ROW == 0:
        total *= broadcast_columns(tl.load(scale + expert * (2 * INTERMEDIATE) + column), SWAP_AB)
    value = _swiglu_halves(tl.trans(total) if SWAP_AB else total, BLOCK_M, BLOCK_N)
    store_quantized_tile(
        value, out, out_scale, pair.to(tl.int64), real, part * BLOCK_N, INTERMEDIATE, BLOCK_N,
        GROUP_SIZE, E4M3_MAX, MIN_SCALE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_pairs", "row_blocks", "num_local_experts"])
def _down_w8a8_kernel(
    hidden, hidden_scale, weight, scale, topk_weights, out, sorted_pair_ids, expert_ids,
    num_padded_pairs, num_pairs, row_blocks, num_local_experts, HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SWAP_AB: tl.constexpr, SCALES_PER_ROW: tl.constexpr, GROUP_M: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """out[pair] = topk_weights[pair] * (hidden[pair] @ weight.T) for one tile of sorted_pair_ids, columns.
    hidden_scale [sorted_pair_ids, INTERMEDIATE / BLOCK_K]; scale [expert_ids, HIDDEN], or [expert_ids, HIDDEN / SCALE_BLOCK_CE,
    SCALES_PER_ROW]; num_local_experts: expert_ids."""
    parts: tl.constexpr = INTERMEDIATE // BLOCK_K
    block, part = grouped_tile(row_blocks, HIDDEN // BLOCK_N, GROUP_M)
    column, depth = part * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    if USE_PDL:
        prefetch_weights(
            weight, expert_ids, num_padded_pairs, block, column, num_local_experts, HIDDEN,
            INTERMEDIATE, BLOCK_M, BLOCK_K,
        )  # fmt: skip
        gdc_wait()  # for gate and up
        gdc_launch_dependents()
    if block * BLOCK_M >= tl.load(num_padded_pairs):
        return
    pair = tl.load(sorted_pair_ids + block * BLOCK_M + tl.arange(0, BLOCK_M))
    real = pair < num_pairs
    expert, row = tl.load(expert_ids + block).to(tl.int64), pair.to(tl.int64)
    left = hidden + row[:, None] * INTERMEDIATE + depth[None, :]
    right = (
        weight + expert * (HIDDEN * INTERMEDIATE) + column[:, None] * INTERMEDIATE + depth[None, :]
    )
    by_block = (
        scale
        + expert * (HIDDEN // SCALE_BLOCK_CE * SCALES_PER_ROW)
        + part * BLOCK_N // SCALE_BLOCK_CE * SCALES_PER_ROW
    )
    total = zeros_accumulator(BLOCK_M, BLOCK_N, SWAP_AB)
    of_row = tl.load(hidden_scale + pair * parts, mask=real, other=0.0)
    for step in range(parts):
        factor = broadcast_rows(of_row, SWAP_AB)
        more = real & (step + 1 < parts)  # asked for a step ahead
        of_row = tl.load(hidden_scale + pair * parts + step + 1, mask=more, other=0.0)
        a = tl.load(left + step * BLOCK_K, mask=real[:, None], other=0.0)
        w = tl.load(right + step * BLOCK_K)
        if SCALES_PER_ROW > 0:
            factor *= tl.load(by_block + step * BLOCK_K // SCALE_BLOCK_CE)
        total += fp8_dot(a, w, SWAP_AB) * factor
    if SCALES_PER_ROW == 0:
        total *= broadcast_columns(tl.load(scale + expert * HIDDEN + column), SWAP_AB)
    if SWAP_AB:
        total = tl.trans(total)
    total *= tl.load(topk_weights + pair, mask=real, other=0.0).to(tl.float32)[:, None]
    tl.store(out + row[:, None] * HIDDEN + column[None, :], total, mask=real[:, None])


def fused_experts_w8a8_by_pair(
    x: Fp8Scaled,
    gate_up: Fp8Scaled,
    down: Fp8Scaled,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_range: tuple[int, int] = (0, 0),
    config: MoeConfig | None = None,
) -> torch.Tensor:
    """bfloat16 [T, top_k, hidden], for `moe.sums`: each token's experts, times their weights.

    x [T, hidden], 128 to a scale; gate_up [experts, 2 n, hidden], gate first; down [experts,
    hidden, n]; hidden and n are multiples of 128. weights, any float dtype, and chosen int, [T,
    top_k]. span: (the first expert that is given, of how many; 0: these are all); pairs of others
    are not written.
    """
    (tokens, hidden), top_k = x[0].shape, topk_ids.shape[1]
    num_experts, (first, of) = len(down[0]), expert_range
    if tokens == 0:
        return x[1].new_empty(0, top_k, hidden, dtype=torch.bfloat16)
    tile = config or moe_w8a8_config(topk_ids.numel(), of or num_experts)
    plan = moe_align_block_size(topk_ids, num_experts, tile.block_m, first)
    middle = gate_up_gemm_w8a8(x, gate_up, plan, top_k, tile)
    by_pair = down_gemm_w8a8(middle, down, topk_weights.contiguous(), plan, tile)
    return by_pair.view(tokens, top_k, hidden)


def gate_up_gemm_w8a8(
    x: Fp8Scaled, matrices: Fp8Scaled, alignment: MoeAlignment, top_k: int, config: MoeConfig
) -> Fp8Scaled:
    """[T * top_k, n], MIDDLE to a scale: SwiGLU of each pair's token, by its expert; plan in blocks
    of tile.rows."""
    (values, scale), weight = x, matrices[0]
    (tokens, hidden), inter, cut = values.shape, weight.shape[1] // 2, config.gate_up
    pairs, blocks = tokens * top_k, alignment.expert_ids.shape[0]
    room = Fp8Output.empty(values.device, pairs, inter, INTERMEDIATE_GROUP)
    _gate_up_w8a8_kernel[(blocks * (inter // cut.block_n),)](
        as_kernel_arg(values), scale, as_kernel_arg(weight), matrices[1], *room.kernel_args,
        alignment.sorted_pair_ids, alignment.expert_ids, alignment.num_padded_pairs, pairs, blocks,
        TOP_K=top_k, HIDDEN=hidden, INTERMEDIATE=inter, GROUP_SIZE=INTERMEDIATE_GROUP,
        E4M3_MAX=E4M3_MAX, MIN_SCALE=MIN_SCALE,
        **_kernel_options(matrices, alignment, cut, config.group_m),
    )  # fmt: skip
    return room.result


def down_gemm_w8a8(
    x: Fp8Scaled,
    matrices: Fp8Scaled,
    topk_weights: torch.Tensor,
    alignment: MoeAlignment,
    config: MoeConfig,
) -> torch.Tensor:
    """bfloat16 [pairs, hidden]: factors[pair], contiguous, times the product of x[pair] [pairs, n]
    with its expert's matrix; a scale to tile.down.depth values of x."""
    (values, scale), weight = x, matrices[0]
    (pairs, inter), (held, hidden, _) = values.shape, weight.shape
    cut, blocks = config.down, alignment.expert_ids.shape[0]
    out = torch.empty(pairs, hidden, dtype=torch.bfloat16, device=values.device)
    _down_w8a8_kernel[(blocks * (hidden // cut.block_n),)](
        as_kernel_arg(values), scale, as_kernel_arg(weight), matrices[1], topk_weights, out,
        alignment.sorted_pair_ids, alignment.expert_ids, alignment.num_padded_pairs, pairs, blocks,
        held, HIDDEN=hidden, INTERMEDIATE=inter,
        **_kernel_options(matrices, alignment, cut, config.group_m),
    )  # fmt: skip
    return out


def _kernel_options(
    matrices: Fp8Scaled, plan: MoeAlignment, cut: MoeGemmConfig, group: int
) -> dict[str, int]:
    """What both products are launched with. SCALES_PER_ROW: with a scale of their own, in a row of a
    matrix; 0 where rows have one."""
    weight, scale = matrices
    by_row = scale.shape[1] == weight.shape[1]
    options = {
        "BLOCK_M": plan.block_m,
        "GROUP_M": group,
        "SCALES_PER_ROW": 0 if by_row else scale.shape[2],
    }
    return options | launch_options(cut) | pdl_options(weight.device)


def fused_experts_w8a8_reference(
    x: Fp8Scaled,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
) -> torch.Tensor:
    """The same in plain torch, float32, of matrices as the numbers that they stand for."""
    rows = x[0].float() * x[1].repeat_interleave(formats.SCALE_BLOCK, 1)
    out = rows.new_zeros(*topk_ids.shape, rows.shape[1])
    for expert in topk_ids.unique().tolist():
        token, choice = torch.nonzero(topk_ids == expert, as_tuple=True)
        gate, up = (rows[token] @ gate_up[expert].T).chunk(2, dim=-1)
        middle, scale = quantize_groups_reference(
            torch.nn.functional.silu(gate) * up, INTERMEDIATE_GROUP
        )
        wide = middle.float() * scale.repeat_interleave(INTERMEDIATE_GROUP, 1)
        out[token, choice] = wide @ down[expert].T * topk_weights[token, choice, None].float()
    return out
