"""Decode steps with a row much longer than the others: which graph they get."""

from __future__ import annotations

import numpy as np
import pytest

from pipeinfer.engine.cuda.graphs import uneven, uneven_ladder

KV_HEADS = 8


@pytest.mark.parametrize("rows", [17, 64, 256])
def test_rows_of_like_lengths_are_even(rows):
    lengths = np.random.default_rng(0).integers(100, 2000, rows).astype(np.int32)
    assert not uneven(lengths, KV_HEADS)
    assert not uneven(np.zeros(rows, dtype=np.int32), KV_HEADS)


@pytest.mark.parametrize("rows", [17, 64, 256])
def test_one_long_row_makes_a_step_uneven(rows):
    lengths = np.full(rows, 500, dtype=np.int32)
    lengths[rows // 2] = 100_000
    assert uneven(lengths, KV_HEADS)


def test_lengths_beyond_the_range_of_their_dtype_are_summed():
    lengths = np.full(256, 2**24, dtype=np.int32)
    assert not uneven(lengths, KV_HEADS)


def test_uneven_steps_have_few_graphs_that_reach_as_far():
    sizes = (1, 2, 4, *range(8, 201, 8))
    assert uneven_ladder(sizes, 17) == (32, 64, 128, 192, 200)
    assert uneven_ladder(sizes, 65) == (128, 192, 200)
    assert uneven_ladder(sizes, None) == ()
    assert uneven_ladder((), 17) == ()
