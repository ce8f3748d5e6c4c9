"""The parameters of the requests in their slots: what is edited where, and no surprises."""

from __future__ import annotations

import numpy as np
import pytest
from edits_by_slot import Edited
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from pipeinfer.engine.step_builder import MAX_LOGIT_EDITS, RequestTable, filled, logit_edits_of
from pipeinfer.messages import Admit
from pipeinfer.params import MAX_BAD_WORDS, MAX_BIASES, MAX_STOP_TOKENS, RequestParams
from pipeinfer.step import StepDelta
from pipeinfer.wire import pack

SLOTS, VOCABULARY = 5, 12


BIASES = st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-100, 100, width=32))


def admit(slot: int, prompt_len: int, suppress=(), **params) -> Admit:
    ids = pack([1] * prompt_len)
    return Admit(
        slot, "r", ids, prompt_len, 10**6, RequestParams(**params), 0, tuple(sorted(suppress))
    )


@given(st.sets(st.integers(0, VOCABULARY - 1)), BIASES, st.integers(0, 2**40))
def test_an_id_that_is_suppressed_and_biased_is_one_edit(suppress, biases, least):
    edits = logit_edits_of(admit(3, 4, suppress, min_tokens=least, logit_bias=biases))
    assert (edits.ids.dtype, edits.values.dtype, edits.until.dtype) == ("i4", "f4", "i4")
    until = min(4 + least, 2**31 - 1)
    expected = {
        token: (biases.get(token, 0.0), until if token in suppress else 0)
        for token in {*suppress, *biases}
    }
    said = zip(edits.values.tolist(), edits.until.tolist(), strict=True)
    assert dict(zip(edits.ids.tolist(), said, strict=True)) == expected
    assert len(edits.ids) == len(expected) and edits.slot == 3


def test_the_most_that_a_request_may_ask_for_has_room_on_the_device():
    stops, biases = range(MAX_STOP_TOKENS + 9), range(5000, 5000 + MAX_BIASES)
    most = admit(0, 1, stops, min_tokens=1, logit_bias=dict.fromkeys(biases, 1.0))
    words = tuple((9000 + n,) for n in range(2 * MAX_BAD_WORDS))
    edits = logit_edits_of(structs.replace(most, bad_word_ids=words))
    assert len(edits.ids) == len(stops) + len(biases) + len(words) < MAX_LOGIT_EDITS


LISTED = st.none() | st.sets(st.integers(0, VOCABULARY - 1), min_size=1)


@given(LISTED, st.sets(st.integers(0, VOCABULARY - 1)), BIASES, st.sets(st.integers(0, 11)))
def test_what_is_allowed_and_what_never_is_are_one_edit_an_id(allowed, suppress, biases, never):
    listed = None if allowed is None else tuple(allowed)
    one = admit(1, 4, suppress, min_tokens=2, logit_bias=biases, allowed_token_ids=listed)
    edits = logit_edits_of(structs.replace(one, bad_word_ids=tuple((token,) for token in never)))
    state = Edited(2)
    fields = {name: values[:1] for name, values in filled(1).items()}
    state.apply(StepDelta(admitted=np.array([1], np.int32), fields=fields, logit_edits=(edits,)))
    assert len(set(edits.ids.tolist())) == len(edits.ids) and edits.bad_words is None
    for position, values in ((5, False), (5, True), (6, True)):
        logits = np.zeros((1, VOCABULARY), np.float32)
        left = state.logits(logits, [1], [position], 0, values)[0]
        for token in range(VOCABULARY):
            held = token in never or (token in suppress and position < 6)
            free = (allowed is None or token in allowed) and not held
            wanted = np.float32(biases.get(token, 0.0)) if values else 0.0
            assert left[token] == (wanted if free else -np.inf)


def test_the_next_request_of_a_slot_is_free_of_what_the_last_one_must_not_say():
    table, state = RequestTable(SLOTS), Edited(SLOTS)
    for banned, listed in ((((1, 2), (3,)), (1, 2, 3)), ((), None)):
        table.put(structs.replace(admit(2, 4, allowed_token_ids=listed), bad_word_ids=banned))
        admitted, fields, edits = table.take_changes()
        state.apply(StepDelta(admitted=admitted, fields=fields, logit_edits=edits))
        state.state.by_slot.last_token[2] = 1
        left = state.logits(np.zeros((1, 5), np.float32), [2], [5])[0]
        assert left.tolist() == ([-np.inf, 0, -np.inf, -np.inf, -np.inf] if banned else [0] * 5)


