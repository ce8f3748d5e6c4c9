"""How the hybrid backend cuts its decode rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeinfer.attention.registry import HEAD_DIMS
from pipeinfer.attention.triton_backend import (
    FEW_KV_HEADS_LOAD,
    MANY_ROWS,
    MAX_FEW_KV_HEADS,
    PREFIX_LOAD,
    PREFIX_PROGRAMS,
    TILE_CONFIGS,
    tile_config,
)


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_fewer_programs_are_cut_smaller(kv_heads):
    most = TILE_CONFIGS[-1][0]
    assert tile_config(1, kv_heads, 128) == TILE_CONFIGS[0][1]
    assert tile_config(most // kv_heads, kv_heads, 128) == TILE_CONFIGS[-1][1]
    many = replace(
        MANY_ROWS,
        prefix_queries=64,
        prefix_load=PREFIX_LOAD,
        extra_prefix_splits=PREFIX_PROGRAMS // kv_heads,
        min_prefix_tokens=512,
    )
    if kv_heads <= MAX_FEW_KV_HEADS:
        many = replace(many, load=FEW_KV_HEADS_LOAD)
    assert tile_config(most // kv_heads + 1, kv_heads, 64) == many


@pytest.mark.parametrize("kv_heads", [1, 4, 8])
def test_many_rows_have_a_launch_for_what_they_begin_with(kv_heads):
    rows = TILE_CONFIGS[-1][0] // kv_heads + 1
    many, few = tile_config(rows, kv_heads, 128), tile_config(rows - 1, kv_heads, 128)
    assert (
        many.prefix_load is not None
        and many.prefix_queries == 64
        and many.extra_prefix_splits * kv_heads == PREFIX_PROGRAMS
    )
    assert few.prefix_load is None and few.prefix_queries == MANY_ROWS.prefix_queries
    assert many.min_prefix_tokens % many.prefix_load.block_n == 0
    for other in (tile_config(rows, kv_heads, 256), tile_config(rows, kv_heads, 128, fp8=True)):
        assert other.prefix_load is None


@pytest.mark.parametrize("rows", [1, 20, 50, 100, 300, 1000])
def test_large_heads_take_no_more_shared_memory_and_registers(rows):
    usual, whole = tile_config(rows, 8, 128).load, tile_config(rows, 8, 256)
    large = whole.load
    assert large.block_n * 256 <= usual.block_n * 128 and large.num_stages == usual.num_stages
    assert 256 / large.num_warps == 128 / usual.num_warps
    assert large.block_n >= 16 and whole.min_tokens % large.block_n == 0


@pytest.mark.parametrize("rows", [1, 20, 50, 100, 300, 1000])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_blocks_of_8_bits_have_twice_the_tokens_at_most_and_cut_rows_evenly(dim, rows):
    usual, whole = tile_config(rows, 8, dim).load, tile_config(rows, 8, dim, fp8=True)
    narrow = whole.load
    assert usual.block_n <= narrow.block_n <= 2 * usual.block_n
    assert whole.min_tokens % narrow.block_n == 0 and whole.min_prefix_tokens % narrow.block_n == 0


def test_every_head_size_of_the_hybrid_backend_is_one_that_the_kernel_takes():
    assert all(dim >= 16 and dim & (dim - 1) == 0 for dim in HEAD_DIMS["hybrid"])
