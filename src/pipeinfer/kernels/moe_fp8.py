"""The experts of a mixture (MoE) with weights and activations in FP8 (W8A8).

The tensor cores of a Hopper multiply e4m3 as it is: no weight is dequantized. Needs triton. Knows
tokens, chosen experts and stacked weights; no router and no layer. Source:
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
from pipeinfer.kernels.elementwise import Fp8Output, quantize_groups_reference, store_quantized_tile
from pipeinfer.kernels.formats import E4M3_MAX, MIN_SCALE
from pipeinfer.kernels.moe import (
    MoeAlignment,
    grouped_tile,
    launch_options,
    moe_align_block_size,
    prefetch_weights,
)
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

# [tokens, hidden] -gate and up, SwiGLU-> [pairs, intermediate] -down, times weight-> [pairs,
# hidden]
#
# Tokens have a scale for each SCALE_BLOCK of their values. Tensor cores add the products of values
# with one scale; these sums are scaled and added in float32, in order. No atomics.

# Values that share a scale between the two GEMMs: few, so that a tile of few columns can quantize
# its own.
INTERMEDIATE_GROUP = 64

# (values in e4m3, float32 scales), both contiguous. Rows [rows, n] have scales [rows, groups];
# weights [experts, rows, columns] have [experts, rows, 1], or for blocks of 128 x 128 [experts,
# rows / 128, columns / 128].
Fp8Scaled = tuple[torch.Tensor, torch.Tensor]


@triton.jit
def _swiglu_halves(both, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """SwiGLU [BLOCK_M, BLOCK_N] of `both` [BLOCK_M, 2 BLOCK_N], gate and up side by side."""
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
    """out[pair] = swiglu(x[token] @ gate.T, x[token] @ up.T), for a tile of pairs and columns.

    - x_scale: [tokens, HIDDEN / BLOCK_K]
    - scale: [experts, 2 INTERMEDIATE] if SCALES_PER_ROW is 0, else [experts, 2 INTERMEDIATE / 128,
      SCALES_PER_ROW]
    - out, out_scale: e4m3 [pairs, INTERMEDIATE], and [pairs, INTERMEDIATE / GROUP_SIZE]
    """
    parts: tl.constexpr = HIDDEN // BLOCK_K
    ups: tl.constexpr = (
        INTERMEDIATE // SCALE_BLOCK_CE * SCALES_PER_ROW
    )  # scales of gate, then of up
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
    both = tl.arange(0, 2 * BLOCK_N)  # columns of gate, and the same columns of up
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
        more = real & (step + 1 < parts)  # loaded a step ahead
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
    """out[pair] = topk_weights[pair] * (hidden[pair] @ weight.T), for one tile of pairs and
    columns.

    - hidden_scale: [pairs, INTERMEDIATE / BLOCK_K]
    - scale: [experts, HIDDEN] if SCALES_PER_ROW is 0, else [experts, HIDDEN / 128, SCALES_PER_ROW]
    """
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
        more = real & (step + 1 < parts)  # loaded a step ahead
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
    """Returns bfloat16 [T, top_k, hidden], for `moe_sum`: each token's experts, times their
    weights.

    - x: [T, hidden], 128 values to a scale
    - gate_up: [experts, 2 n, hidden], gate first
    - down: [experts, hidden, n]. hidden and n are multiples of 128
    - topk_weights: any float dtype [T, top_k]
    - topk_ids: int [T, top_k]
    - expert_range: (first expert of the matrices, number of all experts; 0: the matrices have all).
      Pairs of other experts are not written
    - config: tiles; None: those of tile_configs.py
    """
    (tokens, hidden), top_k = x[0].shape, topk_ids.shape[1]
    num_experts, (first_expert, num_global_experts) = len(down[0]), expert_range
    if tokens == 0:
        return x[1].new_empty(0, top_k, hidden, dtype=torch.bfloat16)
    config = config or moe_w8a8_config(topk_ids.numel(), num_global_experts or num_experts)
    alignment = moe_align_block_size(topk_ids, num_experts, config.block_m, first_expert)
    middle = gate_up_gemm_w8a8(x, gate_up, alignment, top_k, config)
    by_pair = down_gemm_w8a8(middle, down, topk_weights.contiguous(), alignment, config)
    return by_pair.view(tokens, top_k, hidden)


def gate_up_gemm_w8a8(
    x: Fp8Scaled, matrices: Fp8Scaled, alignment: MoeAlignment, top_k: int, config: MoeConfig
) -> Fp8Scaled:
    """Returns [T * top_k, n], INTERMEDIATE_GROUP to a scale: SwiGLU of each pair's token, by its
    expert.

    - alignment: of blocks of config.block_m
    """
    (values, scale), weight = x, matrices[0]
    (tokens, hidden), inter, gemm = values.shape, weight.shape[1] // 2, config.gate_up
    pairs, blocks = tokens * top_k, alignment.expert_ids.shape[0]
    output = Fp8Output.empty(values.device, pairs, inter, INTERMEDIATE_GROUP)
    _gate_up_w8a8_kernel[(blocks * (inter // gemm.block_n),)](
        as_kernel_arg(values), scale, as_kernel_arg(weight), matrices[1], *output.kernel_args,
        alignment.sorted_pair_ids, alignment.expert_ids, alignment.num_padded_pairs, pairs, blocks,
        TOP_K=top_k, HIDDEN=hidden, INTERMEDIATE=inter, GROUP_SIZE=INTERMEDIATE_GROUP,
        E4M3_MAX=E4M3_MAX, MIN_SCALE=MIN_SCALE,
        **_kernel_options(matrices, alignment, gemm, config.group_m),
    )  # fmt: skip
    return output.result


def down_gemm_w8a8(
    x: Fp8Scaled,
    matrices: Fp8Scaled,
    topk_weights: torch.Tensor,
    alignment: MoeAlignment,
    config: MoeConfig,
) -> torch.Tensor:
    """Returns bfloat16 [pairs, hidden], topk_weights[pair] * (x[pair] @ weight.T), by the pair's
    expert.

    - x: [pairs, n], config.down.block_k values to a scale
    - topk_weights: as many as pairs, contiguous
    """
    (values, scale), weight = x, matrices[0]
    (pairs, inter), (num_local_experts, hidden, _) = values.shape, weight.shape
    gemm, blocks = config.down, alignment.expert_ids.shape[0]
    out = torch.empty(pairs, hidden, dtype=torch.bfloat16, device=values.device)
    _down_w8a8_kernel[(blocks * (hidden // gemm.block_n),)](
        as_kernel_arg(values), scale, as_kernel_arg(weight), matrices[1], topk_weights, out,
        alignment.sorted_pair_ids, alignment.expert_ids, alignment.num_padded_pairs, pairs, blocks,
        num_local_experts, HIDDEN=hidden, INTERMEDIATE=inter,
        **_kernel_options(matrices, alignment, gemm, config.group_m),
    )  # fmt: skip
    return out


def _kernel_options(
    matrices: Fp8Scaled, plan: MoeAlignment, gemm: MoeGemmConfig, group: int
) -> dict[str, int]:
    """The launch options of both GEMMs. SCALES_PER_ROW: blocks with a scale in a row of the
    matrix; 0: rows have a scale."""
    weight, scale = matrices
    by_row = scale.shape[1] == weight.shape[1]
    options = {
        "BLOCK_M": plan.block_m,
        "GROUP_M": group,
        "SCALES_PER_ROW": 0 if by_row else scale.shape[2],
    }
    return options | launch_options(gemm) | pdl_options(weight.device)


def fused_experts_w8a8_reference(
    x: Fp8Scaled,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
) -> torch.Tensor:
    """`fused_experts_w8a8_by_pair` in plain torch, float32, of dequantized weights."""
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
