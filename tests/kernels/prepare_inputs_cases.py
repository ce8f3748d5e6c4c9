"""Index expansion and changes by slot, against their references: for interpreter and GPU."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch
from allpairspy import AllPairs

from device_steps import device_step
from draws import numbers, seeded
from kernels.prepare_inputs_reference import prepare_inputs_reference
from kernels.triton_cases import DEVICE, randn
from pipeinfer.kernels import by_triton, host
from pipeinfer.kernels.interface import (
    BAD_WORDS_HEADER,
    NO_LOGITS,
    DeviceStep,
    SlotBadWords,
    SlotLogitEdits,
    SlotTables,
    StepShape,
)

FULL = -7  # what lies in the buffers before, to see what was written
WIDE, NARROW = 2, 3
WORDS = 2 * WIDE + NARROW
KERNELS = [by_triton, host] if DEVICE == "cpu" else [by_triton]

each_set = pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: kernels.__name__)


def ints(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def given(counts, starts, logits_rows, page_size, seed=0) -> tuple[dict, SlotTables]:
    """What is uploaded of rows of these counts, 0 for padding, and all that lies in the slots."""
    choose = seeded(seed)
    longest = max(start + count for start, count in zip(starts, counts, strict=True))
    slots, width = len(counts) + 4, -(-longest // page_size) + 2
    chosen = torch.randperm(slots - 1, generator=choose)[: len(counts)].tolist()
    many = sum(max(count, 1) for count in counts)
    tokens = torch.randint(-1, 50_000, (many,), generator=choose, dtype=torch.int32)
    pages = 1 + torch.randperm(slots * width, generator=choose, dtype=torch.int32)
    state = torch.randint(-(2**31), 2**31, (WORDS * slots,), generator=choose)
    uploaded = {
        "slots": ints([s if count else slots - 1 for s, count in zip(chosen, counts, strict=True)]),
        "starts": ints([start if n else 0 for start, n in zip(starts, counts, strict=True)]),
        "counts": ints(counts),
        "logits_rows": ints(logits_rows),
        "tokens": tokens.to(DEVICE),
    }
    held = SlotTables(pages.view(slots, width).to(DEVICE), state.int().to(DEVICE),
                  torch.arange(1000, 1000 + slots, device=DEVICE), WIDE, NARROW)  # fmt: skip
    held.page_table[-1] = 0
    return uploaded, held


def full(*size: int, dtype=torch.int32) -> torch.Tensor:
    return torch.full(size, FULL, dtype=dtype, device=DEVICE)


def room(
    uploaded: dict, held: SlotTables, tokens: int, logits: int, prefills=0, listed=0, with_pages=0,
    padded=True, shape=None,
) -> DeviceStep:  # fmt: skip
    """A step with that upload. listed: capacity of kv_indices, 0: they are the whole page table;
    with_pages: rows in the page table. shape: where it is not just that of the rows."""
    rows, long = len(uploaded["counts"]), torch.int64
    return device_step(
        shape or StepShape(tokens, rows - prefills, prefills), padded, **uploaded,
        input_ids=full(tokens, dtype=long), positions=full(tokens, dtype=long),
        slot_mapping=full(tokens, dtype=long), qo_indptr=full(rows + 1),
        prefill_qo_indptr=full(prefills + 1), seq_lens=full(rows), last_page_len=full(rows),
        kv_indptr=full(rows + 1), kv_indices=full(listed) if listed else held.page_table.view(-1),
        row_page_table=full(with_pages, held.page_table.shape[1]),
        logits_indices=full(logits, dtype=long),
        write_slots=full(logits, dtype=long), sample_positions=full(logits, dtype=long),
        sampling_words=full(WORDS * logits), lists_pages=listed > 0,
    )  # fmt: skip


def assert_same(mine: DeviceStep, theirs: DeviceStep) -> None:
    for field in fields(mine):
        got, expected = getattr(mine, field.name), getattr(theirs, field.name)
        if isinstance(got, torch.Tensor):
            assert torch.equal(got, expected), field.name


CASES = {
    "decodes": ([1] * 9, [0, 3, 4, 7, 8, 15, 16, 100, 31], [0, 1, -3, 3, 4, 5, -7, 7, 8], 0),
    "one prompt": ([37], [0], [0], 1),
    "mixed": ([1, 1, 5, 16, 33, 2], [12, 63, 0, 16, 7, 30], [0, 1, NO_LOGITS, 2, NO_LOGITS, 3], 4),
    "padded": ([1, 1, 0, 0, 9, 20, 0], [5, 9, 0, 0, 3, 0, 0], [0, 1, -5, NO_LOGITS, 2, 3, -6], 3),
}


PAIRS = [tuple(pair) for pair in AllPairs([list(CASES), [1, 4, 16], [False, True], [0, 300]])]


@each_set
@pytest.mark.parametrize(("case", "page_size", "padded", "listed"), PAIRS)
def test_rows_expand_as_they_are_defined(kernels, case, page_size, padded, listed):
    counts, starts, logits_rows, prefills = CASES[case]
    uploaded, held = given(counts, starts, logits_rows, page_size)
    many = 1 + max(row if row >= 0 else -1 - row for row in logits_rows if row != NO_LOGITS)
    tokens = sum(count or not prefills for count in counts) + 3
    for with_pages in {0, prefills, len(counts)}:
        size = (tokens, many, prefills, listed, with_pages, padded)
        mine, theirs = room(uploaded, held, *size), room(uploaded, held, *size)
        kernels.prepare_inputs(mine, held, page_size)
        prepare_inputs_reference(theirs, held, page_size)
        assert_same(mine, theirs)


def test_a_row_longer_than_a_program_is_written_whole(monkeypatch):
    monkeypatch.setattr(by_triton, "INPUTS_BLOCK", 16)
    monkeypatch.setattr(by_triton, "MAX_PROGRAMS_PER_ROW", 2)
    given_rows = given([90, 1, 130], [5, 70, 40], [0, 1, 2], 2)
    size = (240, 3, 2, 300, 2)
    mine, theirs = room(*given_rows, *size), room(*given_rows, *size)
    by_triton.prepare_inputs(mine, given_rows[1], 2)
    prepare_inputs_reference(theirs, given_rows[1], 2)
    assert_same(mine, theirs)


@each_set
def test_indices_never_leave_a_buffer_that_is_too_small(kernels):
    uploaded, held = given([1, 1, 1], [30, 30, 30], [0, 1, 2], 4)
    out, small = (room(uploaded, held, 3, 3, listed=64) for _ in range(2))
    kernels.prepare_inputs(out, held, 4)
    backing = small.kv_indices
    object.__setattr__(small, "kv_indices", backing[:10])
    kernels.prepare_inputs(small, held, 4)
    assert torch.equal(backing[:10], out.kv_indices[:10])
    assert (backing[10:] == FULL).all()


@each_set
@pytest.mark.parametrize("count", [0, 1, 5, 2047, 2048])
def test_words_are_written_where_the_first_pairs_say_and_nowhere_else(kernels, count):
    words = torch.full((5000,), FULL, dtype=torch.int32, device=DEVICE)
    indices = torch.randperm(5000, generator=seeded(count))[:2100]
    pairs = torch.stack((indices, 7 * indices), dim=1).int().view(-1).to(DEVICE)
    expected = words.cpu().clone()
    expected[indices[:count]] = 7 * indices[:count].int()
    kernels.scatter_words(pairs, ints([count]), words)
    assert torch.equal(words.cpu(), expected)


@each_set
@pytest.mark.parametrize(
    ("dtype", "added"), [(torch.float32, True), (torch.float32, False), (torch.bfloat16, False)]
)
@pytest.mark.parametrize("first_id", [0, 40])
def test_edits_change_the_logits_of_their_slots_rows_alone(kernels, dtype, added, first_id):
    slots, most, vocabulary = 5, 300, 400
    logits = randn(0, 4, vocabulary, dtype=dtype)
    choose = seeded(1)
    ids = torch.stack([torch.randperm(1000, generator=choose)[:most] for _ in range(slots)])
    values = 9 * torch.randn(slots, most, generator=choose)
    until = torch.randint(0, 200, (slots, most), generator=choose)
    counts = [0, 300, -7, 129, 0]
    words = torch.stack((ids.int(), values.view(torch.int32), until.int())).to(DEVICE)
    rows, positions = [3, 1, 0, 2], [100, 50, 100, 2**33]
    expected = logits.cpu().clone()
    for row, (slot, position) in enumerate(zip(rows, positions, strict=True)):
        if counts[slot] < 0:
            expected[row] = float("-inf")
        for at in range(abs(counts[slot])):
            column = int(ids[slot, at]) - first_id
            if 0 <= column < vocabulary:
                expected[row, column] = logits[row, column] + values[slot, at] * added
                if position < int(until[slot, at]):
                    expected[row, column] = float("-inf")
    where = [torch.tensor(part, device=DEVICE) for part in (rows, positions)]
    none = SlotBadWords(
        ints([[0] * 30] * slots), 4, 8, torch.zeros(slots, dtype=torch.int64, device=DEVICE)
    )
    kernels.apply_logit_edits(
        logits, *where, SlotLogitEdits(ints(counts), words, none), first_id, added
    )
    assert torch.equal(logits.cpu(), expected)


@each_set
@pytest.mark.parametrize("first_id", [0, 3])
@pytest.mark.parametrize("many", [1, 5])
def test_what_would_complete_a_banned_sequence_is_impossible(kernels, first_id, many):
    """Against the text of the rule, for outputs of two ids, with many sequences of each length."""
    recent, room, begin = 4, 8, 5
    choose = numbers(many)
    last = torch.zeros(many, dtype=torch.int64, device=DEVICE)
    bans = SlotBadWords(
        torch.zeros(
            many, BAD_WORDS_HEADER + recent + room + 41, dtype=torch.int32, device=DEVICE
        ),
        recent, room, last,
    )  # fmt: skip
    empty = torch.zeros(3, many, 1, dtype=torch.int32, device=DEVICE)
    edits = SlotLogitEdits(torch.zeros(many, dtype=torch.int32, device=DEVICE), empty, bans)
    spelled = [
        [choose.integers(0, 2, choose.integers(2, 5)).tolist() for _ in range(choose.integers(9))]
        for _ in range(many)
    ]
    # The first output is known when the request comes.
    outputs = [choose.integers(0, 2, 1).tolist() for _ in range(many)]
    for slot, sequences in enumerate(spelled):
        ends = np.cumsum([0, *map(len, sequences)])
        head = [len(sequences), begin, begin + 1, max(map(len, sequences), default=0)]
        words = np.zeros(bans.words.shape[1], np.int32)
        words[:BAD_WORDS_HEADER], words[BAD_WORDS_HEADER + begin % recent] = head, outputs[slot][0]
        words[BAD_WORDS_HEADER + recent :][: len(ends)] = ends
        listed = [token for sequence in sequences for token in sequence]
        words[BAD_WORDS_HEADER + recent + room + 1 :][: ends[-1]] = listed
        bans.words[slot] = torch.from_numpy(words)
    for position in range(begin + 1, begin + 12):
        slots = choose.permutation(many)
        logits = randn(position, many, 6)
        expected = logits.cpu().clone()
        for row, slot in enumerate(slots.tolist()):
            for *before, token in spelled[slot]:
                same = outputs[slot][-len(before) :] == before
                if same and 0 <= token - first_id < 6:
                    expected[row, token - first_id] = float("-inf")
        where = [torch.tensor(part, device=DEVICE) for part in (slots, [position] * many)]
        first = logits.clone()
        kernels.apply_logit_edits(first, *where, edits, first_id, False)
        assert torch.equal(first.cpu(), expected)
        last[:] = 7  # a graph has sampled already, when values are added behind it
        kernels.apply_logit_edits(logits, *where, edits, first_id, True)
        assert torch.equal(logits.cpu(), expected)
        for slot in range(many):
            outputs[slot].append(int(choose.integers(0, 2)))
            last[slot] = outputs[slot][-1]


@each_set
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("first_id", "bits"), [(0, 4096), (70, 4096), (4000, 4096), (0, 2080)])
def test_a_mask_forbids_what_has_no_bit_in_its_rows_alone(kernels, dtype, first_id, bits):
    logits = randn(0, 5, 2100, dtype=dtype)
    allowed = torch.rand(3, bits, generator=seeded(1)) < 0.3
    allowed[1], allowed[2] = False, True
    powers = torch.arange(32)
    words = (allowed.view(3, -1, 32).long() << powers).sum(2)
    words = torch.where(words >= 2**31, words - 2**32, words).int().to(DEVICE)
    rows = torch.tensor([4, 0, 2], device=DEVICE)
    expected = logits.cpu().clone()
    for row, own in zip(rows.tolist(), allowed, strict=True):
        own = torch.cat((own, torch.zeros(2100 + first_id, dtype=torch.bool)))
        expected[row, ~own[first_id : first_id + 2100]] = float("-inf")
    kernels.apply_token_bitmask(logits, rows, words, first_id)
    assert torch.equal(logits.cpu(), expected)
