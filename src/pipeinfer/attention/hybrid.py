"""The best of three on Hopper: FlashAttention-3 for prefill rows, FlashInfer for decode rows, and
for these the project's own kernel where they are few, or some much longer than the others.

All read the same pages within one forward pass; everything but attention sees all tokens at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pipeinfer.attention.fa3_backend import Fa3Part
from pipeinfer.attention.flashinfer_backend import decode_part
from pipeinfer.attention.interface import AttentionShape
from pipeinfer.attention.paged import PagedKind, PagedRows, Part
from pipeinfer.attention.triton_decode import FEW, TritonDecodePart
from pipeinfer.kernels.decode_attention import DecodeRows
from pipeinfer.memory.pool import KVPool


class HybridDecodePart:
    """Decode rows, by one of two parts."""

    def __init__(self, many: Part, few: Part, kv_heads: int) -> None:
        self._many, self._few = many, few
        self.even_from = FEW // kv_heads + 1

    def bind(self, pool: KVPool, most_rows: int) -> None:
        self._many.bind(pool, most_rows)
        self._few.bind(pool, most_rows)

    def _part(self, rows: PagedRows, begin: int, end: int) -> Part:
        """Outside of graphs FlashInfer cuts long rows by itself."""
        few = end - begin < self.even_from
        return self._few if few or rows.uneven else self._many

    def plan(self, rows: PagedRows, begin: int, end: int) -> Any:
        return self._part(rows, begin, end).plan(rows, begin, end)

    def refresh(self, rows: PagedRows, begin: int, end: int) -> None:
        self._part(rows, begin, end).refresh(rows, begin, end)

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor, plan: Any) -> None:
        part = self._few if isinstance(plan, DecodeRows) else self._many
        part.run(layer, q, out, plan)


def hybrid_decode_part(shapes: Sequence[AttentionShape], device: torch.device) -> HybridDecodePart:
    """Of both parts; all head sizes of the hybrid backend (registry.py) are powers of two."""
    kv_heads = max(shape.num_kv_heads for shape in shapes)
    return HybridDecodePart(decode_part(shapes, device), TritonDecodePart(shapes, device), kv_heads)


HYBRID = PagedKind(
    hybrid_decode_part, Fa3Part, page_sizes=(1, 16, 32, 64, 128, 256), preferred_page_size=64,
    captures_prefill=True,
)  # fmt: skip
