"""The products of low-rank adapters, of many adapters in one step: shrink, then expand.

    low[t] = A[a] x[t]          [T, modules * rank], in parts of the depth (shrink)
    y[t] += B[a] low[t]         (expand)

a is the adapter slot of token t, read on the device; blocks of tokens without an adapter end at
once. Each token's sums are its own, in an order that depends on the layer's shape alone. Needs
triton. layers/lora.py has the same for the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false

BLOCK_TOKENS = 16  # tokens of a program: the fewest that tensor cores take
LARGE_RANK = 64  # above it blocks of A and B are smaller, so that they fit into shared memory
MIN_RANK = 16  # columns that tensor cores take at least; smaller ranks are padded
SPLIT_DEPTH = 1024  # depth of one part of shrink's sums
MAX_SPLITS = 16


@triton.jit
def _shrink_kernel(
    x, a, token_adapters, low, tokens, x_stride, DEPTH: tl.constexpr, RANK: tl.constexpr,
    MODULES: tl.constexpr, ADAPTER_SLOTS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One block of tokens, one module, one part of the depth: low [SPLITS, T, MODULES * RANK]."""
    block, module, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = block * BLOCK_T + tl.arange(0, BLOCK_T)
    slot = tl.load(token_adapters + row, mask=row < tokens, other=0)
    if tl.max(slot, axis=0) == 0:
        return
    rank, depth = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_K)
    per_split: tl.constexpr = (DEPTH + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
    total = tl.zeros((BLOCK_T, BLOCK_R), dtype=tl.float32)
    for one in range(1, ADAPTER_SLOTS + 1):
        mine = slot == one
        if tl.sum(mine.to(tl.int32), axis=0) > 0:
            line = rank.to(tl.int64) + ((one - 1) * MODULES + module) * RANK
            for begin in range(0, per_split, BLOCK_K):
                at = split * per_split + begin + depth
                inside = at < DEPTH
                left = tl.load(
                    x + row.to(tl.int64)[:, None] * x_stride + at[None, :],
                    mask=mine[:, None] & inside[None, :], other=0.0,
                )  # fmt: skip
                right = tl.load(
                    a + line[:, None] * DEPTH + at[None, :],
                    mask=(rank < RANK)[:, None] & inside[None, :], other=0.0,
                )  # fmt: skip
                total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    width: tl.constexpr = MODULES * RANK
    place = (split * tokens + row).to(tl.int64)[:, None] * width + module * RANK + rank[None, :]
    tl.store(low + place, total, mask=(row < tokens)[:, None] & (rank < RANK)[None, :])


@triton.jit
def _expand_kernel(
    low, b, token_adapters, y, tokens, y_stride, first, end, module, WIDTH: tl.constexpr,
    RANK: tl.constexpr, MODULES: tl.constexpr, ADAPTER_SLOTS: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One block of tokens, one block of the module's columns first .. end - 1 of y [T, WIDTH]."""
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    slot = tl.load(token_adapters + row, mask=row < tokens, other=0)
    if tl.max(slot, axis=0) == 0:
        return
    rank = tl.arange(0, BLOCK_R)
    column = first + tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    there = column < end
    has = (row < tokens) & (slot > 0)
    sums = tl.zeros((BLOCK_T, BLOCK_R), dtype=tl.float32)
    for split in range(SPLITS):
        at = (split * tokens + row).to(tl.int64)[:, None] * (MODULES * RANK)
        sums += tl.load(
            low + at + module * RANK + rank[None, :],
            mask=has[:, None] & (rank < RANK)[None, :], other=0.0,
        )  # fmt: skip
    rounded = sums.to(b.dtype.element_ty)
    added = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    for one in range(1, ADAPTER_SLOTS + 1):
        mine = slot == one
        if tl.sum(mine.to(tl.int32), axis=0) > 0:
            line = column.to(tl.int64) + (one - 1) * WIDTH
            right = tl.load(
                b + line[:, None] * RANK + rank[None, :],
                mask=there[:, None] & (rank < RANK)[None, :], other=0.0,
            )  # fmt: skip
            left = tl.where(mine[:, None], rounded, tl.zeros_like(rounded))
            added = tl.dot(left, tl.trans(right), added, input_precision="ieee")
    place = y + row.to(tl.int64)[:, None] * y_stride + column[None, :]
    mask = has[:, None] & there[None, :]
    before = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    tl.store(place, (before + added).to(y.dtype.element_ty), mask=mask)


def block_sizes(rank: int) -> tuple[int, int]:
    """(columns of x and A that shrink takes at a time, rows of B that expand takes)."""
    return (32, 32) if rank > LARGE_RANK else (128, 128)


def add_low_rank(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    parts: tuple[slice, ...],
    token_adapters: torch.Tensor,
    y: torch.Tensor,
) -> None:
    """Adds to y [T, out] what the tokens' adapters make of x [T, in]; rows may be strided.

    a: [adapter slots, modules * rank, in]. b: [adapter slots, out, rank]. parts: where each
    module's rows are in the product. token_adapters: int32 [T], adapter slots from 1 on; 0: none.
    """
    (tokens, depth), (adapter_slots, width, rank), modules = x.shape, b.shape, len(parts)
    if not tokens:
        return
    splits = min(triton.cdiv(depth, SPLIT_DEPTH), MAX_SPLITS)
    low = torch.empty(splits, tokens, modules * rank, dtype=torch.float32, device=x.device)
    blocks, block_r = triton.cdiv(tokens, BLOCK_TOKENS), max(triton.next_power_of_2(rank), MIN_RANK)
    block_k, block_n = block_sizes(rank)
    stages = 2 if rank > LARGE_RANK else 3
    _shrink_kernel[(blocks, modules, splits)](
        x, a, token_adapters, low, tokens, x.stride(0), DEPTH=depth, RANK=rank, MODULES=modules,
        ADAPTER_SLOTS=adapter_slots, SPLITS=splits, BLOCK_T=BLOCK_TOKENS, BLOCK_K=block_k,
        BLOCK_R=block_r, num_stages=stages,
    )  # fmt: skip
    for module, part in enumerate(parts):
        _expand_kernel[(blocks, triton.cdiv(part.stop - part.start, block_n))](
            low, b, token_adapters, y, tokens, y.stride(0), part.start, part.stop, module,
            WIDTH=width, RANK=rank, MODULES=modules, ADAPTER_SLOTS=adapter_slots, SPLITS=splits,
            BLOCK_T=BLOCK_TOKENS, BLOCK_N=block_n, BLOCK_R=block_r, num_stages=stages,
        )  # fmt: skip
