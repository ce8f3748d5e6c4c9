"""Storing keys and values, before a backend attends: what a store is, and one by torch alone.

The other is FusedStore in fused_store.py. Knows a pool; no step, no request and no model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from pipeinfer.attention.interface import KV
from pipeinfer.kernels.e4m3 import E4M3, narrowed, widened
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
    scales = pool.scales[layer]
    for part, new, scale in ((pool.k[layer], k, scales.k), (pool.v[layer], v, scales.v)):
        _put(part.flatten(0, 1).flatten(1), at, torch.where(kept, new, 0), scale)
    return q, None, None


class TorchStore:
    """One torch operation after another, on any device and in any dtype; gives back all three, keys
    and values as they are read again. Places are int64, and none is negative.
    """

    def __init__(self, pool: KVPool) -> None:
        self._k, self._v = pool.by_place()
        self._scales = pool.scales

    def __call__(self, layer: int, heads: LayerHeads, places: torch.Tensor) -> Stored:
        """See Store."""
        q, k, v = heads.split_and_rotate()
        scales = self._scales[layer]
        k = _put(self._k[layer], places, k, scales.k)
        v = _put(self._v[layer], places, v, scales.v)
        return q, k, v


def _put(
    pages: torch.Tensor, places: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """[T, heads, dim] into rows of `pages`; what is read there afterwards."""
    if pages.dtype != E4M3:
        pages.index_copy_(0, places, values.reshape(len(values), -1))
        return values
    stored = narrowed(values, scale)
    pages.view(torch.uint8).index_copy_(0, places, stored.flatten(1).view(torch.uint8))
    return widened(stored, scale, values.dtype)
