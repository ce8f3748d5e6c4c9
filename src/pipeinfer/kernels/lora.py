"""The products of low-rank adapters, of many adapters in one step: shrink, then expand.

    low[t] = A[a] x[t]          [T, modules * rank], in parts of the depth (shrink)
    y[t] += B[a] low[t]         (expand)

a is the adapter slot of token t, read on the device. Of few tokens, which may have any adapters, a
program has tokens of one adapter, and reads its matrices once; of many, whose neighbours mostly
have the same one, a block of neighbours. Programs without an adapter end at once. Each token's sums
are its own, in an order that depends on the layer's shape alone. Needs triton. layers/lora.py has
the same for the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pipeinfer.kernels.triton_support import pdl_options

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false

BLOCK_TOKENS = 16  # tokens of a program: the fewest that tensor cores take
LARGE_RANK = 64  # above it blocks of A and B are smaller, so that they fit into shared memory
MIN_RANK = 16  # columns that tensor cores take at least; smaller ranks are padded
SPLIT_DEPTH = 512  # depth of one part of shrink's sums
MAX_SPLITS = 16
FEW_TOKENS = 64, 256  # tokens of a step up to which programs are an adapter's, by compilation
MAX_MODULES = 3  # of one launch of expand


@triton.jit
def _rows(
    token_adapters, tokens, ADAPTER_SLOTS: tl.constexpr, BLOCK_T: tl.constexpr, FEW: tl.constexpr
):
    """(tokens of this program, the adapter slot of each, 0 where there is none).

    FEW: the tokens that the step has at most: programs are adapter by adapter, of each as many as
        all tokens need. 0: a block of neighbours.
    """
    program, place = tl.program_id(0), tl.arange(0, BLOCK_T)
    if FEW:
        adapter, wanted = program % ADAPTER_SLOTS + 1, program // ADAPTER_SLOTS * BLOCK_T + place
        every = tl.arange(0, FEW)
        mine = (tl.load(token_adapters + every, mask=every < tokens, other=0) == adapter).to(
            tl.int32
        )
        number = tl.cumsum(mine, 0) - 1  # of a token among its adapter's
        found = (mine[None, :] > 0) & (number[None, :] == wanted[:, None])
        row = tl.sum(tl.where(found, every[None, :], 0), axis=1)
        slot = tl.where(wanted < tl.sum(mine, axis=0), adapter, 0)
    else:
        row = program * BLOCK_T + place
        slot = tl.load(token_adapters + row, mask=row < tokens, other=0)
    return row, slot


@triton.jit
def _shrunk(
    x, a, row, mine, line, split, total, x_stride, DEPTH: tl.constexpr, RANK: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """total [BLOCK_T, BLOCK_R] + x @ a.T of rows where `mine`, over one part of the depth. line:
    the adapter's first row in a."""
    rank, depth = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_K)
    per_split: tl.constexpr = (DEPTH + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
    for begin in range(0, per_split, BLOCK_K):
        at = split * per_split + begin + depth
        inside = at < DEPTH
        left = tl.load(
            x + row.to(tl.int64)[:, None] * x_stride + at[None, :],
            mask=mine[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        right = tl.load(
            a + (line + rank.to(tl.int64))[:, None] * DEPTH + at[None, :],
            mask=(rank < RANK)[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["tokens"])
def _shrink_kernel(
    x, a, token_adapters, low, tokens, x_stride, DEPTH: tl.constexpr, RANK: tl.constexpr,
    MODULES: tl.constexpr, ADAPTER_SLOTS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, FEW: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Some tokens, one module, one part of the depth: low [SPLITS, T, MODULES * RANK]."""
    module, split = tl.program_id(1), tl.program_id(2)
    row, slot = _rows(token_adapters, tokens, ADAPTER_SLOTS, BLOCK_T, FEW)
    if USE_PDL:
        gdc_wait()  # for all that the kernel before it writes
        gdc_launch_dependents()
    adapter = tl.max(slot, axis=0)
    if adapter == 0:
        return
    total = tl.zeros((BLOCK_T, BLOCK_R), dtype=tl.float32)
    if FEW:
        total = _shrunk(
            x, a, row, slot > 0, ((adapter - 1) * MODULES + module) * RANK, split, total, x_stride,
            DEPTH, RANK, SPLITS, BLOCK_K, BLOCK_R,
        )  # fmt: skip
    else:
        for one in range(1, ADAPTER_SLOTS + 1):
            mine = slot == one
            if tl.sum(mine.to(tl.int32), axis=0) > 0:
                total = _shrunk(
                    x, a, row, mine, ((one - 1) * MODULES + module) * RANK, split, total, x_stride,
                    DEPTH, RANK, SPLITS, BLOCK_K, BLOCK_R,
                )  # fmt: skip
    rank, width = tl.arange(0, BLOCK_R), MODULES * RANK
    place = (split * tokens + row).to(tl.int64)[:, None] * width + module * RANK + rank[None, :]
    tl.store(low + place, total, mask=(slot > 0)[:, None] & (rank < RANK)[None, :])


@triton.jit
def _expanded(
    rounded, b, mine, line, added, there, RANK: tl.constexpr, BLOCK_R: tl.constexpr
):  # fmt: skip
    """added [BLOCK_T, BLOCK_N] + rounded @ b.T of rows where `mine`. line: rows of b."""
    rank = tl.arange(0, BLOCK_R)
    right = tl.load(
        b + line[:, None] * RANK + rank[None, :],
        mask=there[:, None] & (rank < RANK)[None, :], other=0.0,
    )  # fmt: skip
    left = tl.where(mine[:, None], rounded, tl.zeros_like(rounded))
    return tl.dot(left, tl.trans(right), added, input_precision="ieee")


@triton.jit(do_not_specialize=["tokens"])
def _expand_kernel(
    low, b, token_adapters, y, tokens, y_stride, first_module, first_0, end_0, first_1, end_1,
    first_2, end_2, WIDTH: tl.constexpr, RANK: tl.constexpr, MODULES: tl.constexpr,
    ADAPTER_SLOTS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, FEW: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Some tokens, one block of the columns of one module in y [T, WIDTH]. first_n, end_n: columns
    of module first_module + n."""
    row, slot = _rows(token_adapters, tokens, ADAPTER_SLOTS, BLOCK_T, FEW)
    block = tl.program_id(1)
    until_1 = tl.cdiv(end_0 - first_0, BLOCK_N)
    until_2 = until_1 + tl.cdiv(end_1 - first_1, BLOCK_N)
    here = (block >= until_1).to(tl.int32) + (block >= until_2).to(tl.int32)
    first = tl.where(here == 0, first_0, tl.where(here == 1, first_1, first_2))
    end = tl.where(here == 0, end_0, tl.where(here == 1, end_1, end_2))
    block -= tl.where(here == 0, 0, tl.where(here == 1, until_1, until_2))
    if USE_PDL:
        gdc_wait()  # for all that the kernel before it writes
        gdc_launch_dependents()
    adapter = tl.max(slot, axis=0)
    if adapter == 0:
        return
    rank = tl.arange(0, BLOCK_R)
    column = first + block * BLOCK_N + tl.arange(0, BLOCK_N)
    there, has = column < end, slot > 0
    sums = tl.zeros((BLOCK_T, BLOCK_R), dtype=tl.float32)
    for split in range(SPLITS):
        at = (split * tokens + row).to(tl.int64)[:, None] * (MODULES * RANK)
        sums += tl.load(
            low + at + (first_module + here) * RANK + rank[None, :],
            mask=has[:, None] & (rank < RANK)[None, :], other=0.0,
        )  # fmt: skip
    rounded = sums.to(b.dtype.element_ty)
    added = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    if FEW:
        line = column.to(tl.int64) + (adapter - 1) * WIDTH
        added = _expanded(rounded, b, has, line, added, there, RANK, BLOCK_R)
    else:
        for one in range(1, ADAPTER_SLOTS + 1):
            mine = slot == one
            if tl.sum(mine.to(tl.int32), axis=0) > 0:
                line = column.to(tl.int64) + (one - 1) * WIDTH
                added = _expanded(rounded, b, mine, line, added, there, RANK, BLOCK_R)
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
    few = next((most for most in FEW_TOKENS if tokens <= most), 0)
    programs = blocks * adapter_slots if few else blocks
    block_k, block_n = block_sizes(rank)
    shared = {
        "RANK": rank, "MODULES": modules, "ADAPTER_SLOTS": adapter_slots, "SPLITS": splits,
        "BLOCK_T": BLOCK_TOKENS, "BLOCK_R": block_r, "FEW": few,
        "num_stages": 2 if rank > LARGE_RANK else 3, **pdl_options(x.device),
    }  # fmt: skip
    _shrink_kernel[(programs, modules, splits)](
        x, a, token_adapters, low, tokens, x.stride(0), DEPTH=depth, BLOCK_K=block_k, **shared
    )
    for first in range(0, modules, MAX_MODULES):
        some = parts[first : first + MAX_MODULES]
        bounds = [bound for part in some for bound in (part.start, part.stop)]
        bounds += [0] * (2 * MAX_MODULES - len(bounds))
        columns = sum(triton.cdiv(part.stop - part.start, block_n) for part in some)
        _expand_kernel[(programs, columns)](
            low, b, token_adapters, y, tokens, y.stride(0), first, *bounds, WIDTH=width,
            BLOCK_N=block_n, **shared,
        )  # fmt: skip
