"""The Kernels of GPUs around the model, see interface.py. Needs triton.

- Inputs of a step, made on the device: positions, slot mapping, input ids, indptrs, tables. Rows
  name slots; the page table, sampling parameters and last tokens are read at these slots. Two
  launches, no host synchronisation.
- Logits before sampling: logit edits (bias, suppressed and allowed ids) and bad words, which lie by
  slot on the device, and bitmasks, which come from grammars on the host. A row whose slot changes
  nothing costs two loads.
- Sampling, by the kernels of sampling.py.
- Log-probs, in one pass over the logits of each row, then a small reduction. A record of some ids
  of a row is int64 [2 + num_top]:

  | float32 bits of logsumexp(logits) | keys above the row's own key | greatest keys, falling |

  Keys are packed logit keys (triton_support.py); the row's own key is that of the token whose
  log-prob is asked for. Records of blocks make that of a rank, those of ranks the log-probs.

Grids depend on capacities and numbers of rows only, so a CUDA graph can hold all of it. Knows rows,
slots and pages; no request, no model and no attention backend.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pipeinfer.kernels import sampling as sampling_kernels
from pipeinfer.kernels.interface import (
    BAD_WORDS_HEADER,
    MAX_NGRAM,
    NO_LOGIT_KEY,
    NO_LOGITS,
    DeviceStep,
    SamplingTensors,
    SlotLogitEdits,
    SlotTables,
)
from pipeinfer.kernels.triton_support import key_score, key_token, pack_logit_key
from pipeinfer.params import MAX_LOGPROBS
from pipeinfer.wire import DRAFT_TOKEN, NO_ID, REJECTED

INPUTS_BLOCK = 1024  # tokens, pages or words that a program writes at a time
MAX_PROGRAMS_PER_ROW = 8  # programs that share one long row, or the words to be scattered
_NO_LOGITS = tl.constexpr(NO_LOGITS)
_DRAFT_TOKEN = tl.constexpr(DRAFT_TOKEN)
_REJECTED = tl.constexpr(REJECTED)


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
    """Writes changed words, see Kernels.scatter_words."""
    _scatter_words_kernel[(MAX_PROGRAMS_PER_ROW,)](
        pairs, count, words, INPUTS_BLOCK=INPUTS_BLOCK, num_warps=4
    )


@triton.jit
def _load_starts(starts, slots, lengths, index, mask, HAS_DRAFTS: tl.constexpr):
    """Returns the starts of rows; a start below 0 is replaced by the length of its slot."""
    start = tl.load(starts + index, mask=mask, other=0)
    if HAS_DRAFTS:
        slot = tl.load(slots + index, mask=mask, other=0)
        length = tl.load(lengths + slot, mask=mask & (start < 0), other=0)
        start = tl.where(start < 0, length, start)
    return start


@triton.jit
def _tokens_and_pages_before(
    starts, counts, slots, lengths, row, PAGE: tl.constexpr, PADDING_ROW_TOKENS: tl.constexpr,
    HAS_DRAFTS: tl.constexpr, INPUTS_BLOCK: tl.constexpr,
):  # fmt: skip
    """Returns (tokens, pages) of the rows before `row`."""
    tokens = tl.zeros((INPUTS_BLOCK,), tl.int32)
    pages = tl.zeros((INPUTS_BLOCK,), tl.int32)
    for begin in range(0, row, INPUTS_BLOCK):
        index = begin + tl.arange(0, INPUTS_BLOCK)
        inside = index < row
        count = tl.load(counts + index, mask=inside, other=0)
        length = _load_starts(starts, slots, lengths, index, inside & (count > 0), HAS_DRAFTS)
        count = tl.where(count > 0, count, PADDING_ROW_TOKENS)
        tokens += tl.where(inside, count, 0)
        pages += tl.where(inside, (length + count + PAGE - 1) // PAGE, 0)
    return tl.sum(tokens), tl.sum(pages)


@triton.jit
def _token_inputs(
    tokens, last_token, drafts, max_drafts, slot, pages, positions, slot_mapping, input_ids, first,
    start, count, known, capacity, step, PAGE: tl.constexpr, HAS_DRAFTS: tl.constexpr,
    INPUTS_BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes this program's share of the inputs of one row's `count` tokens; tokens from `known` on
    are padding.
    """
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
        if HAS_DRAFTS:
            draft = tl.load(
                drafts + slot * max_drafts + index - 1, mask=real & (token == _DRAFT_TOKEN), other=0
            )
            last = tl.where(token == _DRAFT_TOKEN, draft.to(tl.int64), last)
        tl.store(positions + at, position, mask=inside)
        tl.store(slot_mapping + at, kv_slot, mask=inside)
        tl.store(input_ids + at, tl.where(token < 0, last, token), mask=inside)


