"""From a step's rows to everything that is indexed by row, token, sample or page, on the device.

Rows name slots; what lies there (a page table, fields, last tokens) is read where it lies. Two
Triton launches, no host synchronisation, grids that depend on capacities only: fit for a CUDA
graph. Needs triton. Knows rows, slots and pages; no request and no attention backend.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pipeinfer.kernels.interface import NO_LOGITS, DeviceStep, SlotTables

INPUTS_BLOCK = 1024  # tokens, pages or words that a program writes at a time
MAX_PROGRAMS_PER_ROW = 8  # that share one row, or what is to be written
_NO_LOGITS = tl.constexpr(NO_LOGITS)


@triton.jit
def _scatter_words_kernel(pairs, count, words, INPUTS_BLOCK: tl.constexpr):
    many = 2 * tl.load(count)
    step = tl.num_programs(0) * INPUTS_BLOCK
    for begin in range(tl.program_id(0) * INPUTS_BLOCK, many // 2, step):
        at = begin + tl.arange(0, INPUTS_BLOCK)
        inside = 2 * at < many
        index = tl.load(pairs + 2 * at, mask=inside, other=0)
        value = tl.load(pairs + 2 * at + 1, mask=inside, other=0)
        tl.store(words + index, value, mask=inside)


def scatter_words(pairs: torch.Tensor, count: torch.Tensor, words: torch.Tensor) -> None:
    """See interface.py, here and below."""
    _scatter_words_kernel[(MAX_PROGRAMS_PER_ROW,)](
        pairs, count, words, INPUTS_BLOCK=INPUTS_BLOCK, num_warps=4
    )


@triton.jit
def _tokens_and_pages_before(
    starts, counts, row, PAGE: tl.constexpr, PAD: tl.constexpr, INPUTS_BLOCK: tl.constexpr
):
    """(tokens, pages) of the rows before `row`."""
    tokens = tl.zeros((INPUTS_BLOCK,), tl.int32)
    pages = tl.zeros((INPUTS_BLOCK,), tl.int32)
    for begin in range(0, row, INPUTS_BLOCK):
        index = begin + tl.arange(0, INPUTS_BLOCK)
        inside = index < row
        count = tl.load(counts + index, mask=inside, other=0)
        length = tl.load(starts + index, mask=inside & (count > 0), other=0)
        count = tl.where(count > 0, count, PAD)
        tokens += tl.where(inside, count, 0)
        pages += tl.where(inside, (length + count + PAGE - 1) // PAGE, 0)
    return tl.sum(tokens), tl.sum(pages)


@triton.jit
def _token_inputs(
    tokens, last_token, slot, pages, positions, places, ids, first, start, count, known, capacity,
    step, PAGE: tl.constexpr, INPUTS_BLOCK: tl.constexpr,
):  # fmt: skip
    """This program's share of one row's `count` tokens; from `known` on they are nobody's."""
    for begin in range(tl.program_id(1) * INPUTS_BLOCK, count, step):
        index = begin + tl.arange(0, INPUTS_BLOCK)
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
def _sampling_inputs(
    its_entry, slot, position, token, state, last, write_slots, sample_positions, fields, slots,
    entries, WIDE: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """One entry for sampling, the row's or nobody's, if there is any."""
    entry = tl.load(its_entry)
    real, any = entry >= 0, entry != _NO_LOGITS
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
UNSPECIALIZED_SIZES = ["rows", "capacity", "list_room", "slot_count", "width", "decodes", "base",
         "first_gathered", "entry_count"]  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALIZED_SIZES)
def _prepare_inputs_kernel(
    slots, starts, counts, entries, tokens, table, state, last_token,
    positions, places, ids, offsets, prompt_offsets, lengths, last_page, begins, listed, gathered,
    last, write_slots, sample_positions, fields,
    rows, capacity, list_room, slot_count, width, decodes, base, first_gathered, entry_count,
    PAGE: tl.constexpr, PAD: tl.constexpr, LISTED: tl.constexpr, WIDE: tl.constexpr,
    NARROW: tl.constexpr, INPUTS_BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, share of the row); the row after the last fills what tokens are left over."""
    row = tl.program_id(0)
    step, alone = tl.num_programs(1) * INPUTS_BLOCK, tl.program_id(1) == 0
    first, first_page = _tokens_and_pages_before(starts, counts, row, PAGE, PAD, INPUTS_BLOCK)
    inside = row < rows
    known = tl.load(counts + row, mask=inside, other=0)
    start = tl.load(starts + row, mask=known > 0, other=0)
    slot = tl.load(slots + row, mask=inside, other=0)
    count = tl.where(inside, tl.where(known > 0, known, PAD), capacity - first)
    pages = table + slot.to(tl.int64) * width
    tl.store(offsets + row, first, mask=alone)
    tl.store(prompt_offsets + row - decodes, first - base, mask=alone & (row >= decodes))
    tl.store(begins + row, first_page if LISTED else slot * width, mask=alone)
    _token_inputs(tokens, last_token, slot, pages, positions, places, ids, first, start, count, known,
            capacity, step, PAGE, INPUTS_BLOCK)  # fmt: skip
    if inside:
        length = start + count
        used = (length + PAGE - 1) // PAGE
        tl.store(lengths + row, length, mask=alone)
        tl.store(last_page + row, length - (used - 1) * PAGE, mask=alone)
        for begin in range(tl.program_id(1) * INPUTS_BLOCK, used, step):
            index = begin + tl.arange(0, INPUTS_BLOCK)
            page = tl.load(pages + index, mask=index < used, other=0)
            if LISTED:
                shown = (index < used) & (first_page + index < list_room)
                tl.store(listed + first_page + index, page, mask=shown)
            target = gathered + (row - first_gathered).to(tl.int64) * width + index
            tl.store(target, page, mask=index < tl.where(row >= first_gathered, used, 0))
        if alone:
            _sampling_inputs(entries + row, slot, start + count, first + count - 1, state, last, write_slots,
                    sample_positions, fields, slot_count, entry_count, WIDE, NARROW)  # fmt: skip


def prepare_inputs(step: DeviceStep, held: SlotTables, page_size: int) -> None:
    count, capacity = len(step.counts), len(step.positions)
    width, listed = held.page_table.shape[1], step.lists_pages
    shares = min(triton.cdiv(max(capacity, width), INPUTS_BLOCK), MAX_PROGRAMS_PER_ROW)
    _prepare_inputs_kernel[(count + 1, shares)](
        step.slots, step.starts, step.counts, step.logits_rows, step.tokens,
        held.page_table, held.sampling_words, held.last_token,
        step.positions, step.slot_mapping, step.input_ids, step.qo_indptr, step.prefill_qo_indptr,
        step.seq_lens, step.last_page_len, step.kv_indptr, step.kv_indices, step.block_table,
        step.logits_indices, step.write_slots, step.sample_positions, step.sampling_words,
        count, capacity, len(step.kv_indices), len(held.page_table), width, step.shape.decodes,
        step.prefill_query_base, count - len(step.block_table), step.num_logits, PAGE=page_size,
        PAD=step.padding_row_tokens, LISTED=listed, WIDE=held.num_wide, NARROW=held.num_narrow, INPUTS_BLOCK=INPUTS_BLOCK,
        num_warps=4,
    )  # fmt: skip
