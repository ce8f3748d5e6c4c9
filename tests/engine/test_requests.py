"""The parameters of the requests in their slots: what is suppressed where, and no surprises."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeinfer.engine.requests import RequestTable
from pipeinfer.messages import Admit, pack
from pipeinfer.params import SamplingParams

SLOTS = 5


def admit(slot: int, prompt_len: int, suppress=(), **params) -> Admit:
    ids = pack([1] * prompt_len)
    return Admit(
        slot, "r", ids, prompt_len, 10**6, SamplingParams(**params), 0, tuple(sorted(suppress))
    )


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_ids_are_suppressed_until_a_request_has_its_least_number_of_tokens(data):
    table, known = RequestTable(SLOTS), {}
    for _ in range(data.draw(st.integers(1, 12))):
        if not known or data.draw(st.booleans()):
            slot = data.draw(st.integers(0, SLOTS - 1))
            ids = data.draw(st.sets(st.integers(0, 9)))
            known[slot] = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 5)), ids
            length, least, ids = known[slot]
            table.put(admit(slot, length, ids, min_tokens=least))
        slots = data.draw(st.permutations(sorted(known)))
        positions = [known[slot][0] + data.draw(st.integers(0, 7)) for slot in slots]
        found = table.suppressed(np.array(slots, np.int32), np.array(positions, np.int64))
        assert found.dtype == np.int64
        assert found.tolist() == [
            [row, token]
            for row, (slot, position) in enumerate(zip(slots, positions, strict=True))
            for token in sorted(known[slot][2])
            if position < known[slot][0] + known[slot][1]
        ]


def test_pairs_are_made_of_arrays_and_only_when_the_rows_change():
    """Made of tuples in every step they took 612 ms, at 16 rows that suppress a vocabulary."""
    rows, vocabulary = 16, 20_000
    table = RequestTable(rows)
    for slot in range(rows):
        table.put(admit(slot, 3, range(vocabulary), min_tokens=100))
    slots = np.arange(rows, dtype=np.int32)
    first = table.suppressed(slots, np.full(rows, 8))
    assert table.suppressed(slots, np.full(rows, 9)) is first
    tracemalloc.start()
    fewer = table.suppressed(slots[1:], np.full(rows - 1, 8))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(fewer) == (rows - 1) * vocabulary
    assert peak < 3 * fewer.nbytes, "no Python object for each id"


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
    slots, positions = np.array([2], np.int32), np.array([4], np.int64)
    rows = table.sampling_rows(slots, positions)
    values = {name: values[0] for name, values in rows.fields.items()}
    assert values["top_k"] == (2**31 - 1 if "top_k" in params else 0)
    assert len(rows.suppress) == (2 if "min_tokens" in params else 0)
    assert np.isfinite(list(values.values())).all()
    assert values["min_p"] <= 1
