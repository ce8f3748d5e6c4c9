"""Penalties: what is counted, for whom, and that other rows and requests are left alone."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeinfer.engine.sampling import IN_OUTPUT, IN_PROMPT, Penalties, penalized
from pipeinfer.processes import resident_bytes
from pipeinfer.step import PenaltyHistory, PenaltyRows

VOCAB, SLOTS = 11, 4
ids = st.lists(st.integers(0, VOCAB - 1), max_size=6)
factors = st.tuples(st.sampled_from((0.5, 1.0, 1.3)), *[st.sampled_from((-2.0, 0.0, 0.7))] * 2)


def seen(penalties, logits, rows, unpadded_rows, ids):
    """The logits from which `ids` are sampled, which it then counts."""
    changed = logits.to(torch.float32, copy=True)
    said = penalties.apply(changed, rows, unpadded_rows)
    drawn = np.stack((ids >= 0, np.maximum(ids, 0)), axis=1).astype(np.int64)
    penalties.count(torch.from_numpy(drawn), *said)
    return changed


def expected(logits, prompt, output, repetition, frequency, presence):
    """One row, one id at a time."""
    made = []
    for token, value in enumerate(logits):
        if token in (*prompt, *output):
            value = value / repetition if value > 0 else value * repetition
        value -= frequency * output.count(token) + presence * (token in output)
        made.append(value)
    return np.array(made, dtype=np.float32)


@settings(max_examples=25, deadline=None)
@given(st.data(), st.integers(1, VOCAB - 1))
def test_rows_change_by_what_their_own_requests_have_said(data, split):
    """On one rank with all ids and on two with a part each, step by step."""
    whole = Penalties(SLOTS, range(VOCAB), "cpu")
    halves = range(split), range(split, VOCAB)
    parts = [Penalties(SLOTS, ids, "cpu") for ids in halves]
    said = {}
    random = np.random.default_rng(0)
    for _ in range(data.draw(st.integers(1, 5))):
        new = []
        for slot in data.draw(st.sets(st.integers(0, SLOTS - 1), max_size=2)):
            said[slot] = data.draw(ids), data.draw(ids), data.draw(factors)
            new.append(
                PenaltyHistory(slot, *(np.array(some, dtype=np.int32) for some in said[slot][:2]))
            )
        # Rows of the logits in any order, of which some belong to the slots that have penalties.
        unpadded_rows = random.permutation(SLOTS + 2)[: max(len(said), 1)]
        slots = np.array(sorted(said), dtype=np.int64)
        hows = np.array([said[slot][2] for slot in slots], dtype=np.float32).reshape(-1, 3)
        rows = PenaltyRows(np.arange(len(slots)), slots, hows, tuple(new))
        logits = random.normal(size=(SLOTS + 2, VOCAB)).astype(np.float32)
        given_logits = torch.from_numpy(logits.copy())
        sampled = random.integers(0, VOCAB, SLOTS + 2)
        changed = seen(whole, given_logits, rows, unpadded_rows, sampled)
        wanted = logits.copy()
        for row, slot in enumerate(slots.tolist()):
            prompt, output, how = said[slot]
            wanted[unpadded_rows[row]] = expected(logits[unpadded_rows[row]], prompt, output, *how)
        np.testing.assert_allclose(changed.numpy(), wanted, rtol=1e-6, atol=1e-6)
        padding = torch.full((len(logits), 2), float("nan"))
        for part, own in zip(parts, halves, strict=True):
            mine = torch.cat((given_logits[:, own.start : own.stop], padding), 1)
            found = seen(part, mine, rows, unpadded_rows, sampled)
            assert torch.equal(found[:, : len(own)], changed[:, own.start : own.stop])
            assert found[:, len(own) :].isnan().all(), "padding is nobody's"
        for row, slot in enumerate(slots.tolist()):
            said[slot][1].append(int(sampled[unpadded_rows[row]]))


def test_all_memory_is_there_before_any_request_asks():
    penalties = Penalties(SLOTS, range(5, VOCAB), "cpu")
    assert penalties.bytes == SLOTS * (VOCAB - 5) * 4
    before = penalties._counts.data_ptr()
    every = np.arange(SLOTS)
    rows = PenaltyRows(every, every, np.full((SLOTS, 3), 1.5, np.float32))
    seen(penalties, torch.zeros(SLOTS, VOCAB - 5), rows, None, every)
    assert (penalties._counts.data_ptr(), penalties.bytes) == (before, SLOTS * (VOCAB - 5) * 4)


def test_counts_of_slots_without_penalties_take_no_memory():
    before = resident_bytes()
    penalties = Penalties(256, range(49_152), "cpu")
    assert penalties.bytes == 48 * 2**20
    assert resident_bytes() - before < 4 * 2**20


def test_an_impossible_id_stays_impossible_and_many_rows_are_as_few():
    penalties, count = Penalties(100, range(VOCAB), "cpu"), 100
    new = tuple(
        PenaltyHistory(slot, np.array([0, 1]), np.array([1], np.int32)) for slot in range(count)
    )
    every = np.arange(count)
    rows = PenaltyRows(every, every, np.full((count, 3), [1.3, 0.5, 0.5], np.float32), new)
    logits = torch.zeros((count, VOCAB), dtype=torch.bfloat16)
    logits[:, 0] = float("-inf")
    changed = seen(penalties, logits, rows, None, every)
    assert changed.dtype == torch.float32
    assert (changed[:, 0] == float("-inf")).all() and (changed[:, 1] == -1).all()
    assert (changed[:, 2:] == 0).all()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=True), min_size=1, max_size=8),
    st.sampled_from([0.0, 1e-38, 0.01, 1.0, 100.0, 3e38, float("inf")]),
    st.sampled_from([-2.0, 0.0, 2.0]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 3),
)
def test_no_penalty_makes_a_finite_logit_bad_or_a_bad_one_finite(values, often, less, dtype, said):
    logits = torch.tensor([values]).to(dtype).float()
    counts = torch.full_like(logits, said * IN_OUTPUT + IN_PROMPT, dtype=torch.int32)
    changed = penalized(logits, counts, torch.tensor([[often, less, less]]))
    assert changed.isfinite()[logits.isfinite()].all()
    assert not changed.isfinite()[~logits.isfinite()].any() or often in (0.0, float("inf"))
