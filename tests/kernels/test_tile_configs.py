"""Tile configurations cover what they are chosen for, and fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.kernels.formats import INT4_TILE_K
from pipeinfer.kernels.moe_fp8 import INTERMEDIATE_GROUP
from pipeinfer.kernels.tile_configs import (
    INT4_BLOCK_N,
    INT4_MAX_ROWS,
    MANY,
    MOE_CONFIGS_BY_WEIGHT_BITS,
    MOE_CONFIGS_MXFP4,
    MOE_CONFIGS_W8A8,
    MOE_CONFIGS_W8A16,
    GemmConfig,
    int4_gemm_config,
    moe_config,
    moe_w8a8_config,
    small_m_gemm_config,
)

SHARED_BYTES = 227 * 1024  # of a block on the GPUs that the tiles were chosen for
KINDS = ["product", "gated", "split"]
ALL_KINDS = [*KINDS, "narrow"]
SIZES = st.integers(1, 400).map(lambda n: 64 * n) | st.integers(1, 20_000)


@given(st.sampled_from(ALL_KINDS), st.integers(0, 600), SIZES, SIZES)
def test_a_tile_divides_the_shape_and_fits_into_a_block(kind, rows, width, depth):
    found = small_m_gemm_config(kind, rows, width, depth)
    if found is None:
        return
    assert width % found.block_n == 0
    assert depth % (found.split_k * found.block_k) == 0
    assert found.split_k == 1 or kind in ("split", "narrow")
    operands = found.block_m + found.block_n * (2 if kind == "gated" else 1)
    assert found.num_stages * found.block_k * 2 * operands <= SHARED_BYTES


@given(st.sampled_from(KINDS), st.integers(1, 128), SIZES, SIZES)
def test_rows_of_one_class_get_one_tile(kind, rows, width, depth):
    top = next(most for most in (16, 32, 64, 128) if rows <= most)
    assert small_m_gemm_config(kind, rows, width, depth) == small_m_gemm_config(
        kind, top, width, depth
    )


@pytest.mark.parametrize("kind", KINDS)
def test_many_rows_are_left_to_the_library(kind):
    assert small_m_gemm_config(kind, 129, 1024, 1024) is None
    assert small_m_gemm_config(kind, 65, 4096, 4096) is None
    assert small_m_gemm_config(kind, 17, 17408, 5120) is None
    assert isinstance(small_m_gemm_config(kind, 16, 17408, 5120), GemmConfig)


@pytest.mark.parametrize("kind", KINDS)
def test_a_shape_that_no_tile_divides_is_left_to_the_library(kind):
    assert small_m_gemm_config(kind, 8, 1000, 1024) is None
    assert small_m_gemm_config(kind, 8, 1024, 1000) is None


def test_a_router_gets_splits_for_any_step_of_decodes():
    """Of the shape of Qwen3-30B-A3B; a step of prompts is left to the library."""
    found = {
        rows: small_m_gemm_config("narrow", rows, 128, 2048)
        for rows in (1, 16, 17, 64, 65, 256, 512)
    }
    assert all(one is not None and one.split_k == 8 for one in found.values())
    assert found[1] == found[16] and found[65] == found[512]
    assert (
        small_m_gemm_config("narrow", 513, 128, 2048)
        is small_m_gemm_config("narrow", 8, 1024, 2048)
        is None
    )
    assert small_m_gemm_config("narrow", 8, 60, 2048) is None


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


SIDE = 128  # of a block of weights in FP8 that share a scale, of what has a word of exponents


@pytest.mark.parametrize("table", [*MOE_CONFIGS_BY_WEIGHT_BITS.values(), MOE_CONFIGS_W8A8])
def test_tables_go_up_to_any_number_of_pairs(table):
    bounds = [most for most, _ in table]
    assert bounds == sorted(set(bounds)) and bounds[-1] == MANY
    heights = [shape.block_m for _, shape in table]
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
