"""How the hybrid backend cuts its decode rows."""

from __future__ import annotations

import pytest

from pipeinfer.attention.registry import HEAD_DIMS
from pipeinfer.attention.triton_decode import CUTS, MANY, cut


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_fewer_programs_are_cut_smaller(kv_heads):
    most = CUTS[-1][0]
    assert cut(1, kv_heads, 128) == CUTS[0][1]
    assert cut(most // kv_heads, kv_heads, 128) == CUTS[-1][1]
    assert cut(most // kv_heads + 1, kv_heads, 64) == MANY


@pytest.mark.parametrize("rows", [1, 20, 50, 100, 300, 1000])
def test_large_heads_take_no_more_shared_memory_and_registers(rows):
    usual, large = cut(rows, 1, 128), cut(rows, 1, 256)
    assert large.block * 256 <= usual.block * 128 and large.stages == usual.stages
    assert 256 / large.warps == 128 / usual.warps
    assert large.block >= 16 and large.least % large.block == 0


@pytest.mark.parametrize("rows", [1, 20, 50, 100, 300, 1000])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_blocks_of_8_bits_have_twice_the_tokens_at_most_and_cut_rows_evenly(dim, rows):
    usual, narrow = cut(rows, 1, dim), cut(rows, 1, dim, narrow=True)
    assert usual.block <= narrow.block <= 2 * usual.block
    assert narrow.least % narrow.block == 0 and narrow.least_shared % narrow.block == 0


def test_every_head_size_of_the_hybrid_backend_is_one_that_the_kernel_takes():
    assert all(dim >= 16 and dim & (dim - 1) == 0 for dim in HEAD_DIMS["hybrid"])
