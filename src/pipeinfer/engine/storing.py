"""Storing keys and values, before a backend attends: what a store is, and one by torch alone.

The other is FusedStore in fused_store.py. Knows a pool; no step, no request and no model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from pipeinfer.attention.interface import KV
from pipeinfer.layers.attention import LayerHeads
from pipeinfer.memory.pool import KVPool

Stored = tuple[torch.Tensor, KV, KV]  # q [T, heads, head_dim], k, v
# (layer, heads, places [T] of the tokens, page * page_size + offset): norms and rotates the heads,
# and stores keys and values. TorchStore or FusedStore.
Store = Callable[[int, LayerHeads, torch.Tensor], Stored]


def store_kept(pool: KVPool, layer: int, heads: LayerHeads, places: torch.Tensor) -> Stored:
    """As FusedStore, by torch operations of fixed shapes, which a graph can hold: a token with a
    negative place leaves zeros in the dummy page."""
    q, k, v = heads.split_and_rotate()
    kept, at = (places >= 0).view(-1, 1, 1), places.clamp(min=0).long()
    for part, new in ((pool.k[layer], k), (pool.v[layer], v)):
        part.flatten(0, 1).index_copy_(0, at, torch.where(kept, new, 0))
    return q, None, None


class TorchStore:
    """One torch operation after another, on any device and in any dtype; gives back all three.
    Places are int64, and none is negative.
    """

    def __init__(self, pool: KVPool) -> None:
        self._k, self._v = pool.by_place()

    def __call__(self, layer: int, heads: LayerHeads, places: torch.Tensor) -> Stored:
        """See Store."""
        q, k, v = heads.split_and_rotate()
        self._k[layer].index_copy_(0, places, k.reshape(len(k), -1))
        self._v[layer].index_copy_(0, places, v.reshape(len(v), -1))
        return q, k, v