def test_outputs_of_before_a_preemption_count_up_to_the_longest_sequence():
    known, prompt = [5, 6, *range(100)], 2
    banned = (tuple(range(36, 100)), tuple(range(98, 100)), (6, 0), (4, 98))
    longest = (*range(37, 100), 7)
    for sequence in (longest, (98, 99, 8)):
        one = admit(0, prompt)
        one = structs.replace(one, token_ids=pack(known), bad_word_ids=(*banned, sequence))
        state, table = Edited(1), RequestTable(1)
        table.put(one)
        admitted, fields, edits = table.take_changes()
        state.apply(StepDelta(admitted=admitted, fields=fields, logit_edits=edits))
        left = state.logits(np.zeros((1, 120), np.float32), [0], [len(known)])[0]
        assert np.flatnonzero(left).tolist() == [sequence[-1]]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_biases_are_added_and_ids_suppressed_until_a_request_has_its_least_tokens(data):
    table, state, known = RequestTable(SLOTS), Edited(SLOTS), {}
    first, share = data.draw(st.sampled_from([(0, VOCABULARY), (5, 4), (9, 3), (12, 0)]))
    for _ in range(data.draw(st.integers(1, 12))):
        for _ in range(data.draw(st.integers(0 if known else 1, 2))):
            slot = data.draw(st.integers(0, SLOTS - 1))
            ids = data.draw(st.sets(st.integers(0, VOCABULARY - 1)))
            known[slot] = length, least, ids, biases = (
                data.draw(st.integers(1, 9)), data.draw(st.integers(0, 5)), ids, data.draw(BIASES)
            )  # fmt: skip
            table.put(admit(slot, length, ids, min_tokens=least, logit_bias=biases))
        changes = table.take_changes()
        if changes is not None:
            admitted, fields, edits = changes
            assert len(set(admitted.tolist())) == len(admitted)
            state.apply(StepDelta(admitted=admitted, fields=fields, logit_edits=edits))
        slots = data.draw(st.permutations(sorted(known)))
        positions = [known[slot][0] + data.draw(st.integers(0, 7)) for slot in slots]
        logits = np.random.default_rng(0).random((len(slots), share), dtype=np.float32)
        before, where = logits.copy(), (slots, positions, first)
        suppressed, found = (state.logits(logits, *where, values) for values in (False, True))
        for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
            length, least, ids, biases = known[slot]
            for column in range(share):
                never = first + column in ids and position < length + least
                biased = before[row, column] + np.float32(biases.get(first + column, 0))
                assert suppressed[row, column] == (-np.inf if never else before[row, column])
                assert found[row, column] == (-np.inf if never else biased)
            assert state.state.biased[slot] == any(biases.values())


def test_a_slot_is_said_once_and_with_what_it_holds_now():
    table = RequestTable(SLOTS)
    for slot, seed in ((3, 7), (1, 8), (3, 9)):
        table.put(structs.replace(admit(slot, 2, (4,), min_tokens=1), seed=seed))
    admitted, fields, edits = table.take_changes()
    assert admitted.tolist() == [3, 1] and fields["seed"].tolist() == [9, 8]
    assert [one.slot for one in edits] == [3, 1]
    assert table.take_changes() is None
    table.put(admit(3, 2))
    assert table.take_changes()[2] == ()


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 2**31}, {"top_k": 2**70}, {"min_tokens": 2**63}, {"min_tokens": 2**80},
        {"temperature": 1e300}, {"temperature": float("inf")}, {"min_p": 7.0}, {"top_p": 1e-320},
        {"repetition_penalty": 1e300}, {"repetition_penalty": 1e-300}, {"frequency_penalty": 1e99},
    ],
)  # fmt: skip
def test_no_parameter_is_too_large_for_the_arrays(params):
    table = RequestTable(SLOTS)
    table.put(admit(2, 4, (1, 2), **params))
    fields = table.fields(np.array([2], np.int32))
    values = {name: values[0] for name, values in fields.items()}
    assert values["top_k"] == (2**31 - 1 if "top_k" in params else 0)
    [edits] = table.take_changes()[2]
    assert edits.until.tolist() == [2**31 - 1 if "min_tokens" in params else 4] * 2
    assert np.isfinite(list(values.values())).all()
    assert values["min_p"] <= 1
