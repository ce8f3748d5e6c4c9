"""What a model calls for attention: keys and values are stored, then a backend attends.

Two ways of storing, and any backend behind either. Knows one step's plan and places; no request and
no model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pipeinfer.attention.interface import KV, Attention, Plan, Traits
from pipeinfer.layers.attention import MergedHeads
from pipeinfer.memory.pool import KVPool

Stored = tuple[torch.Tensor, KV, KV]  # q [T, heads, head_dim], k, v
# (layer, heads, places [T] of the tokens, page * page_size + offset): norms and turns the heads,
# and stores keys and values. TorchStore, or FusedStore in fused_store.py.
Store = Callable[[int, MergedHeads, torch.Tensor], Stored]


@dataclass(frozen=True)
class StepAttention:
    """The `Attend` of one step, by the backend's plan of it."""

    backend: Attention
    plan: Plan
    store: Store
    places: torch.Tensor

    def __call__(self, layer: int, heads: MergedHeads) -> torch.Tensor:
        """See layers/attention.py. Stored first: a token sees itself."""
        q, k, v = self.store(layer, heads, self.places)
        return self.backend.attend(layer, q, k, v, self.plan)


class TorchStore:
    """One torch operation after another, on any device and in any dtype; gives back all three.
    Places are int64, and none is negative.
    """

    def __init__(self, pool: KVPool) -> None:
        self._k, self._v = pool.by_place()

    def __call__(self, layer: int, heads: MergedHeads, places: torch.Tensor) -> Stored:
        """See Store."""
        q, k, v = heads.split_and_turn()
        self._k[layer].index_copy_(0, places, k.reshape(len(k), -1))
        self._v[layer].index_copy_(0, places, v.reshape(len(v), -1))
        return q, k, v


def store_for(pool: KVPool, traits: Traits) -> Store:
    """What backends of such traits need."""
    if traits.needs_kv:
        return TorchStore(pool)
    from pipeinfer.engine.fused_store import FusedStore  # which needs triton

    return FusedStore(pool)
