"""Which tiles products of few rows get: whatever the shape, one that the kernel can run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.kernels.tile_configs import GemmConfig, small_m_gemm_config

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