@triton.jit
def _sampling_inputs(
    sample, offset, slot, position, token, slot_words, logits_indices, write_slots,
    sample_positions, sampling_words, num_slots, num_logits, NUM_WIDE: tl.constexpr,
    NUM_NARROW: tl.constexpr,
):  # fmt: skip
    """Writes the inputs of the sampler for the row of logits `sample`, as logits_rows names it, or
    `offset` rows behind: nothing if the row has no logits; a padding row gets the padding slot.
    """
    real, any = sample >= 0, sample != _NO_LOGITS
    at = tl.where(real, sample + offset, -1 - sample)
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
    "padded_logits",
    "max_drafts",
]


@triton.jit(do_not_specialize=UNSPECIALIZED_SIZES)
def _prepare_inputs_kernel(
    slots, starts, counts, logits_rows, tokens, page_table, slot_words, last_token, lengths, drafts,
    positions, slot_mapping, input_ids, qo_indptr, prefill_qo_indptr, seq_lens, last_page_len,
    kv_indptr, kv_indices, row_page_table,
    logits_indices, write_slots, sample_positions, sampling_words,
    rows, capacity, kv_indices_size, num_slots, width, decodes, prefill_query_base,
    first_page_table_row, num_logits, padded_logits, max_drafts, PAGE: tl.constexpr,
    PADDING_ROW_TOKENS: tl.constexpr, LISTS_PAGES: tl.constexpr, HAS_DRAFTS: tl.constexpr,
    NUM_WIDE: tl.constexpr, NUM_NARROW: tl.constexpr, INPUTS_BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, share of the row); the program after the last row fills the tokens that are
    left over with padding, and the rows of logits behind the last token's, up to `padded_logits`.
    """
    row = tl.program_id(0)
    step, leads = tl.num_programs(1) * INPUTS_BLOCK, tl.program_id(1) == 0
    first, first_page = _tokens_and_pages_before(
        starts, counts, slots, lengths, row, PAGE, PADDING_ROW_TOKENS, HAS_DRAFTS, INPUTS_BLOCK
    )
    inside = row < rows
    known = tl.load(counts + row, mask=inside, other=0)
    start = _load_starts(starts, slots, lengths, row, known > 0, HAS_DRAFTS)
    slot = tl.load(slots + row, mask=inside, other=0)
    count = tl.where(inside, tl.where(known > 0, known, PADDING_ROW_TOKENS), capacity - first)
    pages = page_table + slot.to(tl.int64) * width
    tl.store(qo_indptr + row, first, mask=leads)
    is_prefill = leads & (row >= decodes)
    tl.store(prefill_qo_indptr + row - decodes, first - prefill_query_base, mask=is_prefill)
    tl.store(kv_indptr + row, first_page if LISTS_PAGES else slot * width, mask=leads)
    _token_inputs(tokens, last_token, drafts, max_drafts, slot, pages, positions, slot_mapping,
                  input_ids, first, start, count, known, capacity, step, PAGE, HAS_DRAFTS,
                  INPUTS_BLOCK)  # fmt: skip
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
            behind = 0  # draft tokens, each with a row of logits
            if HAS_DRAFTS:
                verifies = tl.load(starts + row, mask=known > 0, other=0) < 0
                behind = tl.where(verifies, known - 1, 0)
            sample = tl.load(logits_rows + row)
            for offset in range(behind + 1):
                back = behind - offset
                _sampling_inputs(sample, offset, slot, start + count - back,
                                 first + count - 1 - back, slot_words, logits_indices, write_slots,
                                 sample_positions, sampling_words, num_slots, num_logits, NUM_WIDE,
                                 NUM_NARROW)  # fmt: skip
    elif leads:
        for at in range(first, padded_logits):
            _sampling_inputs(known - 1 - at, 0, slot, known, known, slot_words, logits_indices,
                             write_slots, sample_positions, sampling_words, num_slots, num_logits,
                             NUM_WIDE, NUM_NARROW)  # fmt: skip


def prepare_inputs(step: DeviceStep, slot_tables: SlotTables, page_size: int) -> None:
    """Writes the prepared arrays of a step, see Kernels.prepare_inputs."""
    count, capacity = len(step.counts), len(step.positions)
    width = slot_tables.page_table.shape[1]
    programs_per_row = min(triton.cdiv(max(capacity, width), INPUTS_BLOCK), MAX_PROGRAMS_PER_ROW)
    state = slot_tables.drafts
    lengths, drafts = (step.slots,) * 2 if state is None else (state.lengths, state.drafts)
    padded_logits = step.num_logits if step.shape.verifies else 0
    _prepare_inputs_kernel[(count + 1, programs_per_row)](
        step.slots, step.starts, step.counts, step.logits_rows, step.tokens,
        slot_tables.page_table, slot_tables.sampling_words, slot_tables.last_token, lengths, drafts,
        step.positions, step.slot_mapping, step.input_ids, step.qo_indptr, step.prefill_qo_indptr,
        step.seq_lens, step.last_page_len, step.kv_indptr, step.kv_indices, step.row_page_table,
        step.logits_indices, step.write_slots, step.sample_positions, step.sampling_words,
        count, capacity, len(step.kv_indices), len(slot_tables.page_table), width,
        step.shape.num_decodes, step.prefill_query_base, count - len(step.row_page_table),
        step.num_logits, padded_logits, 0 if state is None else drafts.shape[1],
        PAGE=page_size, PADDING_ROW_TOKENS=step.padding_row_tokens, LISTS_PAGES=step.lists_pages,
        HAS_DRAFTS=state is not None,
        NUM_WIDE=slot_tables.num_wide, NUM_NARROW=slot_tables.num_narrow,
        INPUTS_BLOCK=INPUTS_BLOCK, num_warps=4,
    )  # fmt: skip


HISTORY_BLOCK = 1024  # tokens of a request that are compared at a time
_POSITION_BITS = tl.constexpr(27)  # bits of the position in the key of a match, below its length
_POSITION_MASK = tl.constexpr((1 << 27) - 1)


@triton.jit(do_not_specialize=["width", "max_drafts"])
def _propose_ngrams_kernel(
    slots, starts, counts, lengths, token_ids, drafts, width, max_drafts, MAX_NGRAM: tl.constexpr,
    DRAFTS_BLOCK: tl.constexpr, HISTORY_BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row): writes the row's draft tokens. The greatest key (tokens that match, position
    of the last of them) wins.
    """
    row = tl.program_id(0)
    count = tl.load(counts + row)
    if (tl.load(starts + row) < 0) & (count > 1):
        slot = tl.load(slots + row)
        known = token_ids + slot.to(tl.int64) * width
        end = tl.load(lengths + slot)
        last = tl.load(known + end)
        best = tl.zeros((HISTORY_BLOCK,), tl.int32)
        for begin in range(0, end, HISTORY_BLOCK):
            at = begin + tl.arange(0, HISTORY_BLOCK)
            matches = tl.load(known + at, mask=at < end, other=-1) == last
            matched = matches.to(tl.int32)
            for back in tl.static_range(1, MAX_NGRAM):
                wanted = tl.load(known + tl.maximum(end - back, 0))
                token = tl.load(known + at - back, mask=(at < end) & (at >= back), other=-1)
                matches = matches & (token == wanted)
                matched += matches.to(tl.int32)
            key = tl.where(matched > 0, (matched << _POSITION_BITS) | at, 0)
            best = tl.maximum(best, key)
        key = tl.max(best)
        position = key & _POSITION_MASK
        index = tl.arange(0, DRAFTS_BLOCK)
        follows = position + 1 + index <= tl.where(key > 0, end, -1)
        token = tl.load(known + position + 1 + index, mask=follows, other=0)
        tl.store(
            drafts + slot * max_drafts + index, tl.where(follows, token, last),
            mask=index < count - 1,
        )  # fmt: skip


