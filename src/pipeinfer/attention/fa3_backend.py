"""FlashAttention-3 from sgl_kernel, over page tables: prefill and decode rows alike.

Knows rows and pages, no model and no graph. Source: https://arxiv.org/abs/2407.08608.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from pipeinfer.attention.interface import (
    PAGE_SIZES,
    PREFERRED_PAGE_SIZE,
    AttentionInputs,
    BackendCapabilities,
    KVPool,
    PagedKind,
    qo_indptr_of,
)
from pipeinfer.kernels.formats import E4M3, quantize_e4m3
from pipeinfer.step import AttentionShape


@dataclass(frozen=True)
class Fa3Metadata:
    """Rows begin..end-1 of a step: queries from q_indptr, keys from the table.

    Attributes:
    - schedules: of prefill rows, the kernel's own list of work, by shape. The first layer of a
      shape has it made on the device, the others read it
    """

    q_indptr: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor
    longest_query: int
    schedules: dict[AttentionShape, torch.Tensor] = field(default_factory=dict)


class Fa3Kernel:
    """The kernel schedules itself on the device, so that its metadata begins with views only.

    It does so once a step, not once a layer. That saves little by itself; but where decodes attend
    meanwhile, a prompt's blocks get multiprocessors at once, else when the decodes are through.
    With pages in e4m3 queries are rounded to e4m3, too: its kernels multiply alike with alike.
    Sinks are taken in bfloat16 only, and not together with that (registry.py refuses both).
    """

    def __init__(self, shapes: Sequence[AttentionShape], device: torch.device) -> None:
        from sgl_kernel.flash_attn import (  # type: ignore
            flash_attn_with_kvcache,
            get_scheduler_metadata,
        )

        self._attend = flash_attn_with_kvcache
        self._schedule = get_scheduler_metadata
        self._shapes = tuple(shapes)
        self._first = {shapes.index(shape) for shape in set(shapes)}  # layers
        self._k: list[torch.Tensor] = []
        self._v: list[torch.Tensor] = []
        self._descales: list[torch.Tensor] = []  # if pages hold e4m3: factors of q, k, v by layer

    def bind(self, pool: KVPool, max_rows: int) -> None:
        self._k = pool.k
        self._v = pool.v
        if pool.storage_dtype == E4M3:
            self._descales = [
                torch.tensor([1.0, *scales], dtype=torch.float32, device=pool.device)
                for scales in pool.scales
            ]

    def build_metadata(self, inputs: AttentionInputs, begin: int, end: int) -> Fa3Metadata:
        step = inputs.step
        return Fa3Metadata(
            qo_indptr_of(step, begin, end),
            step.seq_lens[begin:end],
            step.page_table_of(begin, end)[:, : inputs.max_pages],
            1 if end <= step.shape.num_decodes else inputs.max_query_len,
        )

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor, metadata: Fa3Metadata) -> None:
        shape = self._shapes[layer]
        prefill, descales = metadata.longest_query > 1, {}
        if self._descales:
            q, descales = quantize_e4m3(q, 1.0), self._descaled(layer, metadata)
        if prefill and layer in self._first:
            metadata.schedules[shape] = self._scheduled(layer, q, metadata)
        self._attend(
            q,
            self._k[layer],
            self._v[layer],
            cache_seqlens=metadata.lengths,
            page_table=metadata.table,
            cu_seqlens_q=metadata.q_indptr,
            max_seqlen_q=metadata.longest_query,
            softmax_scale=shape.scale,
            causal=True,
            window_size=_window(shape),
            num_splits=1 if prefill else 0,  # many queries fill the GPU unsplit
            scheduler_metadata=metadata.schedules.get(shape),
            sinks=shape.sinks,
            out=out,
            **descales,
        )

    def _descaled(self, layer: int, metadata: Fa3Metadata) -> dict[str, torch.Tensor]:
        """Returns the factors of q, k and v, [rows, kv_heads] each: views of one number."""
        size = len(metadata.lengths), self._shapes[layer].num_kv_heads
        names = ("q_descale", "k_descale", "v_descale")
        parts = self._descales[layer]
        return {name: parts[at].expand(size) for at, name in enumerate(names)}

    def _scheduled(self, layer: int, q: torch.Tensor, metadata: Fa3Metadata) -> torch.Tensor:
        """Returns the kernel's work list, which the kernel would otherwise make at the beginning of
        each layer of that shape.
        """
        shape, page_size = self._shapes[layer], self._k[layer].shape[1]
        return self._schedule(
            len(metadata.lengths),
            metadata.longest_query,
            metadata.table.shape[1] * page_size,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            metadata.lengths,
            qkv_dtype=q.dtype,
            cu_seqlens_q=metadata.q_indptr,
            page_size=page_size,
            causal=True,
            window_size=_window(shape),
            num_splits=1,
        )


def _window(shape: AttentionShape) -> tuple[int, int]:
    """Keys before and after a query's own, as FlashAttention counts; -1 is all."""
    return (-1, -1) if shape.sliding_window is None else (shape.sliding_window - 1, 0)


# Kernels read lengths and tables on the device: the plan of a graph holds for every step.
FA3 = PagedKind(
    Fa3Kernel,
    Fa3Kernel,
    BackendCapabilities(PAGE_SIZES, PREFERRED_PAGE_SIZE, captures_decode=True, page_table="all"),
)
