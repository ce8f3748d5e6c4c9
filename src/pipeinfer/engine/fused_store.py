"""Storing keys and values by one kernel, which norms and rotates heads on the way.

For backends that read pages only. Knows a pool; no step, no request and no model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pipeinfer.engine.storing import Stored, store_kept
from pipeinfer.kernels.store import rotate_and_store
from pipeinfer.layers.attention import LayerHeads
from pipeinfer.memory.pool import KVPool


@dataclass(frozen=True)
class FusedStore:
    """A `Store`; keys and values are in their pages only. Places are int32 or int64; of a token
    with a negative one nothing is kept.
    """

    pool: KVPool

    def __call__(self, layer: int, heads: LayerHeads, places: torch.Tensor) -> Stored:
        """See Store. Heads that are ready are stored by torch operations."""
        merged = heads.merged
        if merged is None:
            return store_kept(self.pool, layer, heads, places)
        norm, rotation, scales = merged.norm, merged.rotation, self.pool.scales[layer]
        queries = rotate_and_store(
            merged.product,
            *rotation.rope.table,
            places,
            self.pool.k[layer],
            self.pool.v[layer],
            merged.num_heads,
            positions=rotation.positions,
            q_norm=None if norm is None else norm.query_weight,
            k_norm=None if norm is None else norm.key_weight,
            eps=0.0 if norm is None else norm.eps,
            offset=0.0 if norm is None else norm.offset,
            k_scale=scales.k,
            v_scale=scales.v,
            shift=self.pool.shifts[layer],
        )
        return queries, None, None
