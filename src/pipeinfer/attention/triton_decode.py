"""Decode rows by the project's own kernel, which reads on the device how long they are.

Nothing is planned on the host, and one long row among short ones does not hold up the others.
Knows rows and pages, no model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipeinfer.attention.interface import AttentionShape
from pipeinfer.attention.paged import PagedRows
from pipeinfer.kernels.decode_attention import Cut, DecodeRows, Scratch, decode_attention
from pipeinfer.memory.pool import KVPool

# By the number of programs that rows and KV heads make: measured on an H200. Few rows are cut
# small, so that all of the GPU works for them; more are cut only where they are long.
CUTS = (
    (32, Cut(parts=32, least=64, block=64, warps=4, stages=2)),
    (64, Cut(parts=16, least=64, block=32, warps=4, stages=3)),
    (128, Cut(parts=32, least=256, block=64, warps=4, stages=3)),
)
UNEVEN = Cut(parts=16, least=1024, block=64, warps=4, stages=3)
FEW = CUTS[-1][0]  # programs up to which it is faster than FlashInfer, whatever the lengths


def cut(rows: int, kv_heads: int) -> Cut:
    """How a graph's rows are cut."""
    return next((cut for most, cut in CUTS if rows * kv_heads <= most), UNEVEN)


class TritonDecodePart:
    """One query a row, with heads of a power of two of at least 16."""

    even_from = None  # it cuts long rows by itself

    def __init__(self, shapes: Sequence[AttentionShape], device: torch.device) -> None:
        self._shapes = tuple(shapes)
        self._device = device

    def bind(self, pool: KVPool, most_rows: int) -> None:
        """Makes room for what parts of rows leave for each other."""
        self._k, self._v = pool.k, pool.v
        sizes = {(s.num_heads, s.num_kv_heads, s.head_dim) for s in self._shapes}
        parts = max(rows * self._cut_of(rows).parts for rows in range(1, most_rows + 1))
        self._scratch = {size: Scratch(most_rows, parts, *size, self._device) for size in sizes}

    def _cut_of(self, rows: int) -> Cut:
        return cut(rows, max(shape.num_kv_heads for shape in self._shapes))

    def plan(self, rows: PagedRows, begin: int, end: int) -> DecodeRows:
        """Views only."""
        device = rows.device
        return DecodeRows(
            device.lengths[begin:end], device.kv_indptr[begin : end + 1], device.indices
        )

    def refresh(self, rows: PagedRows, begin: int, end: int) -> None:
        """Nothing: the kernel reads the lengths."""

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor, plan: DecodeRows) -> None:
        shape = self._shapes[layer]
        size = shape.num_heads, shape.num_kv_heads, shape.head_dim
        decode_attention(
            q, self._k[layer], self._v[layer], plan, shape.scale, out, self._scratch[size],
            self._cut_of(len(q)), shape.sliding_window,
        )  # fmt: skip
