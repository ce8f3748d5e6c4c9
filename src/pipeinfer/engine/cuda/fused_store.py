"""Storing keys and values by one kernel, which norms and turns heads on the way.

For backends that read pages only. Knows a pool; no step, no request and no model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pipeinfer.engine.attend import Stored
from pipeinfer.kernels.store import turn_and_store
from pipeinfer.layers.norm import HeadNorm
from pipeinfer.layers.rope import Rotation
from pipeinfer.memory.pool import KVPool


@dataclass(frozen=True)
class FusedStore:
    """A `Store`. Places are int32 or int64; of a token with a negative one nothing is kept."""

    pool: KVPool

    def __call__(
        self,
        layer: int,
        qkv: torch.Tensor,
        num_heads: int,
        norm: HeadNorm | None,
        rotation: Rotation,
        places: torch.Tensor,
    ) -> Stored:
        """See Store; keys and values are in their pages only."""
        queries = turn_and_store(
            qkv,
            *rotation.rope.table,
            places,
            self.pool.k[layer],
            self.pool.v[layer],
            num_heads,
            positions=rotation.positions,
            q_norm=None if norm is None else norm.query_weight,
            k_norm=None if norm is None else norm.key_weight,
            eps=0.0 if norm is None else norm.eps,
            offset=0.0 if norm is None else norm.offset,
        )
        return queries, None, None