def propose_ngrams(step: DeviceStep, slot_tables: SlotTables) -> None:
    """Writes draft tokens, see Kernels.propose_ngrams. The public functions below without a
    docstring are those of Kernels, too.
    """
    state = slot_tables.drafts
    if state is None:
        return
    width, max_drafts = state.token_ids.shape[1], state.drafts.shape[1]
    _propose_ngrams_kernel[(len(step.counts),)](
        step.slots, step.starts, step.counts, state.lengths, state.token_ids, state.drafts, width,
        max_drafts, MAX_NGRAM=MAX_NGRAM, DRAFTS_BLOCK=triton.next_power_of_2(max_drafts),
        HISTORY_BLOCK=HISTORY_BLOCK, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["width", "max_drafts"])
def _accept_drafts_kernel(
    slots, starts, counts, logits_rows, sample_positions, drawn, lengths, token_ids, drafts,
    last_token, width, max_drafts, acceptance,
):  # fmt: skip
    """Program (row): accepts the row's draft tokens."""
    row = tl.program_id(0)
    sample = tl.load(logits_rows + row)
    start = tl.load(starts + row)
    if sample >= 0:
        slot = tl.load(slots + row).to(tl.int64)
        known = token_ids + slot * width
        if start < 0:
            count = tl.load(counts + row)
            length = tl.load(lengths + slot)
            given, right = 0, 1  # tokens so far; whether all drafts so far were right
            for offset in range(count):
                index = count * 0 + offset  # a tensor in the interpreter, too
                entry = drawn + 2 * (sample + index)
                good = (tl.load(entry) > 0).to(tl.int32)
                token = tl.load(entry + 1)
                taken = right * good
                position = length + 1 + index
                inside = (taken > 0) & (position < width)
                tl.store(known + position, token.to(tl.int32), mask=inside)
                tl.store(last_token + slot, token, mask=taken > 0)
                tl.store(entry, tl.full((), _REJECTED, tl.int64), mask=(taken == 0) & (index > 0))
                given += taken
                draft = tl.load(
                    drafts + slot * max_drafts + index, mask=index < count - 1, other=-1
                )
                hashed = ((position * 40503 + slot) * 2654435761) & 0xFFFFFFFF
                hashed = ((hashed ^ (hashed >> 16)) * 73244475) & 0xFFFFFFFF
                hashed ^= hashed >> 16
                imposed = (hashed >> 8).to(tl.float32) < acceptance * (1 << 24)
                accepted = tl.where(acceptance < 0, token == draft, imposed)
                right = taken * accepted.to(tl.int32)
            tl.store(lengths + slot, length + given)
        else:
            entry = drawn + 2 * sample
            position = tl.load(sample_positions + sample)
            token = tl.load(entry + 1).to(tl.int32)
            tl.store(known + position, token, mask=(tl.load(entry) > 0) & (position < width))


