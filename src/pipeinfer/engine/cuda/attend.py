"""What a model calls for attention on a GPU: store keys and values, then attend over the pages.

Knows one step's plan and places; no request and no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pipeinfer.attention.interface import AttentionBackend
from pipeinfer.attention.paged import PagedBackend, PagedPlan
from pipeinfer.kernels.store import turn_and_store
from pipeinfer.layers.attention import split_and_turn
from pipeinfer.layers.norm import HeadNorm
from pipeinfer.layers.rope import TableRotation
from pipeinfer.memory.pool import KVPool


@dataclass(frozen=True)
class PagedAttend:
    """One kernel from the merged product to queries and pages, then the backend's own."""

    backend: PagedBackend
    pool: KVPool
    plan: PagedPlan
    store: torch.Tensor  # int32 or int64 [T]: the place of each token, negative: nowhere

    def merged(
        self,
        layer: int,
        qkv: torch.Tensor,
        num_heads: int,
        norm: HeadNorm | None,
        rotation: TableRotation,
    ) -> torch.Tensor:
        """See layers/attention.py."""
        queries = turn_and_store(
            qkv,
            rotation.cos,
            rotation.sin,
            self.store,
            self.pool.k[layer],
            self.pool.v[layer],
            num_heads,
            positions=rotation.positions,
            q_norm=None if norm is None else norm.query_weight,
            k_norm=None if norm is None else norm.key_weight,
            eps=0.0 if norm is None else norm.eps,
            offset=0.0 if norm is None else norm.offset,
        )
        return self.backend.run(layer, queries, self.plan)


@dataclass(frozen=True)
class PlainAttend:
    """For backends that store by themselves (torch), in any dtype: one operation after another."""

    backend: AttentionBackend
    pool: KVPool
    plan: Any

    def merged(
        self,
        layer: int,
        qkv: torch.Tensor,
        num_heads: int,
        norm: HeadNorm | None,
        rotation: TableRotation,
    ) -> torch.Tensor:
        """See layers/attention.py."""
        kv_heads = self.pool.shapes[layer].num_kv_heads
        turns = rotation.looked_up(qkv.dtype)
        parts = split_and_turn(qkv, num_heads, kv_heads, norm, turns)
        return self.backend.forward(layer, *parts, self.plan)
