"""What a step gave, out of what its rows of logits drew: one token each, or none."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.step import Sampled
from pipeinfer.wire import REJECTED

rows = st.lists(
    st.tuples(st.sampled_from((1, 1, 1, 0, REJECTED)), st.integers(0, 2**31 - 1), st.booleans()),
    max_size=6,
)


@given(rows)
def test_tokens_stand_row_after_row_and_rows_without_any_are_bad_refused_or_rejected(drawn):
    """Whatever a row drew that its grammar refuses. A row that is none of these gave one token."""
    refused = {row: "no" for row, (_, _, refuses) in enumerate(drawn) if refuses}
    table = np.array([row[:2] for row in drawn], dtype=np.int64).reshape(-1, 2)
    sampled = Sampled.of(table, refused)
    gave = [count == 1 and not refuses for count, _, refuses in drawn]
    assert sampled.num_sampled.tolist() == gave
    assert sampled.ids.tolist() == [row[1] for row, one in zip(drawn, gave, strict=True) if one]
    bad = [row for row, (count, _, refuses) in enumerate(drawn) if count == 0 and not refuses]
    assert sampled.bad.tolist() == bad and sampled.refused == refused
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