def accept_drafts(step: DeviceStep, drawn: torch.Tensor, slot_tables: SlotTables) -> None:
    state = slot_tables.drafts
    if state is None:
        return
    _accept_drafts_kernel[(len(step.counts),)](
        step.slots, step.starts, step.counts, step.logits_rows, step.sample_positions, drawn,
        state.lengths, state.token_ids, state.drafts, slot_tables.last_token,
        state.token_ids.shape[1], state.drafts.shape[1], state.acceptance, num_warps=1,
    )  # fmt: skip


EDITS_BLOCK = 128  # edits of a slot that a program applies at a time
MAX_ALLOWED_IDS = 1024  # allowed ids of a row at most; their logits are held in registers
FILL_BLOCK = 1024  # logits that are set to -inf at a time
BITMASK_BLOCK = 2048  # logits of one program of the bitmask
_BAD_WORDS_HEADER = tl.constexpr(BAD_WORDS_HEADER)


@triton.jit
def _mask_all_but(
    row, width, stored, count, first_id, ALLOWED_BLOCK: tl.constexpr, FILL_BLOCK: tl.constexpr
):
    """Sets the row's logits to -inf, except those of the `count` allowed ids at `stored`."""
    at = tl.arange(0, ALLOWED_BLOCK)
    column = tl.load(stored + at, mask=at < count, other=-1) - first_id
    on_rank = (at < count) & (column >= 0) & (column < width)
    saved = tl.load(row + column, mask=on_rank, other=0.0)
    tl.debug_barrier()  # other threads overwrite a thread's logits, which it then writes back
    for begin in range(0, width, FILL_BLOCK):
        over = begin + tl.arange(0, FILL_BLOCK)
        tl.store(row + over, tl.full((FILL_BLOCK,), float("-inf"), tl.float32), mask=over < width)
    tl.debug_barrier()
    tl.store(row + column, saved, mask=on_rank)
    tl.debug_barrier()


