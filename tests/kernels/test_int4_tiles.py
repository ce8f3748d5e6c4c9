"""Cuts of products with weights of 4 bits: whole tiles, whole runs, shared evenly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.kernels.formats import INT4_TILE_K
from pipeinfer.kernels.tile_configs import INT4_BLOCK_N, INT4_MAX_ROWS, int4_gemm_config


@given(rows=st.integers(1, 300), tiles=st.integers(1, 600), runs=st.integers(1, 150))
def test_a_cut_covers_rows_columns_and_depth(rows, tiles, runs):
    how = int4_gemm_config(rows, tiles * INT4_BLOCK_N, runs * INT4_TILE_K)
    if rows > INT4_MAX_ROWS:
        assert how is None
        return
    assert how is not None and how.block_m >= rows
    assert tiles * INT4_BLOCK_N % how.block_n == 0
    assert runs % (how.split_k * how.k_tiles) == 0


@pytest.mark.parametrize("width", [7168, 5120])
def test_a_narrow_product_is_shared_until_multiprocessors_are_full(width):
    how = int4_gemm_config(1, width, 5120)
    assert how is not None and width // how.block_n * how.split_k >= 3 * 132
