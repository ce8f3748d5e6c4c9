"""What a model calls for attention: keys and values are stored, then a backend attends.

Two ways of storing, and any backend behind either. Knows one step's plan and places; no request and
no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from pipeinfer.attention.interface import Attention, Plan
from pipeinfer.layers.attention import split_and_turn
from pipeinfer.layers.norm import HeadNorm
from pipeinfer.layers.rope import Rotation
from pipeinfer.memory.pool import KVPool

# q [T, heads, head_dim]; k, v [T, kv_heads, head_dim], None from who leaves them in pages only.
Stored = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


class Store(Protocol):
    """Norms and turns heads, and stores keys and values: TorchStore, or cuda/fused_store.py."""

    def __call__(
        self,
        layer: int,
        qkv: torch.Tensor,
        num_heads: int,
        norm: HeadNorm | None,
        rotation: Rotation,
        places: torch.Tensor,
        /,
    ) -> Stored:
        """`places` [T]: of each token in the pool, page * page_size + offset; otherwise as Attend
        in layers/attention.py.
        """
        ...


@dataclass(frozen=True)
class StepAttention:
    """The `Attend` of one step, by the backend's plan of it."""

    backend: Attention
    plan: Plan
    store: Store
    places: torch.Tensor

    def __call__(
        self,
        layer: int,
        qkv: torch.Tensor,
        num_heads: int,
        norm: HeadNorm | None,
        rotation: Rotation,
    ) -> torch.Tensor:
        """See layers/attention.py."""
        # Stored first: a token sees itself.
        q, k, v = self.store(layer, qkv, num_heads, norm, rotation, self.places)
        return self.backend.attend(layer, q, k, v, self.plan)


class TorchStore:
    """One torch operation after another, on any device and in any dtype. Places are int64, and none
    is negative.
    """

    def __init__(self, pool: KVPool) -> None:
        self._k, self._v = pool.by_place()
        self._kv_heads = [shape.num_kv_heads for shape in pool.shapes]

    def __call__(
        self,
        layer: int,
        qkv: torch.Tensor,
        num_heads: int,
        norm: HeadNorm | None,
        rotation: Rotation,
        places: torch.Tensor,
    ) -> Stored:
        """See Store; gives back all three."""
        q, k, v = split_and_turn(qkv, num_heads, self._kv_heads[layer], norm, rotation)
        self._k[layer].index_copy_(0, places, k.reshape(len(k), -1))
        self._v[layer].index_copy_(0, places, v.reshape(len(v), -1))
        return q, k, v
