"""From a step's rows to everything that is indexed by token or by page, on the device.

One Triton launch, no host synchronisation, a grid that depends on capacities only: fit for a
CUDA graph. Needs triton. Knows rows, positions and pages; no request and no attention backend.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

BLOCK = 1024  # tokens or pages that a program writes at a time
MOST_PROGRAMS = 8  # that share one row
DUMMY_PAGE = 0


@dataclass(frozen=True)
class Expanded:
    """What a step's kernels index with; R rows, T tokens and N page indices are capacities.

    positions int64 [T]; places int64 [T], page * page_size + offset; ids int64 [T].
    token_offsets int32 [R + 1]: row r's tokens are token_offsets[r] .. token_offsets[r + 1] - 1.
    page_indices int32 [N]: row r's pages from page_offsets[r] on (int32 [R + 1]), no gaps.
    seq_lens int32 [R]: tokens after the step; last_page_len int32 [R]: tokens in the last page.
    """

    positions: torch.Tensor
    places: torch.Tensor
    ids: torch.Tensor
    token_offsets: torch.Tensor
    page_indices: torch.Tensor
    page_offsets: torch.Tensor
    seq_lens: torch.Tensor
    last_page_len: torch.Tensor


def allocate(rows: int, tokens: int, page_indices: int, device: torch.device | str) -> Expanded:
    """Buffers for steps of up to `rows`, `tokens` and `page_indices`, padding included."""

    def zeros(size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    return Expanded(
        positions=zeros(tokens, torch.int64),
        places=zeros(tokens, torch.int64),
        ids=zeros(tokens, torch.int64),
        token_offsets=zeros(rows + 1, torch.int32),
        page_indices=zeros(page_indices, torch.int32),
        page_offsets=zeros(rows + 1, torch.int32),
        seq_lens=zeros(rows, torch.int32),
        last_page_len=zeros(rows, torch.int32),
    )


@triton.jit
def _before(starts, counts, row, rows, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """(tokens, pages) of the rows before `row`; a padding row counts as one of each."""
    tokens = tl.zeros((BLOCK,), tl.int32)
    pages = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, row, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        inside = index < row
        count = tl.load(counts + index, mask=inside, other=0)
        length = tl.load(starts + index, mask=inside, other=0) + count
        length = tl.where(count > 0, length, 1)
        tokens += tl.where(inside, tl.maximum(count, 1), 0)
        pages += tl.where(inside, (length + PAGE - 1) // PAGE, 0)
    return tl.sum(tokens), tl.sum(pages)


@triton.jit
def _tokens(
    tokens, last_token, slot, pages, positions, places, ids, first, start, count, known, capacity,
    step, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes this program's share of one row's `count` tokens; from `known` on they are dummies."""
    for begin in range(tl.program_id(1) * BLOCK, count, step):
        index = begin + tl.arange(0, BLOCK)
        at = first + index
        inside = (index < count) & (at < capacity)
        real = inside & (index < known)
        position = tl.where(index < known, start + index, 0)
        page = tl.load(pages + position // PAGE, mask=real, other=0).to(tl.int64)
        token = tl.load(tokens + at, mask=real, other=0).to(tl.int64)
        last = tl.load(last_token + slot + 0 * index, mask=real & (token < 0), other=0)
        tl.store(positions + at, position, mask=inside)
        tl.store(places + at, page * PAGE + position % PAGE, mask=inside)
        tl.store(ids + at, tl.where(token < 0, last, token), mask=inside)


# Sizes change from step to step; compiling anew for each kind of number would hold up the step.
@triton.jit(do_not_specialize=["rows", "capacity", "index_capacity", "pages_stride"])
def _expand(
    pages, starts, counts, slots, tokens, last_token,
    positions, places, ids, token_offsets, page_indices, page_offsets, seq_lens, last_page_len,
    rows, capacity, index_capacity, pages_stride, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, share of the row); the row after the last fills what tokens are left over."""
    row = tl.program_id(0)
    step = tl.num_programs(1) * BLOCK
    first, first_page = _before(starts, counts, row, rows, PAGE, BLOCK)
    tl.store(token_offsets + row, first, mask=tl.program_id(1) == 0)
    tl.store(page_offsets + row, first_page, mask=tl.program_id(1) == 0)
    inside = row < rows
    known = tl.load(counts + row, mask=inside, other=0)
    start = tl.load(starts + row, mask=known > 0, other=0)
    slot = tl.load(slots + row, mask=known > 0, other=0)
    count = tl.where(inside, tl.maximum(known, 1), capacity - first)
    table = pages + row.to(tl.int64) * pages_stride
    _tokens(tokens, last_token, slot, table, positions, places, ids, first, start, count, known,
            capacity, step, PAGE, BLOCK)  # fmt: skip
    if inside:
        length = start + count
        used = (length + PAGE - 1) // PAGE
        tl.store(seq_lens + row, length)
        tl.store(last_page_len + row, length - (used - 1) * PAGE)
        for begin in range(tl.program_id(1) * BLOCK, used, step):
            index = begin + tl.arange(0, BLOCK)
            page = tl.load(table + index, mask=index < tl.where(known > 0, used, 0), other=0)
            at = first_page + index
            tl.store(page_indices + at, page, mask=(index < used) & (at < index_capacity))


def expand(
    pages: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    slots: torch.Tensor,
    tokens: torch.Tensor,
    last_token: torch.Tensor,
    page_size: int,
    out: Expanded,
) -> None:
    """Fills `out` from a step's arrays on its device (see steps/step.py for their meaning).

    pages int32 [R, P], starts, counts, slots int32 [R], tokens int32 [at least the sum of counts]
    with -1 for last_token[slot], last_token int64 [slots]. A row with count 0 is padding: it
    becomes one token, id 0 at position 0 in page 0, whatever else it says; tokens of `out` past
    the last row's become the same. Padding reads no page table and no slot. `out` must hold R rows.
    """
    rows = counts.shape[0]
    capacity = out.positions.shape[0]
    longest = max(capacity, pages.shape[1])
    shares = min(triton.cdiv(longest, BLOCK), MOST_PROGRAMS)
    _expand[(rows + 1, shares)](
        pages, starts, counts, slots, tokens, last_token,
        out.positions, out.places, out.ids, out.token_offsets, out.page_indices, out.page_offsets,
        out.seq_lens, out.last_page_len, rows, capacity, out.page_indices.shape[0],
        pages.stride(0), PAGE=page_size, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


def expand_reference(
    pages: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    slots: torch.Tensor,
    tokens: torch.Tensor,
    last_token: torch.Tensor,
    page_size: int,
    out: Expanded,
) -> None:
    """The same, row by row."""
    at = at_page = 0
    for row, count in enumerate(counts.tolist()):
        start = int(starts[row]) if count else 0
        known = tokens[at : at + count].long() if count else tokens.new_zeros(1).long()
        table = pages[row] if count else torch.full_like(pages[row], DUMMY_PAGE)
        position = torch.arange(start, start + len(known), device=pages.device)
        last = last_token[slots[row]] if count else 0
        span = slice(at, at + len(known))
        out.positions[span] = position
        out.places[span] = table[position // page_size].long() * page_size + position % page_size
        out.ids[span] = torch.where(known < 0, last, known)
        length = start + len(known)
        used = -(-length // page_size)
        out.page_indices[at_page : at_page + used] = table[:used]
        out.seq_lens[row], out.last_page_len[row] = length, length - (used - 1) * page_size
        out.token_offsets[row], out.page_offsets[row] = at, at_page
        at, at_page = at + len(known), at_page + used
    out.token_offsets[len(counts)], out.page_offsets[len(counts)] = at, at_page
    for tensor in (out.positions, out.places, out.ids):
        tensor[at:] = 0
