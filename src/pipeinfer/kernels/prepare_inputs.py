"""Makes a step's input tensors on the device: positions, slot mapping, input ids, indptrs, tables.

Rows name slots; the page table, sampling parameters and last tokens are read at these slots. Two
Triton launches, no host synchronisation, and grids that depend on capacities only, so a CUDA graph
can hold them. Needs triton. Knows rows, slots and pages; no request and no attention backend.
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
MAX_PROGRAMS_PER_ROW = 8  # programs that share one long row, or the words to be scattered
_NO_LOGITS = tl.constexpr(NO_LOGITS)


@triton.jit
def _scatter_words_kernel(pairs, count, words, INPUTS_BLOCK: tl.constexpr):
    num_words = 2 * tl.load(count)
    step = tl.num_programs(0) * INPUTS_BLOCK
    for begin in range(tl.program_id(0) * INPUTS_BLOCK, num_words // 2, step):
        at = begin + tl.arange(0, INPUTS_BLOCK)
        inside = 2 * at < num_words
        index = tl.load(pairs + 2 * at, mask=inside, other=0)
        value = tl.load(pairs + 2 * at + 1, mask=inside, other=0)
        tl.store(words + index, value, mask=inside)


def scatter_words(pairs: torch.Tensor, count: torch.Tensor, words: torch.Tensor) -> None:
    """See interface.py."""
    _scatter_words_kernel[(MAX_PROGRAMS_PER_ROW,)](
        pairs, count, words, INPUTS_BLOCK=INPUTS_BLOCK, num_warps=4
    )


@triton.jit
def _tokens_and_pages_before(
    starts, counts, row, PAGE: tl.constexpr, PADDING_ROW_TOKENS: tl.constexpr,
    INPUTS_BLOCK: tl.constexpr,
):  # fmt: skip
    """(tokens, pages) of the rows before `row`."""
    tokens = tl.zeros((INPUTS_BLOCK,), tl.int32)
    pages = tl.zeros((INPUTS_BLOCK,), tl.int32)
    for begin in range(0, row, INPUTS_BLOCK):
        index = begin + tl.arange(0, INPUTS_BLOCK)
        inside = index < row
        count = tl.load(counts + index, mask=inside, other=0)
        length = tl.load(starts + index, mask=inside & (count > 0), other=0)
        count = tl.where(count > 0, count, PADDING_ROW_TOKENS)
        tokens += tl.where(inside, count, 0)
        pages += tl.where(inside, (length + count + PAGE - 1) // PAGE, 0)
    return tl.sum(tokens), tl.sum(pages)


@triton.jit
def _token_inputs(
    tokens, last_token, slot, pages, positions, slot_mapping, input_ids, first, start, count, known,
    capacity, step, PAGE: tl.constexpr, INPUTS_BLOCK: tl.constexpr,
):  # fmt: skip
    """This program's share of one row's `count` tokens; tokens from `known` on are padding."""
    for begin in range(tl.program_id(1) * INPUTS_BLOCK, count, step):
        index = begin + tl.arange(0, INPUTS_BLOCK)
        at = first + index
        inside = (index < count) & (at < capacity)
        real = inside & (index < known)
        position = tl.where(index < known, start + index, 0)
        page = tl.load(pages + position // PAGE, mask=real, other=0).to(tl.int64)
        kv_slot = tl.where(real, page * PAGE + position % PAGE, -1)
        token = tl.load(tokens + at, mask=real, other=0).to(tl.int64)
        last = tl.load(last_token + slot + 0 * index, mask=real & (token < 0), other=0)
        tl.store(positions + at, position, mask=inside)
        tl.store(slot_mapping + at, kv_slot, mask=inside)
        tl.store(input_ids + at, tl.where(token < 0, last, token), mask=inside)


@triton.jit
def _sampling_inputs(
    logits_row, slot, position, token, slot_words, logits_indices, write_slots, sample_positions,
    sampling_words, num_slots, num_logits, NUM_WIDE: tl.constexpr, NUM_NARROW: tl.constexpr,
):  # fmt: skip
    """What the sampler reads for this row: nothing if the row has no logits; a padding row gets the
    padding slot."""
    sample = tl.load(logits_row)
    real, any = sample >= 0, sample != _NO_LOGITS
    at = tl.where(real, sample, -1 - sample)
    slot = tl.where(real, slot, num_slots - 1)
    tl.store(logits_indices + at, tl.where(real, token, 0), mask=any)
    tl.store(write_slots + at, slot, mask=any)
    tl.store(sample_positions + at, tl.where(real, position, 0), mask=any)
    for field in tl.static_range(NUM_WIDE):
        for word in tl.static_range(2):
            value = tl.load(slot_words + 2 * (field * num_slots + slot) + word)
            tl.store(sampling_words + 2 * (field * num_logits + at) + word, value, mask=any)
    for field in tl.static_range(NUM_NARROW):
        value = tl.load(slot_words + (2 * NUM_WIDE + field) * num_slots + slot)
        tl.store(sampling_words + (2 * NUM_WIDE + field) * num_logits + at, value, mask=any)


# These sizes change from step to step: a specialisation for 1 or for multiples of 16 would compile
# the kernel again in the middle of serving.
UNSPECIALIZED_SIZES = [
    "rows",
    "capacity",
    "kv_indices_size",
    "num_slots",
    "width",
    "decodes",
    "prefill_query_base",
    "first_page_table_row",
    "num_logits",
]


@triton.jit(do_not_specialize=UNSPECIALIZED_SIZES)
def _prepare_inputs_kernel(
    slots, starts, counts, logits_rows, tokens, page_table, slot_words, last_token,
    positions, slot_mapping, input_ids, qo_indptr, prefill_qo_indptr, seq_lens, last_page_len,
    kv_indptr, kv_indices, row_page_table,
    logits_indices, write_slots, sample_positions, sampling_words,
    rows, capacity, kv_indices_size, num_slots, width, decodes, prefill_query_base,
    first_page_table_row, num_logits, PAGE: tl.constexpr, PADDING_ROW_TOKENS: tl.constexpr,
    LISTS_PAGES: tl.constexpr, NUM_WIDE: tl.constexpr, NUM_NARROW: tl.constexpr,
    INPUTS_BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, share of the row); the program after the last row fills
    the tokens that are left over with padding."""
    row = tl.program_id(0)
    step, leads = tl.num_programs(1) * INPUTS_BLOCK, tl.program_id(1) == 0
    first, first_page = _tokens_and_pages_before(
        starts, counts, row, PAGE, PADDING_ROW_TOKENS, INPUTS_BLOCK
    )
    inside = row < rows
    known = tl.load(counts + row, mask=inside, other=0)
    start = tl.load(starts + row, mask=known > 0, other=0)
    slot = tl.load(slots + row, mask=inside, other=0)
    count = tl.where(inside, tl.where(known > 0, known, PADDING_ROW_TOKENS), capacity - first)
    pages = page_table + slot.to(tl.int64) * width
    tl.store(qo_indptr + row, first, mask=leads)
    is_prefill = leads & (row >= decodes)
    tl.store(prefill_qo_indptr + row - decodes, first - prefill_query_base, mask=is_prefill)
    tl.store(kv_indptr + row, first_page if LISTS_PAGES else slot * width, mask=leads)
    _token_inputs(tokens, last_token, slot, pages, positions, slot_mapping, input_ids, first, start,
                  count, known, capacity, step, PAGE, INPUTS_BLOCK)  # fmt: skip
    if inside:
        length = start + count
        used = (length + PAGE - 1) // PAGE
        tl.store(seq_lens + row, length, mask=leads)
        tl.store(last_page_len + row, length - (used - 1) * PAGE, mask=leads)
        for begin in range(tl.program_id(1) * INPUTS_BLOCK, used, step):
            index = begin + tl.arange(0, INPUTS_BLOCK)
            page = tl.load(pages + index, mask=index < used, other=0)
            if LISTS_PAGES:
                shown = (index < used) & (first_page + index < kv_indices_size)
                tl.store(kv_indices + first_page + index, page, mask=shown)
            target = row_page_table + (row - first_page_table_row).to(tl.int64) * width + index
            tl.store(target, page, mask=index < tl.where(row >= first_page_table_row, used, 0))
        if leads:
            _sampling_inputs(logits_rows + row, slot, start + count, first + count - 1, slot_words,
                             logits_indices, write_slots, sample_positions, sampling_words,
                             num_slots, num_logits, NUM_WIDE, NUM_NARROW)  # fmt: skip


