"""Cuts of products with weights of 4 bits: whole tiles, whole runs, shared evenly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.kernels.int4_layout import RUN
from pipeinfer.kernels.int4_tiles import COLUMNS, FEW, cut


@given(rows=st.integers(1, 300), tiles=st.integers(1, 600), runs=st.integers(1, 150))
def test_a_cut_covers_rows_columns_and_depth(rows, tiles, runs):
    how = cut(rows, tiles * COLUMNS, runs * RUN)
    if rows > FEW:
        assert how is None
        return
    assert how is not None and how.rows >= rows
    assert tiles * COLUMNS % how.columns == 0
    assert runs % (how.splits * how.runs) == 0


@pytest.mark.parametrize("width", [7168, 5120])
def test_a_narrow_product_is_shared_until_multiprocessors_are_full(width):
    how = cut(1, width, 5120)
    assert how is not None and width // how.columns * how.splits >= 3 * 132
