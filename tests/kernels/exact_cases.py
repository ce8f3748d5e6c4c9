"""GEMMs and attention of exact mode are near their references: for interpreter and GPU.

Bits are compared on a GPU alone (tests/gpu/test_exact_kernels.py): the interpreter multiplies with
NumPy, whose sums depend on the shape.
"""

from __future__ import annotations

import pytest
import torch

from draws import seeded
from kernels.triton_cases import (
    DEVICE,
    HALVES,
    TOLERANCE,
    randn,
    randn_on_device,
    relative_error,
)
from pipeinfer.kernels import exact
from pipeinfer.kernels.exact import (
    SEGMENT,
    ExactRows,
    ExactWorkspace,
    exact_attention_reference,
    exact_gemm,
)
from pipeinfer.kernels.gemm import gemm_reference


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("rows", [1, 17, 40, 70])
@pytest.mark.parametrize(("width", "depth"), [(64, 256), (37, 88)])
def test_exact_gemm_is_that_of_the_reference(width, depth, rows, dtype):
    x, weight, bias = (
        randn(0, rows, depth, dtype=dtype),
        randn(1, width, depth, dtype=dtype) / 8,
        randn(2, width).to(dtype),
    )
    bound = 4 * TOLERANCE[dtype]
    assert relative_error(exact_gemm(x, weight), gemm_reference(x, weight)) < bound
    expected = gemm_reference(x, weight, bias)
    assert relative_error(exact_gemm(x, weight, bias), expected) < bound


class Steps:
    """A conversation of `length` tokens in pages of any order, and its queries."""

    def __init__(self, length, dtype=torch.float32, heads=4, kv_heads=2, dim=32, page=16):
        pages = -(-length // page)
        order = torch.randperm(pages, generator=seeded(0)) + 1
        self.indices = order.to(torch.int32).to(DEVICE)
        self.k = randn_on_device(1, pages + 1, page, kv_heads, dim, dtype=dtype)
        self.v = randn_on_device(2, pages + 1, page, kv_heads, dim, dtype=dtype)
        self.q = randn_on_device(3, length, heads, dim, dtype=dtype)
        self.scale, self.heads = dim**-0.5, (heads, kv_heads, dim)

    def rows(self, spans):
        """Rows of the queries begin .. end - 1 for each of `spans`, all of one conversation."""
        counts = torch.tensor([0, *(end - begin for begin, end in spans)])
        return ExactRows(
            torch.tensor([end for _, end in spans], dtype=torch.int32, device=DEVICE),
            torch.zeros(len(spans), dtype=torch.int32, device=DEVICE),
            self.indices,
            counts.cumsum(0).to(torch.int32).to(DEVICE),
        )

    def run(self, spans, window=None, sinks=None):
        """By one launch, as rows of several queries; if all have one, as decodes."""
        q = torch.cat([self.q[begin:end] for begin, end in spans])
        rows, out = self.rows(spans), torch.full_like(q, float("nan"))
        if all(end - begin == 1 for begin, end in spans):
            rows = ExactRows(rows.seq_lens, rows.kv_indptr, rows.kv_indices)
        workspace = ExactWorkspace(len(spans), self.heads, q.device)
        return exact.exact_attention(
            q, self.k, self.v, rows, self.scale, out, workspace, window, sinks
        )

    def expected(self, spans, window=None, sinks=None):
        q = torch.cat([self.q[begin:end] for begin, end in spans])
        return exact_attention_reference(
            q, self.k, self.v, self.rows(spans), self.scale, window, sinks
        )


SPANS = [[(0, 5), (30, 33), (0, 90)], [(0, 1), (15, 16), (16, 17), (89, 90)], [(64, 65), (60, 70)]]


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("spans", SPANS)
def test_exact_attention_is_that_of_the_reference(spans, dtype):
    steps = Steps(90, dtype)
    assert relative_error(steps.run(spans), steps.expected(spans)) < 4 * TOLERANCE[dtype]


@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("window", [1, 20, 1000])
def test_exact_attention_sees_a_window_and_sinks(window, spans):
    steps, sinks = Steps(90), randn(5, 4)
    assert relative_error(steps.run(spans, window), steps.expected(spans, window)) < 3e-6
    expected = steps.expected(spans, window, sinks)
    assert relative_error(steps.run(spans, window, sinks), expected) < 3e-6


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page"), [(5, 1, 64, 1), (16, 2, 16, 64), (2, 1, 256, 128)]
)
def test_exact_attention_takes_all_groups_and_pages(heads, kv_heads, dim, page):
    steps = Steps(130, heads=heads, kv_heads=kv_heads, dim=dim, page=page)
    for spans in ([(0, 9), (120, 130)], [(129, 130)]):
        assert relative_error(steps.run(spans), steps.expected(spans)) < 3e-6


@pytest.mark.parametrize(("partials", "programs"), [(1, 1), (2, 2), (128, 2), (128, 64), (3, 2)])
def test_decodes_are_merged_from_any_number_of_programs(partials, programs, monkeypatch):
    monkeypatch.setattr(exact, "MAX_PARTIALS", partials)
    monkeypatch.setattr(exact, "MIN_PROGRAMS", 2 * programs)
    length = 3 * SEGMENT + 70
    steps, spans = (
        Steps(length, heads=2, kv_heads=1),
        [(length - 1, length), (SEGMENT, SEGMENT + 1)],
    )
    assert relative_error(steps.run(spans), steps.expected(spans)) < 3e-6
    expected = steps.expected(spans, SEGMENT + 30)
    assert relative_error(steps.run(spans, SEGMENT + 30), expected) < 3e-6


def test_a_row_without_keys_is_not_written():
    steps = Steps(40)
    rows = steps.rows([(0, 0), (7, 8)])
    rows = ExactRows(rows.seq_lens, rows.kv_indptr, rows.kv_indices)
    q, workspace = steps.q[6:8], ExactWorkspace(2, steps.heads, steps.q.device)
    out = torch.full_like(q, 7.0)
    exact.exact_attention(q, steps.k, steps.v, rows, steps.scale, out, workspace)
    assert (out[0] == 7.0).all()
    assert not (out[1] == 7.0).any()
