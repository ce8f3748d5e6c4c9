"""Stores: keys and values of a step on their way into the pool's pages, and the attention call of a
model.

A `Store` takes the heads of one layer, norms and rotates them and writes keys and values to the
step's slot mapping; then an attention backend reads pages. There are two: TorchStore for backends
that attend to the step's own keys, too, and FusedStore, one kernel. For pages of 8 bits
`find_key_centers` finds, when a model is loaded, the vector that is subtracted from each layer's
keys. Uses a pool and a backend's metadata; no step and no request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from pipeinfer.attention.interface import (
    KV,
    Attention,
    AttentionMetadata,
    BackendCapabilities,
    KeyCenter,
    KVPool,
)
from pipeinfer.attention.torch_backend import attend_unfused
from pipeinfer.kernels.formats import E4M3, dequantize_e4m3, hadamard_transform, quantize_e4m3
from pipeinfer.kernels.interface import tensor_of
from pipeinfer.layers.attention import LayerQKV
from pipeinfer.models.causal_lm import LanguageModel
from pipeinfer.step import AttentionShape

# Length of the sequence of find_key_centers: 256 were a little worse, 1024 no better.
CENTERING_TOKENS = 512

Stored = tuple[torch.Tensor, KV, KV]  # q [T, heads, head_dim], k, v
# (layer, heads, slot_mapping [T]: page * page_size + offset of each token): norms and rotates the
# heads, and stores keys and values. TorchStore or FusedStore.
Store = Callable[[int, LayerQKV, torch.Tensor], Stored]


@dataclass(frozen=True)
class StepAttention:
    """The `Attend` that a model calls in one step, layer after layer (layers/attention.py).

    Attributes:
    - backend: attends
    - metadata: of `backend`, for the step
    - store: stores keys and values
    - slot_mapping: int64 [T], where the tokens are stored
    """

    backend: Attention
    metadata: AttentionMetadata
    store: Store
    slot_mapping: torch.Tensor

    def __call__(self, layer: int, heads: LayerQKV) -> torch.Tensor:
        """Stores keys and values, then attends: a token sees itself."""
        q, k, v = self.store(layer, heads, self.slot_mapping)
        return self.backend.attend(layer, q, k, v, self.metadata)


def store_for(pool: KVPool, traits: BackendCapabilities) -> Store:
    """Returns TorchStore for backends that need the step's own keys and values, FusedStore for
    others.
    """
    return TorchStore(pool) if traits.needs_kv else FusedStore(pool)


def store_valid(pool: KVPool, layer: int, heads: LayerQKV, slot_mapping: torch.Tensor) -> Stored:
    """Stores by torch operations of fixed shapes, which a graph can hold: a token with a negative
    slot leaves zeros in the dummy page.
    """
    q, k, v = _ready(pool, layer, heads)
    valid, at = (slot_mapping >= 0).view(-1, 1, 1), slot_mapping.clamp(min=0).long()
    scales = pool.scales[layer]
    for part, new, scale in ((pool.k[layer], k, scales.k), (pool.v[layer], v, scales.v)):
        _put(part.flatten(0, 1).flatten(1), at, torch.where(valid, new, 0), scale, q.dtype)
    return q, None, None


class TorchStore:
    """A Store of torch operations, on any device and in any dtype; returns queries, and keys and
    values as they are read from pages. slot_mapping: int64, never negative.
    """

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._k, self._v = pool.token_views()

    def __call__(self, layer: int, heads: LayerQKV, slot_mapping: torch.Tensor) -> Stored:
        """Norms, rotates and stores, see Store."""
        q, k, v = _ready(self._pool, layer, heads)
        scales = self._pool.scales[layer]
        k = _put(self._k[layer], slot_mapping, k, scales.k, q.dtype)
        v = _put(self._v[layer], slot_mapping, v, scales.v, q.dtype)
        return q, k, v


class FusedStore:
    """A Store that is one kernel, which norms, rotates and stores; returns queries alone. Needs
    triton.

    slot_mapping: int32 or int64; tokens with a negative slot are not stored.
    """

    def __init__(self, pool: KVPool) -> None:
        from pipeinfer.kernels.rotate_and_store import rotate_and_store  # which needs triton

        self._pool = pool
        self._rotate_and_store = rotate_and_store

    def __call__(self, layer: int, heads: LayerQKV, slot_mapping: torch.Tensor) -> Stored:
        """Norms, rotates and stores, see Store. A LayerQKV whose heads are ready is stored by torch
        operations.
        """
        merged, pool = heads.merged, self._pool
        if merged is None:
            return store_valid(pool, layer, heads, slot_mapping)
        norm, rotation, scales = merged.norm, merged.rotation, pool.scales[layer]
        queries = self._rotate_and_store(
            merged.product,
            *rotation.rope.cos_sin_table,
            slot_mapping,
            pool.k[layer],
            pool.v[layer],
            merged.num_heads,
            positions=rotation.positions,
            q_norm=None if norm is None else norm.query_weight,
            k_norm=None if norm is None else norm.key_weight,
            eps=0.0 if norm is None else norm.eps,
            offset=0.0 if norm is None else norm.weight_offset,
            k_scale=scales.k,
            v_scale=scales.v,
            key_center=pool.key_centers[layer],
        )
        return queries, None, None


def _ready(
    pool: KVPool, layer: int, heads: LayerQKV
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns queries, keys and values as pages store them; for pages of 8 bits, queries and keys
    are transformed by one matrix.
    """
    q, k, v = heads.split_and_rotate()
    if pool.storage_dtype != E4M3:
        return q, k, v
    center = pool.key_centers[layer]
    return (
        hadamard_transform(q).to(q.dtype),
        hadamard_transform(k if center is None else k.float() - center),
        v,
    )