@triton.jit
def _mask_bad_words(
    row, width, own_bad_words, num_sequences, position, last_token, first_id,
    RECORD_TOKEN: tl.constexpr, HISTORY: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """Sets the logit of each id to -inf that would complete one of the slot's bad words.

    - own_bad_words: the slot's row of SlotBadWords.words
    - RECORD_TOKEN: the last token, if it was sampled in this slot, first joins the history at the
      position before this one
    """
    history = own_bad_words + _BAD_WORDS_HEADER
    ends = history + HISTORY
    ids = ends + SEQUENCES + 1
    if RECORD_TOKEN:  # a constant
        token = tl.load(last_token).to(tl.int32)
        sampled = position > tl.load(own_bad_words + 2)
        tl.store(history + ((position - 1) & (HISTORY - 1)), token, mask=sampled)
    tl.debug_barrier()  # after the logit edits, and before the history is read
    at = tl.arange(0, SEQUENCES)
    there = at < num_sequences
    end = tl.load(ends + at + 1, mask=there, other=0)
    before = end - tl.load(ends + at, mask=there, other=0) - 1
    same = there & (before <= position - tl.load(own_bad_words + 1))
    for back in range(1, tl.load(own_bad_words + 3)):
        have = tl.load(history + ((position - back) & (HISTORY - 1)))
        want = tl.load(ids + end - 1 - back, mask=same & (back <= before), other=0)
        same = same & ((back > before) | (want == have))
    column = tl.load(ids + end - 1, mask=same, other=-1) - first_id
    on_rank = same & (column >= 0) & (column < width)
    tl.store(row + column, tl.full((SEQUENCES,), float("-inf"), tl.float32), mask=on_rank)


@triton.jit(
    do_not_specialize=[
        "num_slots",
        "max_entries",
        "stride",
        "first_id",
        "width",
        "bad_words_stride",
    ]
)
def _logit_edits_kernel(
    logits, slots, positions, counts, words, bad_words, last_token, num_slots, max_entries, stride,
    first_id, width, bad_words_stride, ADD_BIAS: tl.constexpr, BLOCK: tl.constexpr,
    ALLOWED_BLOCK: tl.constexpr, FILL_BLOCK: tl.constexpr, HISTORY: tl.constexpr,
    SEQUENCES: tl.constexpr,
):  # fmt: skip
    """Program (row of logits). See SlotLogitEdits for counts and words."""
    number = tl.program_id(0).to(tl.int64)
    slot, position = tl.load(slots + number), tl.load(positions + number)
    row = logits + number * stride
    count = tl.load(counts + slot)
    own_bad_words = bad_words + slot * bad_words_stride
    num_sequences = tl.load(own_bad_words)
    if count < 0:
        count = -count
        allowed = words + slot * max_entries
        _mask_all_but(row, width, allowed, count, first_id, ALLOWED_BLOCK, FILL_BLOCK)
    for begin in range(0, count, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        inside = at < count
        stored = words + slot * max_entries + at
        column = tl.load(stored, mask=inside, other=-1) - first_id
        on_rank = inside & (column >= 0) & (column < width)
        never = position < tl.load(stored + 2 * num_slots * max_entries, mask=on_rank, other=0)
        target = row + column
        if ADD_BIAS:
            bits = tl.load(stored + num_slots * max_entries, mask=on_rank, other=0)
            value = tl.load(target, mask=on_rank, other=0.0) + bits.to(tl.float32, bitcast=True)
            tl.store(target, tl.where(never, float("-inf"), value), mask=on_rank)
        else:
            tl.store(target, tl.full((BLOCK,), float("-inf"), tl.float32), mask=on_rank & never)
    if num_sequences > 0:
        _mask_bad_words(
            row, width, own_bad_words, num_sequences, position, last_token + slot, first_id,
            not ADD_BIAS, HISTORY, SEQUENCES,
        )  # fmt: skip


def apply_logit_edits(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    edits: SlotLogitEdits,
    first_id: int = 0,
    add_bias: bool = False,
) -> None:
    """Edits logits, see Kernels.apply_logit_edits."""
    if not len(logits):
        return
    assert logits.dtype is torch.float32 or not add_bias
    _, num_slots, max_entries = edits.words.shape
    bad_words = edits.bad_words
    _logit_edits_kernel[(len(logits),)](
        logits, slots, positions, edits.counts, edits.words, bad_words.words,
        bad_words.last_token, num_slots, max_entries, logits.stride(0), first_id, logits.shape[1],
        bad_words.words.shape[1], ADD_BIAS=add_bias, BLOCK=EDITS_BLOCK,
        ALLOWED_BLOCK=MAX_ALLOWED_IDS, FILL_BLOCK=FILL_BLOCK, HISTORY=bad_words.history,
        SEQUENCES=bad_words.max_sequences, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["stride", "width", "first_id", "num_words"])
def _bitmask_kernel(logits, rows, words, stride, width, first_id, num_words, BLOCK: tl.constexpr):
    entry = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = column + first_id
    inside = column < width
    has_bit = inside & (token // 32 < num_words)
    word = tl.load(words + entry * num_words + token // 32, mask=has_bit, other=0)
    forbidden = ((word >> (token % 32)) & 1) == 0
    target = logits + tl.load(rows + entry) * stride + column
    never = tl.full((BLOCK,), float("-inf"), tl.float32)
    tl.store(target, never.to(logits.dtype.element_ty), mask=inside & forbidden)


def apply_token_bitmask(
    logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor, first_id: int = 0
) -> None:
    """Masks logits, see Kernels.apply_token_bitmask."""
    if not len(rows):
        return
    width = logits.shape[1]
    _bitmask_kernel[(len(rows), triton.cdiv(width, BITMASK_BLOCK))](
        logits, rows, words, logits.stride(0), width, first_id, words.shape[1], BLOCK=BITMASK_BLOCK
    )


# Fixed, whatever the batch: partial results must not depend on how many rows present are.
BLOCK = 4096  # logits of one program
MAX_KEYS = triton.next_power_of_2(MAX_LOGPROBS)  # keys of a record at most: compiled once for all
_RECORD_HEADER = tl.constexpr(2)  # words of a record before its keys
_NO_KEY = tl.constexpr(NO_LOGIT_KEY)
_NO_ID = tl.constexpr(NO_ID)


@triton.jit(do_not_specialize=["stride", "width", "first_id"])
def _logit_keys_kernel(logits, ids, keys, stride, width, first_id):
    """Program (row): writes the key of the row's id, if the id lies in this rank's shard."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(ids + row)
    column = token - first_id
    on_rank = (column >= 0) & (column < width)
    logit = tl.load(logits + row * stride + column, mask=on_rank, other=0.0).to(tl.float32)
    tl.store(keys + row, tl.where(on_rank, pack_logit_key(logit, token.to(tl.int32)), _NO_KEY))


@triton.jit
def _store_record(record, total, num_above, keys, num_top):
    """Writes a record of `keys`. Absent ones are NO_LOGIT_KEY; no others are equal."""
    tl.store(record, total.to(tl.int32, bitcast=True).to(tl.int64))
    tl.store(record + 1, num_above)
    for index in tl.range(0, num_top):
        best = tl.max(keys, axis=0)
        tl.store(record + (index + _RECORD_HEADER), best)
        keys = tl.where(keys == best, _NO_KEY, keys)


@triton.jit(do_not_specialize=["stride", "width", "first_id", "num_top"])
def _scan_block(
    logits, ids, token_keys, records, stride, width, first_id, num_top, BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Program (row, block): writes the block's record.

    - WHOLE: logits are those of the whole vocabulary, and this kernel writes the keys of the rows'
      `ids` to token_keys; else token_keys has them already
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    values = tl.load(logits + row * stride + column, mask=inside, other=float("-inf"))
    values = values.to(tl.float32)
    keys = tl.where(inside, pack_logit_key(values, column + first_id), _NO_KEY)
    if WHOLE:
        token = tl.load(ids + row)
        own_key = pack_logit_key(
            tl.load(logits + row * stride + token).to(tl.float32), token.to(tl.int32)
        )
        if block == 0:
            tl.store(token_keys + row, own_key)
    else:
        own_key = tl.load(token_keys + row)
    num_above = tl.sum((keys > own_key).to(tl.int32), axis=0).to(tl.int64)
    record = records + (row * tl.num_programs(1) + block) * (num_top + _RECORD_HEADER)
    _store_record(record, _log_sum(values), num_above, keys, num_top)


@triton.jit
def _log_sum(values):
    """Returns log(sum(exp(values))); -inf if all values are -inf."""
    peak = tl.max(values, axis=0)
    base = tl.where(peak > float("-inf"), peak, 0.0)
    return base + tl.log(tl.sum(tl.exp(values - base), axis=0))


@triton.jit
def _load_records(
    records, record_stride, count, num_top, RECORDS: tl.constexpr, MAX_KEYS: tl.constexpr
):
    """Returns (logsumexp, num_above, keys [RECORDS * MAX_KEYS]) of `count` records, `record_stride`
    words apart.
    """
    part = tl.arange(0, RECORDS).to(tl.int64)
    present = part < count
    first = records + part * record_stride
    bits = tl.load(first, mask=present, other=0).to(tl.int32)
    total = tl.where(present, bits.to(tl.float32, bitcast=True), float("-inf"))
    num_above = tl.sum(tl.load(first + 1, mask=present, other=0), axis=0)
    index = tl.arange(0, MAX_KEYS)
    inside = present[:, None] & (index < num_top)[None, :]
    keys = tl.load(first[:, None] + (index + _RECORD_HEADER)[None, :], mask=inside, other=_NO_KEY)
    return _log_sum(total), num_above, tl.reshape(keys, (RECORDS * MAX_KEYS,))


@triton.jit(do_not_specialize=["count", "num_top"])
def _merge_blocks(
    block_records, records, count, num_top, RECORDS: tl.constexpr, MAX_KEYS: tl.constexpr
):
    """Program (row): merges the records of the row's blocks into one."""
    row = tl.program_id(0).to(tl.int64)
    size = num_top + _RECORD_HEADER
    total, num_above, keys = _load_records(
        block_records + row * count * size, size, count, num_top, RECORDS, MAX_KEYS
    )
    _store_record(records + row * size, total, num_above, keys, num_top)


@triton.jit
def _ids_and_logprobs(keys, total):
    """Returns (ids, bits of float32 log-probs) of keys; NO_ID and -inf for absent ones."""
    present = keys != _NO_KEY
    values = tl.where(present, key_score(keys) - total, float("-inf"))
    return tl.where(present, key_token(keys), _NO_ID), values.to(tl.int32, bitcast=True)


@triton.jit(do_not_specialize=["count", "row_stride", "record_stride", "num_top"])
def _merge_records(
    records,
    token_keys,
    out,
    count,
    row_stride,
    record_stride,
    num_top,
    RECORDS: tl.constexpr,
    MAX_KEYS: tl.constexpr,
):
    """Program (row): writes the row's log-probs, from `count` records.

    - row_stride, record_stride: words from a row's first record to the next row's, and from a
      record to the next of the row
    """
    row = tl.program_id(0).to(tl.int64)
    size = num_top + _RECORD_HEADER
    total, num_above, keys = _load_records(
        records + row * row_stride, record_stride, count, num_top, RECORDS, MAX_KEYS
    )
    row_out = out + row * (size + num_top)
    _, value = _ids_and_logprobs(tl.load(token_keys + row), total)
    tl.store(row_out, value)
    tl.store(row_out + 1, (num_above + 1).to(tl.int32))
    for index in tl.range(0, num_top):
        best = tl.max(keys, axis=0)
        token, value = _ids_and_logprobs(best, total)
        tl.store(row_out + (index + _RECORD_HEADER), token)
        tl.store(row_out + size + index, value)
        keys = tl.where(keys == best, _NO_KEY, keys)


def logprobs(logits: torch.Tensor, ids: torch.Tensor, num_top: int) -> torch.Tensor:
    """Returns log-prob records, see Kernels.logprobs. The public functions below without a
    docstring are those of Kernels, too.
    """
    ids = ids.contiguous()
    token_keys = torch.empty_like(ids)
    block_records = _block_records(logits, ids, token_keys, num_top, 0, whole=True)
    _, blocks, size = block_records.shape
    return _merged(block_records, token_keys, blocks, blocks * size, size)


def logit_keys(logits: torch.Tensor, ids: torch.Tensor, first_id: int) -> torch.Tensor:
    ids = ids.contiguous()
    keys = torch.empty_like(ids)
    if len(ids):
        stride, width = logits.stride(0), logits.shape[1]
        _logit_keys_kernel[(len(ids),)](logits, ids, keys, stride, width, first_id, num_warps=1)
    return keys


def local_topk(
    logits: torch.Tensor, token_keys: torch.Tensor, num_top: int, first_id: int
) -> torch.Tensor:
    block_records = _block_records(logits, token_keys, token_keys, num_top, first_id, whole=False)
    rows, blocks, size = block_records.shape
    records = token_keys.new_empty(rows, size)
    if rows:
        padded = triton.next_power_of_2(blocks)
        _merge_blocks[(rows,)](
            block_records, records, blocks, num_top, RECORDS=padded, MAX_KEYS=MAX_KEYS
        )
    return records


def merge_topk(records: torch.Tensor, token_keys: torch.Tensor) -> torch.Tensor:
    ranks, rows, size = records.shape
    return _merged(records.contiguous(), token_keys, ranks, size, rows * size)


def _block_records(
    logits: torch.Tensor, ids: torch.Tensor, token_keys: torch.Tensor, num_top: int, first_id: int,
    whole: bool,
) -> torch.Tensor:  # fmt: skip
    """Returns int64 [N, blocks, 2 + num_top], a record of each block."""
    rows, width = logits.shape
    blocks = max(triton.cdiv(width, BLOCK), 1)
    block_records = token_keys.new_empty(rows, blocks, 2 + num_top)
    if rows:
        _scan_block[(rows, blocks)](
            logits, ids, token_keys, block_records, logits.stride(0), width, first_id, num_top,
            BLOCK=BLOCK, WHOLE=whole,
        )  # fmt: skip
    return block_records


def _merged(
    records: torch.Tensor, token_keys: torch.Tensor, count: int, row_stride: int, record_stride: int
) -> torch.Tensor:
    """Returns int32 [N, 2 + 2 num_top], see _merge_records."""
    rows, num_top = len(token_keys), records.shape[-1] - 2
    out = token_keys.new_empty(rows, 2 + 2 * num_top, dtype=torch.int32)
    if rows:
        padded = triton.next_power_of_2(count)
        _merge_records[(rows,)](
            records, token_keys, out, count, row_stride, record_stride, num_top, RECORDS=padded,
            MAX_KEYS=MAX_KEYS,
        )  # fmt: skip
    return out


def sample(
    logits: torch.Tensor, sampling: SamplingTensors, last_token: torch.Tensor, truncate: bool
) -> torch.Tensor:
    """Samples, see Kernels.sample. The public functions below without a docstring are those of
    Kernels, too.
    """
    return sampling_kernels.sample(
        logits,
        sampling["temperature"],
        sampling["top_k"],
        sampling["top_p"],
        sampling["min_p"],
        sampling["seed"],
        sampling["sample_positions"],
        truncate=truncate,
        last_token=last_token,
        slots=sampling["write_slots"],
    )


def local_argmax(logits: torch.Tensor, sampling: SamplingTensors, first_id: int) -> torch.Tensor:
    return sampling_kernels.local_argmax(
        logits, sampling["temperature"], sampling["seed"], sampling["sample_positions"], first_id
    )


def global_argmax(
    candidates: torch.Tensor, sampling: SamplingTensors, last_token: torch.Tensor
) -> torch.Tensor:
    return sampling_kernels.global_argmax(
        candidates, sampling["temperature"], last_token, sampling["write_slots"]
    )
