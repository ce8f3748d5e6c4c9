"""Puts (token, expert) pairs into the order of their experts, padded to blocks, on the device.

What a grouped matrix product needs to know; needs triton. Knows chosen experts, no weights and no
tokens. Deterministic: pairs of one expert keep their order. One launch: each program counts
everything, which costs less than a second launch or a look at another program's counts.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pipeinfer.kernels.early import pdl_options

CHUNK = 16384  # pairs looked at in one go


@dataclass(frozen=True)
class MoeAlignment:
    """`pairs` is cut into blocks of `block` entries; all pairs of a block have one expert.

    pairs int32 [capacity]: pair t * top_k + j is choice j of token t; entries that fill up a block
    hold the number of pairs. experts int32 [capacity / block]: of each block. used int32 [1]: how
    many entries of `pairs` mean anything; blocks past that are undefined.
    """

    sorted_pair_ids: torch.Tensor
    expert_ids: torch.Tensor
    num_padded_pairs: torch.Tensor
    block_m: int


@triton.jit(do_not_specialize=["size", "num_experts", "name_of_0"])
def _align(
    chosen, pairs, experts, used, size, num_experts, name_of_0, EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program e counts the pairs of all experts, and writes the blocks of its own, behind those of
    the experts before it."""
    if EARLY:
        gdc_wait()  # for the choice
        gdc_launch_dependents()
    expert = tl.program_id(0)
    index = tl.arange(0, EXPERTS)
    counts = tl.zeros((EXPERTS,), tl.int32)
    for begin in range(0, size, CHUNK):
        pair = begin + tl.arange(0, CHUNK)
        held = tl.load(chosen + pair, mask=pair < size, other=-1).to(tl.int32) - name_of_0
        counted = (pair < size) & (held >= 0) & (held < num_experts)
        counts += tl.histogram(held, EXPERTS, mask=counted)
    blocks = (counts + BLOCK - 1) // BLOCK
    first = tl.sum(tl.where(index < expert, blocks, 0), axis=0)
    mine = tl.sum(tl.where(index == expert, blocks, 0), axis=0)
    if expert == 0:
        tl.store(used, tl.sum(blocks, axis=0) * BLOCK)
    for block in range(first, first + mine):
        tl.store(experts + block, expert)
    at = first * BLOCK
    for begin in range(0, size, CHUNK):
        pair = begin + tl.arange(0, CHUNK)
        held = tl.load(chosen + pair, mask=pair < size, other=-1).to(tl.int32) - name_of_0
        found = (pair < size) & (held == expert)
        rank = tl.cumsum(found.to(tl.int32), axis=0)
        tl.store(pairs + at + rank - 1, pair, mask=found)
        at += tl.sum(found.to(tl.int32), axis=0)
    rest = at + tl.arange(0, BLOCK)
    tl.store(pairs + rest, rest * 0 + size, mask=rest < (first + mine) * BLOCK)


def moe_align_block_size(
    topk_ids: torch.Tensor, num_experts: int, block_m: int, first_expert: int = 0
) -> MoeAlignment:
    """Groups the pairs of `chosen`, int [T, top_k]. No synchronisation.

    Expert e of the result is `first` + e of `chosen`; pairs of others are left out.
    """
    size = topk_ids.numel()
    topk_ids = topk_ids.contiguous()
    blocks = min(size, num_experts + size // block_m)
    result = MoeAlignment(
        sorted_pair_ids=torch.empty(blocks * block_m, dtype=torch.int32, device=topk_ids.device),
        expert_ids=torch.empty(blocks, dtype=torch.int32, device=topk_ids.device),
        num_padded_pairs=torch.empty(1, dtype=torch.int32, device=topk_ids.device),
        block_m=block_m,
    )
    chunk = min(CHUNK, max(triton.next_power_of_2(size), 16))
    _align[(num_experts,)](
        topk_ids, result.sorted_pair_ids, result.expert_ids, result.num_padded_pairs, size, num_experts, first_expert,
        EXPERTS=triton.next_power_of_2(num_experts), BLOCK=block_m, CHUNK=chunk,
        num_warps=16 if chunk > 4096 else 8, **pdl_options(topk_ids.device),
    )  # fmt: skip
    return result


def moe_align_block_size_reference(
    topk_ids: torch.Tensor, num_experts: int, block_m: int, first_expert: int = 0
) -> MoeAlignment:
    """The same, expert by expert on the host; no longer than what is used."""
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
