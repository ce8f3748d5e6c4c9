"""Attention of one query a row, in Triton: cases for interpreter and GPU."""

from __future__ import annotations

import pytest
import torch

from kernels.triton_cases import DEVICE, HALVES, TOLERANCE, randn, relative_error
from pipeinfer.kernels.decode_attention import (
    Cut,
    DecodeRows,
    Scratch,
    decode_attention,
    decode_attention_reference,
)

WHOLE = Cut(parts=1, least=16, block=16, warps=4, stages=2)
PARTS = Cut(parts=4, least=16, block=16, warps=4, stages=2)
LENGTHS = [1, 16, 17, 100, 33]


class Case:
    """Rows of those lengths, their pages in any order, and what is written for them."""

    def __init__(self, lengths, dtype=torch.float32, heads=4, kv_heads=2, dim=32, page=16):
        pages = [-(-length // page) for length in lengths]
        total = sum(pages) + 1
        order = torch.randperm(total - 1, generator=torch.Generator().manual_seed(0)) + 1
        self.indices = order.to(torch.int32).to(DEVICE)
        starts = torch.tensor([0, *pages]).cumsum(0)
        self.indptr = starts.to(torch.int32).to(DEVICE)
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        self.k = randn(1, total, page, kv_heads, dim, dtype=dtype)
        self.v = randn(2, total, page, kv_heads, dim, dtype=dtype)
        self.q = randn(3, len(lengths), heads, dim, dtype=dtype)
        self.scale = dim**-0.5
        self.scratch = Scratch(len(lengths), 4 * len(lengths), heads, kv_heads, dim, self.q.device)

    def run(self, cut, window=None):
        out = torch.full_like(self.q, float("nan"))
        rows = DecodeRows(self.lengths, self.indptr, self.indices)
        return decode_attention(
            self.q, self.k, self.v, rows, self.scale, out, self.scratch, cut, window
        )

    def expected(self, window=None):
        rows = DecodeRows(self.lengths, self.indptr, self.indices)
        return decode_attention_reference(self.q, self.k, self.v, rows, self.scale, window)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("cut", [WHOLE, PARTS])
def test_decode_attention_is_that_of_the_reference(cut, dtype):
    case = Case(LENGTHS, dtype)
    # Weights are rounded to the values' dtype once more, before they are multiplied.
    tolerance = 3 * TOLERANCE[dtype]
    assert relative_error(case.run(cut), case.expected()) < tolerance


@pytest.mark.parametrize("cut", [WHOLE, PARTS])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "page"), [(5, 1, 64, 1), (32, 2, 16, 64)])
def test_decode_attention_takes_all_groups_and_pages(heads, kv_heads, dim, page, cut):
    case = Case([3, 70], heads=heads, kv_heads=kv_heads, dim=dim, page=page)
    assert relative_error(case.run(cut), case.expected()) < 3e-6


@pytest.mark.parametrize("cut", [WHOLE, PARTS])
@pytest.mark.parametrize("window", [1, 20, 1000])
def test_decode_attention_sees_its_window_only(window, cut):
    case = Case(LENGTHS)
    assert relative_error(case.run(cut, window), case.expected(window)) < 3e-6


def test_parts_are_counted_anew_in_every_launch():
    case = Case(LENGTHS)
    first = case.run(PARTS)
    assert int(case.scratch.arrived.abs().sum()) == 0
    assert torch.equal(case.run(PARTS), first)


def test_a_row_does_not_depend_on_the_others():
    case, alone = Case(LENGTHS), Case(LENGTHS)
    full = case.run(PARTS)
    alone.q, alone.lengths, alone.indptr = case.q[3:4], case.lengths[3:4], case.indptr[3:5]
    assert torch.equal(alone.run(PARTS), full[3:4])


def test_a_row_without_keys_writes_nothing():
    case = Case([5, 20])
    full = case.run(PARTS)
    case.lengths[0] = 0
    got = case.run(PARTS)
    assert got[0].isnan().all()
    assert torch.equal(got[1], full[1])