def _put(
    pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Writes [T, heads, dim] into rows of `pages`; returns the values that are read there
    afterwards, in `dtype`.
    """
    if pages.dtype != E4M3:
        pages.index_copy_(0, slot_mapping, values.reshape(len(values), -1))
        return values
    stored = quantize_e4m3(values, scale)
    pages.view(torch.uint8).index_copy_(0, slot_mapping, stored.flatten(1).view(torch.uint8))
    return dequantize_e4m3(stored, scale, dtype)


@torch.inference_mode()
def find_key_centers(
    model: LanguageModel, max_tokens: int, where: torch.device
) -> tuple[KeyCenter, ...]:
    """Returns for each layer the vector that is subtracted from keys (after norm and RoPE) before
    pages of 8 bits store them.

    The vector is the key that queries see on average; None for a layer with sinks or a soft cap,
    whose weights would change.

    Subtracting one vector from all keys of a head changes all scores of a query by one value, which
    softmax does not see: any vector is right, and the nearer keys are to it, the less is lost when
    they are rounded. Found from fixed random ids, so by the weights alone: one sequence of at most
    `max_tokens` is computed, on all ranks of a group.
    """
    average = _Average(model.attention_shapes())
    if any(map(_may_center, average.shapes)):
        count = min(CENTERING_TOKENS, max_tokens)
        # This generator is frozen: it gives the same ids in every version of NumPy.
        ids = np.random.RandomState(0).randint(0, model.vocab_shard.vocab_size, count)
        tokens = tensor_of(ids.astype(np.int64)).to(where)
        model(tokens, torch.arange(count, device=where), average)
    return tuple(average.found)


def _may_center(shape: AttentionShape) -> bool:
    return shape.sinks is None and shape.soft_cap is None


class _Average:
    """An `Attend` of one sequence from its start, without pages, which averages the keys that
    queries see.

    Attributes:
    - shapes: of the layers
    - found: averages by layer
    """

    def __init__(self, shapes: Sequence[AttentionShape]) -> None:
        self.shapes = shapes
        self.found: list[KeyCenter] = [None] * len(shapes)
        self._bias = cache(_bias)

    def __call__(self, layer: int, heads: LayerQKV) -> torch.Tensor:
        """Attends as layers/attention.py asks for, and notes the layer's average key."""
        shape = self.shapes[layer]
        q, k, v = (part.transpose(0, 1) for part in heads.split_and_rotate())
        bias = self._bias(q.shape[1], shape.sliding_window, q.device)
        out = q.new_empty((q.shape[1], shape.num_heads, shape.head_dim))
        seen: list[torch.Tensor] = []
        group = shape.num_heads // shape.num_kv_heads
        for head in range(shape.num_kv_heads):  # scores of all at once take too much memory
            of_head = slice(head * group, (head + 1) * group)
            sinks = None if shape.sinks is None else shape.sinks[of_head, None, None]
            # A product with both: the weighted values, and the weighted keys as if they were
            # values.
            both = torch.cat((v[head], k[head]), dim=-1)
            found = attend_unfused(shape, q[of_head], k[head], both, bias, sinks)
            values, keys = found.chunk(2, dim=-1)
            out[:, of_head] = values.transpose(0, 1)
            seen.append(keys.float().mean(dim=(0, 1)))
        if _may_center(shape):
            # These ids may give infinite numbers; others need not.
            self.found[layer] = torch.stack(seen).nan_to_num_(0.0, 0.0, 0.0)
        return out


def _bias(count: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Returns [count, count]: 0, or -inf where a query does not see a key."""
    at = torch.arange(count, device=device)
    back = at[:, None] - at
    hidden = (back < 0) if window is None else (back < 0) | (back >= window)
    return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf"))
