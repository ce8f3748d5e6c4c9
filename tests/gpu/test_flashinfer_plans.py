"""Plans of FlashInfer that a CUDA graph reads, over steps whose rows grow."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from device_steps import device_step
from draws import seeded
from pipeinfer.attention.interface import AttentionInputs, HostLengths, KVPool
from pipeinfer.kernels.interface import StepShape
from pipeinfer.step import AttentionShape

pytestmark = pytest.mark.gpu

PAGE, HEADS, KV_HEADS, DIM, ROW_PAGES = 16, 8, 2, 64, 40
INT = torch.int32


def lengths_of_steps(rows: int) -> list[np.ndarray]:
    """int32 [rows] for each step: rows that grow by a token, across the ends of pages, then other
    rows in their place."""
    first = np.arange(1, rows + 1, dtype=np.int32) * 7 % 500 + 1
    grown = [first + np.int32(step) for step in range(40)]
    return [*grown, np.full(rows, 1, dtype=np.int32), first[::-1] + np.int32(100), grown[0]]


def attended(shape: AttentionShape, pool: KVPool, q: torch.Tensor, row: int, length: int):
    """float32 [heads, dim]: row `row`'s, whose pages stand in order."""
    pages = slice(1 + row * ROW_PAGES, 1 + (row + 1) * ROW_PAGES)
    k, v = (
        part[0][pages].flatten(0, 1)[:length].float().repeat_interleave(HEADS // KV_HEADS, 1)
        for part in (pool.k, pool.v)
    )
    first = max(length - (shape.sliding_window or length), 0)
    scores = torch.einsum("hd,khd->hk", q[row].float(), k[first:]) * shape.scale
    return torch.einsum("hk,khd->hd", scores.softmax(-1), v[first:])


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("rows", [1, 5, 200])
def test_a_graph_that_holds_the_first_plan_attends_rightly_whatever_lengths_follow(rows, window):
    from pipeinfer.attention.flashinfer_backend import DecodeKernel

    device, generator = torch.device("cuda"), seeded(3, torch.device("cuda"))
    shape = AttentionShape(HEADS, KV_HEADS, DIM, DIM**-0.5, window)
    pool = KVPool([shape], 1 + rows * ROW_PAGES, PAGE, torch.bfloat16, device)
    for part in (*pool.k, *pool.v):
        part.copy_(torch.randn(part.shape, device=device, generator=generator))
    q = torch.randn(rows, HEADS, DIM, device=device, generator=generator).bfloat16()
    kernel, ends = DecodeKernel([shape], device), torch.zeros(rows + 1, dtype=INT, device=device)
    last, listed = (
        torch.ones(rows, dtype=INT, device=device),
        torch.zeros(1 + rows * ROW_PAGES, dtype=INT, device=device),
    )
    kernel.bind(pool, rows)
    step = device_step(
        StepShape(rows, rows, 0),
        padded=True,
        lists_pages=True,
        kv_indptr=ends,
        kv_indices=listed,
        last_page_len=last,
    )
    table = 1 + np.arange(rows * ROW_PAGES).reshape(rows, ROW_PAGES)
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(q)
    for number, lengths in enumerate(lengths_of_steps(rows)):
        pages = -(-lengths // PAGE)
        indptr = torch.from_numpy(np.concatenate(([0], np.cumsum(pages))).astype(np.int32))
        queries = torch.arange(rows + 1, dtype=INT)
        last_page_len = torch.from_numpy(lengths - (pages - 1) * PAGE)
        ends.copy_(indptr)
        last.copy_(last_page_len)
        used = np.concatenate([table[row, :count] for row, count in enumerate(pages.tolist())])
        listed[: len(used)] = torch.from_numpy(used).int().to(device)
        host = HostLengths(last_page_len, queries, queries[-1:], indptr)
        metadata = kernel.build_metadata(
            AttentionInputs(step, 1, ROW_PAGES, number % 2, host), 0, rows
        )
        if number == 0:
            kernel.run(0, q, out, metadata)  # what is built once is built outside of the graph
            with torch.cuda.graph(graph):
                kernel.run(0, q, out, metadata)
        out.zero_()
        graph.replay()
        for row in {0, rows // 2, rows - 1}:
            expected = attended(shape, pool, q, row, int(lengths[row]))
            assert torch.allclose(out[row].float(), expected, atol=2e-2, rtol=2e-2), (number, row)
