"""Which tiles the products of a mixture get, for any number of pairs and experts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.kernels.moe_e4m3 import MIDDLE
from pipeinfer.kernels.moe_tiles import (
    BY_BITS,
    EIGHT_BITS,
    FOUR_BITS,
    MANY,
    ROUNDED,
    rounded_tiles,
    tiles,
)

SIDE = 128  # of a block of weights in FP8 that share a scale, of what has a word of exponents


@pytest.mark.parametrize("table", [*BY_BITS.values(), ROUNDED])
def test_tables_go_up_to_any_number_of_pairs(table):
    bounds = [most for most, _ in table]
    assert bounds == sorted(set(bounds)) and bounds[-1] == MANY
    heights = [shape.rows for _, shape in table]
    assert heights == sorted(heights) and all(rows in (16, 32, 64, 128) for rows in heights)


def test_tiles_of_fewer_bits_stay_within_what_shares_a_scale():
    for _, shape in (*EIGHT_BITS, *FOUR_BITS):
        for cut in (shape.gate_up, shape.down):
            assert SIDE % cut.columns == SIDE % cut.depth == 0
    for _, shape in ROUNDED:
        assert shape.gate_up.columns % MIDDLE == SIDE % shape.gate_up.columns == 0
        assert shape.gate_up.depth == SIDE and shape.down.depth == MIDDLE
        assert shape.down.columns in (SIDE // 2, SIDE)


@given(st.integers(1, 100_000), st.integers(1, 512), st.sampled_from(sorted(BY_BITS)))
def test_the_mean_number_of_pairs_decides(pairs, experts, bits):
    assert tiles(pairs, experts, bits) == tiles(3 * pairs, 3 * experts, bits)
    assert rounded_tiles(pairs, experts) == rounded_tiles(3 * pairs, 3 * experts)
