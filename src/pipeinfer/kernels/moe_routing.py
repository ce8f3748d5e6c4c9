"""Routing of a mixture (MoE): top-k softmax of router logits, and pairs in the order of experts.

A token's experts depend on its own logits alone; source: https://arxiv.org/abs/2101.03961. Grouped
GEMMs want the pairs of a token and an expert sorted by expert, and padded to whole blocks. One
launch each, deterministic: pairs of one expert keep their order. Needs triton. Knows logits and
chosen experts; no router, no weights and no tokens.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pipeinfer.kernels.triton_support import pdl_options

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
    """(weights of `dtype`, experts int32), both [T, top_k], the best first.

    router_logits: any float dtype [T, experts], rows may be strided; or float32 [P, T, experts],
        partial sums whose total is rounded to `dtype`.
    renormalize: weights add up to one, in float32.

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

    sorted_pair_ids: int32 [capacity]; pair t * top_k + j is choice j of token t; entries that pad a
        block hold the number of pairs.
    expert_ids: int32 [capacity / block_m], the expert of each block.
    num_padded_pairs: int32 [1], entries of sorted_pair_ids that count; later blocks are undefined.
    block_m: entries of a block.
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
    """Program e counts the pairs of all experts, and writes the blocks of expert e after those of
    lower experts. Counting everything costs less than a second launch or other programs' counts."""
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

    topk_ids: int [T, top_k].
    num_experts, first_expert: expert e of the result is first_expert + e of topk_ids; pairs of
        experts outside of first_expert .. first_expert + num_experts - 1 are left out.
    block_m: entries of a block.
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
