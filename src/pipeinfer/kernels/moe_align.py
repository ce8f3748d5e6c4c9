"""Puts (token, expert) pairs into the order of their experts, padded to blocks, on the device.

What a grouped matrix product needs to know; needs triton. Knows chosen experts, no weights and no
tokens. Deterministic: pairs of one expert keep their order, and nothing is counted with atomics.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

CHUNK = 16384  # pairs looked at in one go


@dataclass(frozen=True)
class Alignment:
    """`pairs` is cut into blocks of `block` entries; all pairs of a block have one expert.

    pairs int32 [capacity]: pair t * top_k + j is choice j of token t; entries that fill up a block
    hold the number of pairs. experts int32 [capacity / block]: of each block. used int32 [1]: how
    many entries of `pairs` mean anything; blocks past that are undefined.
    """

    pairs: torch.Tensor
    experts: torch.Tensor
    used: torch.Tensor
    block: int


@triton.jit
def _count(chosen, counts, size, first, CHUNK: tl.constexpr):
    """Program e counts the pairs of expert first + e."""
    expert = tl.program_id(0)
    name = first + expert
    found = tl.zeros((CHUNK,), tl.int32)
    for begin in range(0, size, CHUNK):
        index = begin + tl.arange(0, CHUNK)
        found += (tl.load(chosen + index, mask=index < size, other=-1) == name).to(tl.int32)
    tl.store(counts + expert, tl.sum(found, axis=0))


@triton.jit
def _scatter(
    chosen, counts, pairs, experts, used, size, num_experts, name_of_0,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program e writes the blocks of its expert, behind those of the experts before it."""
    expert = tl.program_id(0)
    index = tl.arange(0, EXPERTS)
    blocks = (tl.load(counts + index, mask=index < num_experts, other=0) + BLOCK - 1) // BLOCK
    first = tl.sum(tl.where(index < expert, blocks, 0), axis=0)
    mine = tl.sum(tl.where(index == expert, blocks, 0), axis=0)
    if expert == 0:
        tl.store(used, tl.sum(blocks, axis=0) * BLOCK)
    for block in range(first, first + mine):
        tl.store(experts + block, expert)
    at = first * BLOCK
    for begin in range(0, size, CHUNK):
        pair = begin + tl.arange(0, CHUNK)
        found = tl.load(chosen + pair, mask=pair < size, other=-1) == name_of_0 + expert
        rank = tl.cumsum(found.to(tl.int32), axis=0)
        tl.store(pairs + at + rank - 1, pair, mask=found)
        at += tl.sum(found.to(tl.int32), axis=0)
    rest = at + tl.arange(0, BLOCK)
    tl.store(pairs + rest, rest * 0 + size, mask=rest < (first + mine) * BLOCK)


def align(chosen: torch.Tensor, num_experts: int, block: int, first: int = 0) -> Alignment:
    """Groups the pairs of `chosen`, int [T, top_k]. No synchronisation.

    Expert e of the result is `first` + e of `chosen`; pairs of others are left out.
    """
    size = chosen.numel()
    chosen = chosen.contiguous()
    blocks = min(size, num_experts + size // block)
    counts = torch.empty(num_experts, dtype=torch.int32, device=chosen.device)
    result = Alignment(
        pairs=torch.empty(blocks * block, dtype=torch.int32, device=chosen.device),
        experts=torch.empty(blocks, dtype=torch.int32, device=chosen.device),
        used=torch.zeros(1, dtype=torch.int32, device=chosen.device),
        block=block,
    )
    chunk = min(CHUNK, max(triton.next_power_of_2(size), 16))
    warps = 16 if chunk > 4096 else 8
    _count[(num_experts,)](chosen, counts, size, first, CHUNK=chunk, num_warps=warps)
    _scatter[(num_experts,)](
        chosen, counts, result.pairs, result.experts, result.used, size, num_experts, first,
        EXPERTS=triton.next_power_of_2(num_experts), BLOCK=block, CHUNK=chunk, num_warps=warps,
    )  # fmt: skip
    return result


def align_reference(
    chosen: torch.Tensor, num_experts: int, block: int, first: int = 0
) -> Alignment:
    """The same, expert by expert on the host; no longer than what is used."""
    flat = chosen.flatten().cpu() - first
    pairs, experts = [], []
    for expert in range(num_experts):
        mine = torch.nonzero(flat == expert).flatten()
        blocks = -(-len(mine) // block)
        filling = mine.new_full((blocks * block - len(mine),), len(flat))
        pairs.append(torch.cat((mine, filling)))
        experts += [expert] * blocks
    ordered = torch.cat(pairs).to(torch.int32)
    used = torch.tensor([len(ordered)], dtype=torch.int32)
    return Alignment(ordered, torch.tensor(experts, dtype=torch.int32), used, block)
