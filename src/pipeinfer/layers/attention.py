"""The projections around attention: merged QKV, optional QK norm, RoPE, output.

The attention itself is a function handed in with each call: this module knows no cache, no page
and no backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from pipeinfer.layers.linear import RowLinear, merged_qkv
from pipeinfer.layers.norm import USUAL, HeadNorm, NormKind
from pipeinfer.layers.pending import Pending
from pipeinfer.layers.placement import Placement, Source
from pipeinfer.layers.rope import Rotation, rotate


class Attend(Protocol):
    """What a model calls for the attention of a layer: all from the merged product to heads."""

    def __call__(
        self,
        layer: int,
        qkv: torch.Tensor,
        num_heads: int,
        norm: HeadNorm | None,
        rotation: Rotation,
        /,
    ) -> torch.Tensor:
        """qkv [T, (num_heads + 2 kv_heads) * head_dim], not normed and not turned yet: queries,
        keys, values. Returns [T, num_heads, head_dim].
        """
        ...


class SelfAttention:
    """[T, hidden] to [T, hidden]. `norm_eps` turns QK norm on, of kind `norm_kind`; heads are those
    of all ranks.
    """

    def __init__(
        self,
        layer: int,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool,
        output_bias: bool,
        norm_eps: float | None,
        placement: Placement,
        norm_kind: NormKind = USUAL,
    ) -> None:
        shard = placement.shard
        self.layer = layer
        self.head_dim = head_dim
        self.num_heads = num_heads // shard.size
        first, last = shard.kv_span(num_kv_heads)
        self.num_kv_heads = last - first
        self.qkv = merged_qkv(hidden_size, num_heads, num_kv_heads, head_dim, bias, placement)
        self.norm = (
            HeadNorm(self.num_heads, self.num_kv_heads, head_dim, norm_eps, placement, norm_kind)
            if norm_eps is not None
            else None
        )
        self.output = RowLinear("o_proj", num_heads * head_dim, hidden_size, output_bias, placement)

    def __call__(
        self,
        x: torch.Tensor,
        rotation: Rotation,
        attend: Attend,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor | Pending:
        """rows: int64 [S], whose output is wanted; None: all."""
        out = attend(self.layer, self.qkv(x), self.num_heads, self.norm, rotation).flatten(1)
        return self.output(out if rows is None else out[rows])

    def pack(self) -> None:
        """To be called when the weights are final."""
        self.qkv.matrix.pack()
        self.output.matrix.pack()

    def sources(self, prefix: str) -> Iterator[Source]:
        """`prefix` is the path of this module, with its dot."""
        yield from self.qkv.sources(prefix)
        yield from self.output.sources(prefix)
        if self.norm is not None:
            yield from self.norm.sources(prefix)


def split_and_turn(
    qkv: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    norm: HeadNorm | None,
    rotation: Rotation,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values [T, heads, head_dim] of the merged product, normed and turned by
    torch operations. Values are a view, with strided rows.
    """
    # Heads of one token: [ queries | keys | values ]
    heads = qkv.unflatten(-1, (num_heads + 2 * num_kv_heads, -1))
    turned = num_heads + num_kv_heads
    keyed, values = heads[:, :turned], heads[:, turned:]
    if norm is not None:
        keyed = norm(keyed)
    keyed = rotate(keyed, rotation.angles)
    return keyed[:, :num_heads], keyed[:, num_heads:], values
