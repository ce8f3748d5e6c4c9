"""Storing keys and values, before a backend attends: what a store is, and one by torch alone.

The other is FusedStore in fused_store.py. Knows a pool; no step, no request and no model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from pipeinfer.attention.interface import KV
from pipeinfer.kernels.e4m3 import E4M3, narrowed, widened
from pipeinfer.kernels.hadamard import turned
from pipeinfer.layers.attention import LayerHeads
from pipeinfer.memory.pool import KVPool

Stored = tuple[torch.Tensor, KV, KV]  # q [T, heads, head_dim], k, v
# (layer, heads, places [T] of the tokens, page * page_size + offset): norms and rotates the heads,
# and stores keys and values. TorchStore or FusedStore.
Store = Callable[[int, LayerHeads, torch.Tensor], Stored]


def store_kept(pool: KVPool, layer: int, heads: LayerHeads, places: torch.Tensor) -> Stored:
    """As FusedStore, by torch operations of fixed shapes, which a graph can hold: a token with a
    negative place leaves zeros in the dummy page."""
    q, k, v = _ready(pool, layer, heads)
    kept, at = (places >= 0).view(-1, 1, 1), places.clamp(min=0).long()
    scales = pool.scales[layer]
    for part, new, scale in ((pool.k[layer], k, scales.k), (pool.v[layer], v, scales.v)):
        _put(part.flatten(0, 1).flatten(1), at, torch.where(kept, new, 0), scale, q.dtype)
    return q, None, None


class TorchStore:
    """One torch operation after another, on any device and in any dtype; gives back all three, keys
    and values as they are read again. Places are int64, and none is negative.
    """

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._k, self._v = pool.by_place()

    def __call__(self, layer: int, heads: LayerHeads, places: torch.Tensor) -> Stored:
        """See Store."""
        q, k, v = _ready(self._pool, layer, heads)
        scales = self._pool.scales[layer]
        k = _put(self._k[layer], places, k, scales.k, q.dtype)
        v = _put(self._v[layer], places, v, scales.v, q.dtype)
        return q, k, v


def _ready(
    pool: KVPool, layer: int, heads: LayerHeads
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values as pages want them: of 8 bits, queries and keys turned alike."""
    q, k, v = heads.split_and_rotate()
    if pool.stored != E4M3:
        return q, k, v
    shift = pool.shifts[layer]
    return turned(q).to(q.dtype), turned(k if shift is None else k.float() - shift), v


def _put(
    pages: torch.Tensor,
    places: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """[T, heads, dim] into rows of `pages`; what is read there afterwards, in `dtype`."""
    if pages.dtype != E4M3:
        pages.index_copy_(0, places, values.reshape(len(values), -1))
        return values
    stored = narrowed(values, scale)
    pages.view(torch.uint8).index_copy_(0, places, stored.flatten(1).view(torch.uint8))
    return widened(stored, scale, dtype)
