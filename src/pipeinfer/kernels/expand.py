"""From a step's rows to everything that is indexed by row, token, sample or page, on the device.

Rows name slots; what lies there (a page table, fields, last tokens) is read where it lies. Two
Triton launches, no host synchronisation, grids that depend on capacities only: fit for a CUDA
graph. Needs triton. Knows rows, slots and pages; no request and no attention backend.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

BLOCK = 1024  # tokens, pages or words that a program writes at a time
MOST_PROGRAMS = 8  # that share one row, or what is to be written
NOBODY = -(2**31)  # in Rows.entries: the row has no entry
NOWHERE = -1  # in Expanded.places: keep nothing of this token
_NOBODY = tl.constexpr(NOBODY)


@dataclass(frozen=True)
class Rows:
    """A step's rows, int32: slots, starts, counts [R], and tokens [T or more], each where it stands
    in Expanded, -1 for last_token[slot]. A row of count 0 is nobody's: it must have the last slot
    and start 0.

    entries [R]: which of the S entries for sampling is the row's; -1 - e: entry e is nobody's;
    NOBODY: none. Together they name each entry once.
    """

    slots: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    entries: torch.Tensor
    tokens: torch.Tensor


@dataclass(frozen=True)
class BySlot:
    """What lies on the device by slot; the last slot is nobody's.

    table: int32 [slots, P]. fields: int32 words, field after field, `wide` of two words a slot and
    then `narrow` of one. last_token: int64 [slots].
    """

    table: torch.Tensor
    fields: torch.Tensor
    last_token: torch.Tensor
    wide: int
    narrow: int


@dataclass(frozen=True)
class Expanded:
    """What a step's kernels index with; R rows, T tokens, S entries and N pages are capacities.

    positions, places (page * page_size + offset), ids: int64 [T]. offsets: int32 [R + 1], where a
    row's tokens begin; prompt_offsets: int32 [prompts + 1], the same of the rows behind the
    decodes, less `base`. lengths, last_page: int32 [R], tokens after the step, and in the last
    page. begins: int32 [R + 1], where a row's pages begin in `listed` int32 [N], row after row, or
    where that has no room, in the page table of all slots. gathered: int32 [n, P], pages of the
    last n rows. last: int64 [S], the token that an entry samples behind; write_slots,
    sample_positions: int64 [S]; fields: as BySlot's, by entry.
    """

    positions: torch.Tensor
    places: torch.Tensor
    ids: torch.Tensor
    offsets: torch.Tensor
    prompt_offsets: torch.Tensor
    lengths: torch.Tensor
    last_page: torch.Tensor
    begins: torch.Tensor
    listed: torch.Tensor
    gathered: torch.Tensor
    last: torch.Tensor
    write_slots: torch.Tensor
    sample_positions: torch.Tensor
    fields: torch.Tensor


@triton.jit
def _write(pairs, count, words, BLOCK: tl.constexpr):
    many = 2 * tl.load(count)
    step = tl.num_programs(0) * BLOCK
    for begin in range(tl.program_id(0) * BLOCK, many // 2, step):
        at = begin + tl.arange(0, BLOCK)
        inside = 2 * at < many
        place = tl.load(pairs + 2 * at, mask=inside, other=0)
        value = tl.load(pairs + 2 * at + 1, mask=inside, other=0)
        tl.store(words + place, value, mask=inside)


def write_words(pairs: torch.Tensor, count: torch.Tensor, words: torch.Tensor) -> None:
    """words[place] = value for the first `count` int32 [1] of the (place, value) in `pairs`, int32
    [2n], of which no two have one place and different values. All on one device."""
    _write[(MOST_PROGRAMS,)](pairs, count, words, BLOCK=BLOCK, num_warps=4)


@triton.jit
def _before(starts, counts, row, PAGE: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr):
    """(tokens, pages) of the rows before `row`."""
    tokens = tl.zeros((BLOCK,), tl.int32)
    pages = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, row, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        inside = index < row
        count = tl.load(counts + index, mask=inside, other=0)
        length = tl.load(starts + index, mask=inside & (count > 0), other=0)
        count = tl.where(count > 0, count, PAD)
        tokens += tl.where(inside, count, 0)
        pages += tl.where(inside, (length + count + PAGE - 1) // PAGE, 0)
    return tl.sum(tokens), tl.sum(pages)


@triton.jit
def _tokens(
    tokens, last_token, slot, pages, positions, places, ids, first, start, count, known, capacity,
    step, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """This program's share of one row's `count` tokens; from `known` on they are nobody's."""
    for begin in range(tl.program_id(1) * BLOCK, count, step):
        index = begin + tl.arange(0, BLOCK)
        at = first + index
        inside = (index < count) & (at < capacity)
        real = inside & (index < known)
        position = tl.where(index < known, start + index, 0)
        page = tl.load(pages + position // PAGE, mask=real, other=0).to(tl.int64)
        place = tl.where(real, page * PAGE + position % PAGE, -1)
        token = tl.load(tokens + at, mask=real, other=0).to(tl.int64)
        last = tl.load(last_token + slot + 0 * index, mask=real & (token < 0), other=0)
        tl.store(positions + at, position, mask=inside)
        tl.store(places + at, place, mask=inside)
        tl.store(ids + at, tl.where(token < 0, last, token), mask=inside)


@triton.jit
def _sample(
    its_entry, slot, position, token, state, last, write_slots, sample_positions, fields, slots,
    entries, WIDE: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """One entry for sampling, the row's or nobody's, if there is any."""
    entry = tl.load(its_entry)
    real, any = entry >= 0, entry != _NOBODY
    at = tl.where(real, entry, -1 - entry)
    slot = tl.where(real, slot, slots - 1)
    tl.store(last + at, tl.where(real, token, 0), mask=any)
    tl.store(write_slots + at, slot, mask=any)
    tl.store(sample_positions + at, tl.where(real, position, 0), mask=any)
    for field in tl.static_range(WIDE):
        for word in tl.static_range(2):
            value = tl.load(state + 2 * (field * slots + slot) + word)
            tl.store(fields + 2 * (field * entries + at) + word, value, mask=any)
    for field in tl.static_range(NARROW):
        value = tl.load(state + (2 * WIDE + field) * slots + slot)
        tl.store(fields + (2 * WIDE + field) * entries + at, value, mask=any)


# Sizes change from step to step; compiling anew for each kind of number would hold up the step.
SIZES = ["rows", "capacity", "list_room", "slot_count", "width", "decodes", "base",
         "first_gathered", "entry_count"]  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def _expand(
    slots, starts, counts, entries, tokens, table, state, last_token,
    positions, places, ids, offsets, prompt_offsets, lengths, last_page, begins, listed, gathered,
    last, write_slots, sample_positions, fields,
    rows, capacity, list_room, slot_count, width, decodes, base, first_gathered, entry_count,
    PAGE: tl.constexpr, PAD: tl.constexpr, LISTED: tl.constexpr, WIDE: tl.constexpr,
    NARROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, share of the row); the row after the last fills what tokens are left over."""
    row = tl.program_id(0)
    step, alone = tl.num_programs(1) * BLOCK, tl.program_id(1) == 0
    first, first_page = _before(starts, counts, row, PAGE, PAD, BLOCK)
    inside = row < rows
    known = tl.load(counts + row, mask=inside, other=0)
    start = tl.load(starts + row, mask=known > 0, other=0)
    slot = tl.load(slots + row, mask=inside, other=0)
    count = tl.where(inside, tl.where(known > 0, known, PAD), capacity - first)
    pages = table + slot.to(tl.int64) * width
    tl.store(offsets + row, first, mask=alone)
    tl.store(prompt_offsets + row - decodes, first - base, mask=alone & (row >= decodes))
    tl.store(begins + row, first_page if LISTED else slot * width, mask=alone)
    _tokens(tokens, last_token, slot, pages, positions, places, ids, first, start, count, known,
            capacity, step, PAGE, BLOCK)  # fmt: skip
    if inside:
        length = start + count
        used = (length + PAGE - 1) // PAGE
        tl.store(lengths + row, length, mask=alone)
        tl.store(last_page + row, length - (used - 1) * PAGE, mask=alone)
        for begin in range(tl.program_id(1) * BLOCK, used, step):
            index = begin + tl.arange(0, BLOCK)
            page = tl.load(pages + index, mask=index < used, other=0)
            if LISTED:
                shown = (index < used) & (first_page + index < list_room)
                tl.store(listed + first_page + index, page, mask=shown)
            target = gathered + (row - first_gathered).to(tl.int64) * width + index
            tl.store(target, page, mask=index < tl.where(row >= first_gathered, used, 0))
        if alone:
            _sample(entries + row, slot, start + count, first + count - 1, state, last, write_slots,
                    sample_positions, fields, slot_count, entry_count, WIDE, NARROW)  # fmt: skip


def expand(
    rows: Rows, held: BySlot, page_size: int, padding: int, base: int, out: Expanded
) -> None:
    """Fills `out` from a step's rows and what lies in their slots.

    padding: tokens and keys, 0 or 1, of a row that is nobody's; they are id 0 at position 0,
    nowhere, and so are the tokens of `out` past the last row's. `out` must hold R rows; with room
    in `listed` for the pages of all of them, or for none.
    """
    count, capacity = len(rows.counts), len(out.positions)
    prompts, width = len(out.prompt_offsets) - 1, held.table.shape[1]
    shares = min(triton.cdiv(max(capacity, width), BLOCK), MOST_PROGRAMS)
    _expand[(count + 1, shares)](
        rows.slots, rows.starts, rows.counts, rows.entries, rows.tokens,
        held.table, held.fields, held.last_token,
        out.positions, out.places, out.ids, out.offsets, out.prompt_offsets, out.lengths,
        out.last_page, out.begins, out.listed, out.gathered, out.last, out.write_slots,
        out.sample_positions, out.fields,
        count, capacity, len(out.listed), len(held.table), width, count - prompts, base,
        count - len(out.gathered), len(out.last), PAGE=page_size, PAD=padding,
        LISTED=len(out.listed) > 0, WIDE=held.wide, NARROW=held.narrow, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


def expand_reference(
    rows: Rows, held: BySlot, page_size: int, padding: int, base: int, out: Expanded
) -> None:
    """The same, row by row."""
    prompts, nobody = len(out.prompt_offsets) - 1, len(held.table) - 1
    total, at, at_page = len(rows.counts), 0, 0
    for tensor, value in ((out.positions, 0), (out.places, NOWHERE), (out.ids, 0)):
        tensor[:] = value
    for row, known in enumerate(rows.counts.tolist()):
        slot, start = int(rows.slots[row]), int(rows.starts[row]) if known else 0
        count = known or padding
        length = start + count
        used = -(-length // page_size)
        pages = held.table[slot, :used]
        span = slice(at, at + known)
        position = out.positions[span] = torch.arange(start, start + known).to(pages.device)
        out.places[span] = pages[position // page_size].long() * page_size + position % page_size
        ids = rows.tokens[span].long()
        out.ids[span] = torch.where(ids < 0, held.last_token[slot], ids)
        out.offsets[row], out.lengths[row] = at, length
        out.last_page[row] = length - (used - 1) * page_size
        if row >= total - prompts:
            out.prompt_offsets[row - (total - prompts)] = at - base
        out.begins[row] = at_page if len(out.listed) else slot * held.table.shape[1]
        if len(out.listed):
            out.listed[at_page : at_page + used] = pages
        if row >= total - len(out.gathered):
            out.gathered[row - (total - len(out.gathered)), :used] = pages
        entry = int(rows.entries[row])
        if entry != NOBODY:
            real, entry = entry >= 0, entry if entry >= 0 else -1 - entry
            out.last[entry] = at + count - 1 if real else 0
            out.write_slots[entry] = slot if real else nobody
            out.sample_positions[entry] = length if real else 0
            words = _words(held, entry, len(out.last))
            out.fields[words] = held.fields[_words(held, slot if real else nobody, len(held.table))]
        at, at_page = at + count, at_page + used
    last = at, at - base, at_page if len(out.listed) else 0
    out.offsets[total], out.prompt_offsets[prompts], out.begins[total] = last


def _words(held: BySlot, index: int, many: int) -> list[int]:
    """Where the fields of one of `many` slots or entries stand."""
    wide = [2 * (field * many + index) + word for field in range(held.wide) for word in range(2)]
    return wide + [(2 * held.wide + field) * many + index for field in range(held.narrow)]
