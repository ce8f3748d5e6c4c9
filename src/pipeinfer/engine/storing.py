"""Storing keys and values, before a backend attends: what a store is, and one by torch alone.

The other is FusedStore in fused_store.py. Knows a pool; no step, no request and no model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from pipeinfer.attention.interface import KV
from pipeinfer.layers.attention import MergedHeads
from pipeinfer.memory.pool import KVPool

Stored = tuple[torch.Tensor, KV, KV]  # q [T, heads, head_dim], k, v
# (layer, heads, places [T] of the tokens, page * page_size + offset): norms and rotates the heads,
# and stores keys and values. TorchStore or FusedStore.
Store = Callable[[int, MergedHeads, torch.Tensor], Stored]


class TorchStore:
    """One torch operation after another, on any device and in any dtype; gives back all three.
    Places are int64, and none is negative.
    """

    def __init__(self, pool: KVPool) -> None:
        self._k, self._v = pool.by_place()

    def __call__(self, layer: int, heads: MergedHeads, places: torch.Tensor) -> Stored:
        """See Store."""
        q, k, v = heads.split_and_rotate()
        self._k[layer].index_copy_(0, places, k.reshape(len(k), -1))
        self._v[layer].index_copy_(0, places, v.reshape(len(v), -1))
        return q, k, v
