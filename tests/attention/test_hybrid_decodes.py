"""Which kernel the decode rows of the hybrid backend get."""

from __future__ import annotations

import pytest
import torch

from pipeinfer.attention.hybrid import HybridDecodePart
from pipeinfer.attention.paged import PagedRows, RowArrays
from pipeinfer.attention.registry import HEAD_DIMS
from pipeinfer.attention.triton_decode import CUTS, FEW, UNEVEN, cut

KV_HEADS = 8


class Named:
    """A part that says who was asked."""

    even_from = None

    def bind(self, pool, most_rows):
        raise AssertionError("nobody is bound here")

    def refresh(self, rows, begin, end):
        raise AssertionError("nobody is replayed here")

    def run(self, layer, q, out, plan):
        raise AssertionError("nobody runs here")

    def __init__(self, name):
        self.name = name

    def plan(self, rows, begin, end):
        return self.name


def chosen(count, uneven=False):
    arrays = RowArrays(*[torch.zeros(count + 1, dtype=torch.int32)] * 7)
    rows = PagedRows(count, 1, 0, arrays, arrays, fixed=True, uneven=uneven)
    return HybridDecodePart(Named("many"), Named("few"), KV_HEADS).plan(rows, 0, count)


def test_few_rows_and_uneven_ones_go_to_the_kernel_that_cuts_on_the_device():
    few = FEW // KV_HEADS
    assert chosen(1) == chosen(few) == "few"
    assert chosen(few + 1) == chosen(256) == "many"
    assert chosen(few + 1, uneven=True) == chosen(256, uneven=True) == "few"


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_fewer_programs_are_cut_smaller(kv_heads):
    assert cut(1, kv_heads) == CUTS[0][1]
    assert cut(FEW // kv_heads, kv_heads) == CUTS[-1][1]
    assert cut(FEW // kv_heads + 1, kv_heads) == UNEVEN


def test_every_head_size_of_the_hybrid_backend_is_one_that_the_kernel_takes():
    assert all(dim >= 16 and dim & (dim - 1) == 0 for dim in HEAD_DIMS["hybrid"])
