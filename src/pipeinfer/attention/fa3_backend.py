"""FlashAttention-3 from sgl_kernel, over page tables: prefill and decode rows alike.

Knows rows and pages, no model and no graph. Source: https://arxiv.org/abs/2407.08608.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pipeinfer.attention.interface import AttentionShape
from pipeinfer.attention.paged import PagedKind, PagedRows
from pipeinfer.memory.pool import KVPool


@dataclass(frozen=True)
class Fa3Plan:
    """Rows begin..end-1 of a step: queries from q_indptr, keys from the table."""

    q_indptr: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor
    longest_query: int


class Fa3Part:
    """The kernel schedules itself on the device, so that a plan is only views."""

    even_from = None  # it cuts long rows by itself

    def __init__(self, shapes: Sequence[AttentionShape], device: torch.device) -> None:
        from sgl_kernel.flash_attn import flash_attn_with_kvcache  # type: ignore

        self._attend = flash_attn_with_kvcache
        self._shapes = tuple(shapes)
        self._k: list[torch.Tensor] = []
        self._v: list[torch.Tensor] = []

    def bind(self, pool: KVPool, most_rows: int) -> None:
        self._k, self._v = pool.k, pool.v

    def plan(self, rows: PagedRows, begin: int, end: int) -> Fa3Plan:
        device = rows.device
        return Fa3Plan(
            device.queries(begin, end),
            device.lengths[begin:end],
            device.page_table(begin, end),
            1 if end <= rows.decodes else rows.longest_query,
        )

    def refresh(self, rows: PagedRows, begin: int, end: int) -> None:
        """Nothing: the kernels read the lengths."""

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor, plan: Fa3Plan) -> None:
        shape = self._shapes[layer]
        window = shape.sliding_window
        self._attend(
            q,
            self._k[layer],
            self._v[layer],
            cache_seqlens=plan.lengths,
            page_table=plan.table,
            cu_seqlens_q=plan.q_indptr,
            max_seqlen_q=plan.longest_query,
            softmax_scale=shape.scale,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            num_splits=0 if plan.longest_query == 1 else 1,  # many queries fill the GPU unsplit
            out=out,
        )


FA3 = PagedKind(
    Fa3Part, Fa3Part, page_sizes=(1, 16, 32, 64, 128, 256), preferred_page_size=64,
    reads_table_to_decode=True,
)  # fmt: skip
