"""What a step gave, out of what its rows drew: rows that give nothing, one token, or several."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.step import Sampled

rows = st.integers(1, 4).flatmap(
    lambda most: st.tuples(
        st.just(most),
        st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=most), max_size=6),
    )
)


@given(rows, st.integers(-9, 9))
def test_tokens_stand_row_after_row_and_rows_without_any_are_bad(drawn, rest):
    most, tokens = drawn
    table = np.full((len(tokens), 1 + most), rest, dtype=np.int64)
    for row, ids in enumerate(tokens):
        table[row, : 1 + len(ids)] = [len(ids), *ids]
    sampled = Sampled.of(table)
    assert sampled.num_sampled.tolist() == [len(ids) for ids in tokens]
    assert sampled.ids.tolist() == [token for ids in tokens for token in ids]
    assert sampled.bad.tolist() == [row for row, ids in enumerate(tokens) if not ids]
    arrays = sampled.num_sampled, sampled.ids, sampled.bad
    assert {array.dtype for array in arrays} == {np.dtype(np.int32)}


def test_one_token_of_each_row():
    sampled = Sampled.one_each([5, 7])
    assert (sampled.num_sampled.tolist(), sampled.ids.tolist(), sampled.bad.tolist()) == (
        [1, 1],
        [5, 7],
        [],
    )


@given(st.lists(st.tuples(st.lists(st.integers(0, 99), max_size=3), st.lists(st.integers(0, 99)))))
def test_what_comes_behind_the_tokens_of_a_row_stands_behind_them(drawn):
    tokens, more = (
        [ids for ids, _ in drawn],
        {row: ids for row, (_, ids) in enumerate(drawn) if ids},
    )
    counts = np.array([len(ids) for ids in tokens], dtype=np.int32)
    before = Sampled(counts, np.array([t for ids in tokens for t in ids], dtype=np.int32))
    sampled = before.followed_by(more)
    assert sampled.num_sampled.tolist() == [len(ids) + len(behind) for ids, behind in drawn]
    assert sampled.ids.tolist() == [t for ids, behind in drawn for t in (*ids, *behind)]
    assert (sampled.num_sampled.dtype, sampled.ids.dtype) == (np.int32, np.int32)
    assert before.num_sampled.tolist() == [len(ids) for ids in tokens], "it is somebody else's"
