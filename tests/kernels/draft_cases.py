"""Draft tokens: made from what a request has, verified, accepted. For interpreter and GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from draws import seeded
from kernels.prepare_inputs_cases import KERNELS, each_set, given, ints, room
from kernels.triton_cases import DEVICE, INTERPRETED
from pipeinfer.kernels import host
from pipeinfer.kernels.interface import (
    MAX_NGRAM,
    NO_LOGITS,
    DeviceStep,
    SlotDrafts,
    SlotTables,
    StepShape,
)
from pipeinfer.wire import DRAFT_TOKEN, REJECTED

DRAFTS, LONGEST, PAGE = 4, 200, 16
# (count, start, samples); a start below 0: as the device says. Decodes first.
ROWS = [(1, 30, True), (1, -1, True), (6, 10, True), (5, -1, True), (3, -1, True), (7, 0, False)]
COUNTS, STARTS, SAMPLES = zip(*ROWS, strict=True)
LENGTHS = [99, 40, 99, 150, 3, 99]  # of the rows' slots; 99 is of requests without drafts


def next_of_ngram(known: list[int], count: int) -> list[int]:
    """What followed the longest run of last tokens, of those the latest, in plain words."""
    best, at = 0, -1
    for end in range(len(known) - 1):
        size = 0
        while size < MAX_NGRAM and size <= end and known[end - size] == known[-1 - size]:
            size += 1
        if size and size >= best:
            best, at = size, end
    followed = known[at + 1 :][:count] if at >= 0 else []
    return followed + [known[-1]] * (count - len(followed))


def step_of(seed: int, alphabet: int = 3) -> tuple[DeviceStep, SlotTables, SlotDrafts]:
    """A step of ROWS. alphabet: different ids of all requests; few of them repeat much."""
    samples, logits_rows, at = list(SAMPLES), [], 0
    for count, start, sampling in zip(COUNTS, STARTS, samples, strict=True):
        logits_rows.append(at if sampling else NO_LOGITS)
        at += (count if start < 0 else 1) if sampling else 0
    uploaded, held = given(COUNTS, [max(s, 0) + 160 for s in STARTS], logits_rows, PAGE, seed)
    uploaded["starts"] = ints(STARTS)
    tokens = torch.arange(500, 500 + sum(COUNTS), dtype=torch.int32)
    ends = np.cumsum(COUNTS)
    for count, start, end in zip(COUNTS, STARTS, ends, strict=True):
        if start < 0:
            tokens[end - count : end] = DRAFT_TOKEN
            tokens[end - count] = -1
    uploaded["tokens"] = tokens.to(DEVICE)
    slots, choose = len(held.page_table), seeded(seed)
    history = torch.randint(0, alphabet, (slots, LONGEST), generator=choose, dtype=torch.int32)
    lengths = torch.full((slots,), 99, dtype=torch.int32)
    lengths[uploaded["slots"].cpu().long()] = torch.tensor(LENGTHS, dtype=torch.int32)
    drafts = SlotDrafts(
        lengths.to(DEVICE), history.to(DEVICE),
        torch.full((slots, DRAFTS), -7, dtype=torch.int32, device=DEVICE),
    )  # fmt: skip
    held = SlotTables(
        held.page_table, held.sampling_words, held.last_token, held.num_wide, held.num_narrow,
        drafts,
    )  # fmt: skip
    step = room(uploaded, held, sum(COUNTS), at, prefills=4, padded=False)
    return step, held, drafts


@each_set
@pytest.mark.parametrize("alphabet", [1, 2, 3, 1000])
def test_drafts_are_what_followed_the_last_tokens_before(kernels, alphabet):
    step, held, drafts = step_of(alphabet, alphabet)
    kernels.propose_ngrams(step, held)
    for row, slot in enumerate(step.slots.tolist()):
        expected = [-7] * DRAFTS
        if STARTS[row] < 0 and COUNTS[row] > 1:
            known = drafts.token_ids[slot, : LENGTHS[row] + 1].tolist()
            expected[: COUNTS[row] - 1] = next_of_ngram(known, COUNTS[row] - 1)
        assert drafts.drafts[slot].tolist() == expected


@each_set
def test_rows_start_where_the_device_says_and_every_draft_has_logits(kernels):
    step, held, drafts = step_of(5)
    kernels.propose_ngrams(step, held)
    kernels.prepare_inputs(step, held, PAGE)
    firsts = np.cumsum([0, *COUNTS])
    logits, fields = 0, held.sampling_words.cpu()
    for row, slot in enumerate(step.slots.tolist()):
        start = STARTS[row] if STARTS[row] >= 0 else LENGTHS[row]
        tokens = slice(firsts[row], firsts[row + 1])
        positions = list(range(start, start + COUNTS[row]))
        assert step.positions[tokens].tolist() == positions
        pages = held.page_table[slot].tolist()
        places = [pages[p // PAGE] * PAGE + p % PAGE for p in positions]
        assert step.slot_mapping[tokens].tolist() == places
        assert int(step.seq_lens[row]) == start + COUNTS[row]
        if STARTS[row] < 0:
            ids = [int(held.last_token[slot]), *drafts.drafts[slot, : COUNTS[row] - 1].tolist()]
            assert step.input_ids[tokens].tolist() == ids
        some = COUNTS[row] if STARTS[row] < 0 else 1
        for offset in range(some if SAMPLES[row] else 0):
            token = firsts[row + 1] - some + offset
            assert int(step.logits_indices[logits]) == token
            assert int(step.write_slots[logits]) == slot
            assert int(step.sample_positions[logits]) == positions[COUNTS[row] - some + offset] + 1
            wide = fields[2 * slot : 2 * slot + 2].tolist()
            assert step.sampling_words[2 * logits : 2 * logits + 2].tolist() == wide
            logits += 1
    assert logits == step.num_logits


@each_set
@pytest.mark.parametrize("right", [0, 1, 2, 4])
@pytest.mark.parametrize("bad", [None, 0, 2])
def test_drafts_are_accepted_as_long_as_they_are_what_was_sampled(kernels, right, bad):
    """`right` drafts of each row are what was sampled; the logits behind `bad` of them are bad."""
    step, held, drafts = step_of(9, 1000)
    kernels.propose_ngrams(step, held)
    kernels.prepare_inputs(step, held, PAGE)
    before, lasts = drafts.token_ids.clone(), held.last_token.clone()
    drawn = torch.zeros((step.num_logits, 2), dtype=torch.int64, device=DEVICE)
    drawn[:, 0], drawn[:, 1] = 1, torch.arange(3000, 3000 + step.num_logits)
    for row, first in enumerate(step.logits_rows.tolist()):
        if first >= 0 and STARTS[row] < 0:
            size = min(right, COUNTS[row] - 1)
            drawn[first : first + size, 1] = drafts.drafts[step.slots[row].long(), :size].long()
            if bad is not None and bad < COUNTS[row]:
                drawn[first + bad] = 0
    sampled = drawn.clone()
    kernels.accept_drafts(step, drawn, held)
    for row, (slot, first) in enumerate(
        zip(step.slots.tolist(), step.logits_rows.tolist(), strict=True)
    ):
        if first < 0:
            assert torch.equal(drafts.token_ids[slot], before[slot])
            continue
        start = STARTS[row] if STARTS[row] >= 0 else LENGTHS[row]
        some = COUNTS[row] if STARTS[row] < 0 else 1
        given, expected = 0, []
        for offset in range(some):
            wrong = given < offset or not int(sampled[first + offset, 0])
            expected.append((REJECTED if offset else 0) if wrong else 1)
            accepted = offset < min(right, some - 1)
            given += not wrong and (given == offset)
            if not accepted and offset < some - 1:
                expected += [REJECTED] * (some - 1 - offset)
                break
        ids = sampled[first : first + given, 1].tolist()
        assert drawn[first : first + some, 0].tolist() == expected
        begin = start + COUNTS[row] if STARTS[row] >= 0 else start + 1
        assert drafts.token_ids[slot, begin : begin + given].tolist() == ids
        assert torch.equal(drafts.token_ids[slot, :begin], before[slot, :begin])
        if STARTS[row] < 0:
            assert int(drafts.lengths[slot]) == start + given
            assert int(held.last_token[slot]) == (ids[-1] if ids else int(lasts[slot]))


@each_set
def test_without_room_for_drafts_nothing_of_them_is_done(kernels):
    step, held, drafts = step_of(1)
    bare = SlotTables(
        held.page_table, held.sampling_words, held.last_token, held.num_wide, held.num_narrow
    )
    drawn = torch.ones((step.num_logits, 2), dtype=torch.int64, device=DEVICE)
    before = drafts.token_ids.clone()
    kernels.propose_ngrams(step, bare)
    kernels.accept_drafts(step, drawn, bare)
    assert torch.equal(drafts.token_ids, before) and bool((drawn == 1).all())


def test_an_ngram_is_found_wherever_it_stands():
    choose = np.random.default_rng(3)
    for _ in range(300):
        known = choose.integers(0, 3, choose.integers(1, 12)).astype(np.int32)
        assert host.next_of_ngram(known, 3).tolist() == next_of_ngram(known.tolist(), 3)


@each_set
def test_in_a_graph_padding_tokens_have_padding_logits(kernels):
    """Two decode rows and three that verify, in a shape for four of each: token t has row t of the
    logits, and what no row needs belongs to the padding slot."""
    counts, starts, prefills = [1, 1, 0, 0, 5, 3, 4, 0], [30, -1, 0, 0, -1, -1, -1, 0], 4
    firsts = np.cumsum([0, *counts])
    logits_rows = [
        int(first) if count else NO_LOGITS for count, first in zip(counts, firsts[:-1], strict=True)
    ]
    capacity, real = 20, sum(counts)
    uploaded, held = given(counts, [max(s, 0) + 160 for s in starts], logits_rows, PAGE, seed=4)
    uploaded["starts"] = ints(starts)
    tokens = [0] * capacity
    for count, first in zip(counts, firsts[:-1], strict=True):
        if count:
            tokens[first : first + count] = [-1] + [DRAFT_TOKEN] * (count - 1)
    uploaded["tokens"] = ints(tokens)
    slots = len(held.page_table)
    drafts = SlotDrafts(
        ints([99] * slots), ints([[7, 8] * (LONGEST // 2)] * slots), ints([[0] * DRAFTS] * slots)
    )
    held = SlotTables(
        held.page_table, held.sampling_words, held.last_token, held.num_wide, held.num_narrow,
        drafts,
    )  # fmt: skip
    shape = StepShape(capacity, len(counts) - prefills, prefills, verifies=True)
    step = room(uploaded, held, capacity, capacity, prefills=prefills, shape=shape)
    kernels.propose_ngrams(step, held)
    kernels.prepare_inputs(step, held, PAGE)
    own = [int(step.slots[row]) for row, count in enumerate(counts) for _ in range(count)]
    padding = slots - 1
    assert step.logits_of_every_token
    assert step.logits_indices.tolist() == [*range(real)] + [0] * (capacity - real)
    assert step.write_slots.tolist() == own + [padding] * (capacity - real)
    assert step.sample_positions.tolist() == [
        position + 1 for position in step.positions[:real].tolist()
    ] + [0] * (capacity - real)
    words = step.sampling_words.cpu()[2 * held.num_wide * capacity :].view(-1, capacity)
    fields = held.sampling_words.cpu()[2 * held.num_wide * len(held.page_table) :]
    fields = fields.view(-1, len(held.page_table))
    assert torch.equal(words, fields[:, own + [padding] * (capacity - real)])
    drawn = torch.ones((capacity, 2), dtype=torch.int64, device=DEVICE)
    drawn[:, 1] = torch.arange(3000, 3000 + capacity)
    kernels.accept_drafts(step, drawn, held)
    assert drawn[:real, 0].tolist() == [
        1 if offset == 0 else REJECTED for count in counts for offset in range(count)
    ]
    assert (drawn[real:, 0] == 1).all(), "nobody reads them"


def test_a_rate_of_acceptance_can_be_imposed():
    """For benchmarks: half of the drafts are accepted whatever was sampled, by all kernels."""
    accepted = {}
    for kernels in reversed(KERNELS):
        given = []
        for seed in range(8 if accepted and INTERPRETED else 40):
            step, held, drafts = step_of(seed, 1000)
            held = replace(held, drafts=replace(drafts, acceptance=0.5))
            kernels.propose_ngrams(step, held)
            kernels.prepare_inputs(step, held, PAGE)
            drawn = torch.ones((step.num_logits, 2), dtype=torch.int64, device=DEVICE)
            drawn[:, 1] = 3000
            before = drafts.lengths.clone()
            kernels.accept_drafts(step, drawn, held)
            given += (drafts.lengths - before)[step.slots.long()].tolist()
        accepted[kernels] = given
    [first, *others] = accepted.values()
    assert all(other and first[: len(other)] == other for other in others)
    verified = [count for row, count in enumerate(first) if STARTS[row % len(ROWS)] < 0]
    of_five = verified[1::3]  # the row of four drafts
    mean = sum(of_five) / len(of_five)
    assert 1.5 < mean < 2.4  # 1 + 0.5 + 0.25 + 0.125 + 0.0625
