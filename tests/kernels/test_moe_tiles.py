"""Which tiles the products of a mixture get, for any number of pairs and experts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.kernels.moe_fp8 import INTERMEDIATE_GROUP
from pipeinfer.kernels.tile_configs import (
    MANY,
    MOE_CONFIGS_BY_WEIGHT_BITS,
    MOE_CONFIGS_MXFP4,
    MOE_CONFIGS_W8A8,
    MOE_CONFIGS_W8A16,
    moe_config,
    moe_w8a8_config,
)

SIDE = 128  # of a block of weights in FP8 that share a scale, of what has a word of exponents


@pytest.mark.parametrize("table", [*MOE_CONFIGS_BY_WEIGHT_BITS.values(), MOE_CONFIGS_W8A8])
def test_tables_go_up_to_any_number_of_pairs(table):
    bounds = [most for most, _ in table]
    assert bounds == sorted(set(bounds)) and bounds[-1] == MANY
    heights = [shape.rows for _, shape in table]
    assert heights == sorted(heights) and all(rows in (16, 32, 64, 128) for rows in heights)


def test_tiles_of_fewer_bits_stay_within_what_shares_a_scale():
    for _, shape in (*MOE_CONFIGS_W8A16, *MOE_CONFIGS_MXFP4):
        for cut in (shape.gate_up, shape.down):
            assert SIDE % cut.block_n == SIDE % cut.block_k == 0
    for _, shape in MOE_CONFIGS_W8A8:
        assert shape.gate_up.block_n % INTERMEDIATE_GROUP == SIDE % shape.gate_up.block_n == 0
        assert shape.gate_up.block_k == SIDE and shape.down.block_k == INTERMEDIATE_GROUP
        assert shape.down.block_n in (SIDE // 2, SIDE)


@given(
    st.integers(1, 100_000),
    st.integers(1, 512),
    st.sampled_from(sorted(MOE_CONFIGS_BY_WEIGHT_BITS)),
)
def test_the_mean_number_of_pairs_decides(pairs, experts, bits):
    assert moe_config(pairs, experts, bits) == moe_config(3 * pairs, 3 * experts, bits)
    assert moe_w8a8_config(pairs, experts) == moe_w8a8_config(3 * pairs, 3 * experts)
