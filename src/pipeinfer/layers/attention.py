"""The projections around attention: merged QKV, optional QK norm, RoPE, output.

The attention itself is a function handed in with each call: this module knows no cache, no page
and no backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch

from pipeinfer.layers.linear import RowParallelLinear, merged_qkv
from pipeinfer.layers.norm import HeadNorm, NormKind
from pipeinfer.layers.placement import PartialSum, Placement, WeightSource
from pipeinfer.layers.rope import Rotation, rotate
from pipeinfer.layers.weight import ActivationQuantizer, Activations


class LayerQKV(Protocol):
    """A layer's queries, keys and values, of the tokens of a step."""

    @property
    def merged(self) -> MergedQKV | None:
        """What a kernel can split, norm and rotate as it stores; None: that is done."""
        ...

    def split_and_rotate(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values [T, heads, head_dim], normed and rotated."""
        ...


class RotatedQKV(NamedTuple):
    """`LayerHeads` that their model has split, normed and rotated."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def merged(self) -> MergedQKV | None:
        """There is nothing left to do."""
        return None

    def split_and_rotate(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See LayerHeads."""
        return self.queries, self.keys, self.values


class MergedQKV(NamedTuple):
    """A layer's queries, keys and values as one product, not yet normed and rotated.

    Attributes:
        product: [T, (num_heads + 2 num_kv_heads) * head_dim].
        num_heads: query heads of this rank.
        num_kv_heads: KV heads of this rank.
        norm: the QK norm; None: there is none.
        rotation: RoPE at the tokens' positions.
    """

    product: torch.Tensor
    num_heads: int
    num_kv_heads: int
    norm: HeadNorm | None
    rotation: Rotation

    @property
    def merged(self) -> MergedQKV | None:
        """These."""
        return self

    def split_and_rotate(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values [T, heads, head_dim], normed and rotated by torch operations;
        views with strided rows.
        """
        # Heads of one token: [ queries | keys | values ]
        heads = self.product.unflatten(-1, (self.num_heads + 2 * self.num_kv_heads, -1))
        rotated = self.num_heads + self.num_kv_heads
        keyed, values = heads[:, :rotated], heads[:, rotated:]
        if self.norm is not None:
            keyed = self.norm(keyed)
        keyed = rotate(keyed, self.rotation.cos_sin)
        return keyed[:, : self.num_heads], keyed[:, self.num_heads :], values


# What a model calls in each layer, by its number: stores keys and values, and attends. Returns
# [T, num_heads, head_dim].
Attend = Callable[[int, LayerQKV], torch.Tensor]


class AttentionHeads(NamedTuple):
    """The heads of a layer, of all ranks.

    Attributes:
        queries: query heads.
        keys: KV heads.
        head_dim: values of a head.
        norm: kind and epsilon of the QK norm; None: there is none.
        permutation: of a head's values in files to NeoX order (rope.py); None: they have it.
        sinks: whether each query head has an attention sink (see AttentionShape).
    """

    queries: int
    keys: int
    head_dim: int
    norm: tuple[NormKind, float] | None = None
    permutation: list[int] | None = None
    sinks: bool = False


class SelfAttention:
    """[T, hidden] to [T, hidden]; `bias`: of queries, keys and values."""

    def __init__(
        self,
        layer: int,
        *,
        hidden_size: int,
        heads: AttentionHeads,
        bias: bool,
        output_bias: bool,
        placement: Placement,
    ) -> None:
        shard = placement.shard
        self.layer = layer
        self._permutation = heads.permutation
        self.head_dim = heads.head_dim
        self.num_heads = heads.queries // shard.size
        first, last = shard.kv_span(heads.keys)
        self.num_kv_heads = last - first
        self._query_heads = (heads.queries, shard.span(heads.queries))
        self.sinks = placement.empty(self.num_heads) if heads.sinks else None
        self.qkv = merged_qkv(
            hidden_size, heads.queries, heads.keys, heads.head_dim, bias, placement
        )
        self.norm: HeadNorm | None = None
        if heads.norm is not None:
            kind, eps = heads.norm
            self.norm = HeadNorm(
                self.num_heads, self.num_kv_heads, heads.head_dim, eps, placement, kind
            )
        width = heads.queries * heads.head_dim
        self.output = RowParallelLinear("o_proj", width, hidden_size, output_bias, placement)

    @property
    def input_quantizer(self) -> ActivationQuantizer | None:
        """See Weight (weight.py)."""
        return self.qkv.weight.input_quantizer

    def __call__(
        self,
        x: Activations,
        rotation: Rotation,
        attend: Attend,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor | PartialSum:
        """rows: int64 [S], whose output is wanted; None: all."""
        heads = MergedQKV(self.qkv(x), self.num_heads, self.num_kv_heads, self.norm, rotation)
        out = attend(self.layer, heads).flatten(1)
        return self.output(out if rows is None else out[rows])

    def pack(self) -> None:
        """To be called when the weights are final."""
        if self._permutation is not None:
            self._permute(self._permutation)
            self._permutation = None
        self.qkv.weight.pack()
        self.output.weight.pack()

    def _permute(self, permutation: list[int]) -> None:
        """Of queries and keys, which are the first heads of the product."""
        keyed = (self.num_heads + self.num_kv_heads) * self.head_dim
        rows = torch.arange(keyed).unflatten(0, (-1, self.head_dim))[:, permutation].flatten()
        matrix = self.qkv.weight
        matrix.permute(rows)
        if matrix.bias is not None:
            matrix.bias[:keyed] = matrix.bias[rows]
        if self.norm is not None:
            self.norm.weight.copy_(self.norm.weight[:, permutation])

    def sources(self, prefix: str) -> Iterator[WeightSource]:
        """`prefix` is the path of this module, with its dot."""
        yield from self.qkv.sources(prefix)
        yield from self.output.sources(prefix)
        if self.norm is not None:
            yield from self.norm.sources(prefix)
        if self.sinks is not None:
            total, span = self._query_heads
            yield WeightSource(f"{prefix}sinks", (total,), (slice(*span),), self.sinks)
