"""What a model calls for attention: keys and values are stored, then a backend attends.

Two ways of storing, and any backend behind either. Knows one step's plan and places; no request and
no model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pipeinfer.attention.interface import Attention, Plan, Traits
from pipeinfer.engine.storing import Store, TorchStore
from pipeinfer.layers.attention import LayerHeads
from pipeinfer.memory.pool import KVPool


@dataclass(frozen=True)
class StepAttention:
    """The `Attend` of one step, by the backend's plan of it."""

    backend: Attention
    plan: Plan
    store: Store
    places: torch.Tensor

    def __call__(self, layer: int, heads: LayerHeads) -> torch.Tensor:
        """See layers/attention.py. Stored first: a token sees itself."""
        q, k, v = self.store(layer, heads, self.places)
        return self.backend.attend(layer, q, k, v, self.plan)


def store_for(pool: KVPool, traits: Traits) -> Store:
    """What backends of such traits need."""
    if traits.needs_kv:
        return TorchStore(pool)
    from pipeinfer.engine.fused_store import FusedStore  # which needs triton

    return FusedStore(pool)
