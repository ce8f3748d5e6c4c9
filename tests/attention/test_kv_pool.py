"""The KV pool's shapes, sizes and what it costs before it is used."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeinfer.attention.interface import KVPool
from pipeinfer.kernels.formats import E4M3, UNIT_KV_SCALES, KVScales
from pipeinfer.processes import resident_bytes
from pipeinfer.step import AttentionShape


def test_a_large_pool_takes_memory_only_where_it_is_written():
    before = resident_bytes()
    pool = KVPool([AttentionShape(4, 4, 64, 0.125)] * 4, 65536, 16, torch.float32)
    assert pool.bytes_per_page * pool.num_pages == 8 * 2**30
    assert resident_bytes() - before < 2**26
    assert not pool.k[3][65535].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layers_may_differ_in_shape_and_bytes_per_page_counts_them_all(dtype):
    shapes = [AttentionShape(4, 2, 8, 1.0), AttentionShape(6, 1, 16, 1.0)]
    pool = KVPool(shapes, 5, 4, dtype)
    assert [tuple(k.shape) for k in pool.k] == [(5, 4, 2, 8), (5, 4, 1, 16)]
    tensors = pool.k + pool.v
    assert (
        pool.total_bytes
        == pool.bytes_per_page * 5
        == sum(t.numel() * t.element_size() for t in tensors)
    )
    assert all(t.dtype == dtype and not t.any() for t in tensors)


def test_keys_and_values_of_all_layers_lie_apart():
    pool = KVPool([AttentionShape(1, 1, 4, 1.0)] * 2, 2, 1, torch.float32)
    for value, tensor in enumerate(pool.k + pool.v):
        tensor.fill_(value)
    assert [float(t.max()) for t in pool.k + pool.v] == [0, 1, 2, 3]


def test_a_pool_without_a_page_beside_the_dummy_is_refused():
    with pytest.raises(ValueError, match="not 1 of 16"):
        KVPool([AttentionShape(1, 1, 4, 1.0)], 1, 16, torch.float32)


def test_pages_of_8_bits_take_half_the_bytes_of_bfloat16():
    shapes = [AttentionShape(4, 2, 8, 1.0), AttentionShape(6, 1, 16, 1.0)]
    whole = KVPool(shapes, 5, 4, torch.bfloat16)
    scales = (UNIT_KV_SCALES, KVScales(0.5, 2.0))
    narrow = KVPool(shapes, 5, 4, torch.bfloat16, scales=scales)
    assert (narrow.dtype, narrow.storage_dtype, narrow.scales) == (torch.bfloat16, E4M3, scales)
    assert (whole.dtype, whole.storage_dtype, whole.scales) == (torch.bfloat16,) * 2 + (
        (UNIT_KV_SCALES, UNIT_KV_SCALES),
    )
    assert 2 * narrow.bytes_per_page == whole.bytes_per_page
    assert narrow.total_bytes == sum(t.numel() * t.element_size() for t in narrow.k + narrow.v)


@pytest.mark.parametrize("scales", [None, [UNIT_KV_SCALES]])
def test_cleared_pages_are_zero_and_no_others(scales):
    pool = KVPool([AttentionShape(2, 2, 8, 1.0)], 6, 4, torch.bfloat16, scales=scales)
    for part in pool.k + pool.v:
        part.view(torch.uint8).fill_(0xFF)  # NaN, in either
    pool.zero_pages(np.array([2, 4], dtype=np.int32))
    for part in pool.k + pool.v:
        values = part.float()
        assert not values[[2, 4]].any() and values[[0, 1, 3, 5]].isnan().all()