def prepare_inputs(step: DeviceStep, slot_tables: SlotTables, page_size: int) -> None:
    """See interface.py."""
    count, capacity = len(step.counts), len(step.positions)
    width = slot_tables.page_table.shape[1]
    programs_per_row = min(triton.cdiv(max(capacity, width), INPUTS_BLOCK), MAX_PROGRAMS_PER_ROW)
    _prepare_inputs_kernel[(count + 1, programs_per_row)](
        step.slots, step.starts, step.counts, step.logits_rows, step.tokens,
        slot_tables.page_table, slot_tables.sampling_words, slot_tables.last_token,
        step.positions, step.slot_mapping, step.input_ids, step.qo_indptr, step.prefill_qo_indptr,
        step.seq_lens, step.last_page_len, step.kv_indptr, step.kv_indices, step.row_page_table,
        step.logits_indices, step.write_slots, step.sample_positions, step.sampling_words,
        count, capacity, len(step.kv_indices), len(slot_tables.page_table), width,
        step.shape.decodes, step.prefill_query_base, count - len(step.row_page_table),
        step.num_logits,
        PAGE=page_size, PADDING_ROW_TOKENS=step.padding_row_tokens, LISTS_PAGES=step.lists_pages,
        NUM_WIDE=slot_tables.num_wide, NUM_NARROW=slot_tables.num_narrow,
        INPUTS_BLOCK=INPUTS_BLOCK, num_warps=4,
    )  # fmt: skip
