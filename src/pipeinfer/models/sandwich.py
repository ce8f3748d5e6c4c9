"""A decoder layer that norms what attention and feed-forward give, as well as what they get.

Knows no architecture: each says which kind of norms it has, and what they are called.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch

from pipeinfer.checkpoint.config import ModelConfig
from pipeinfer.layers.attention import Attend, SelfAttention
from pipeinfer.layers.norm import NormKind, RMSNorm
from pipeinfer.layers.placement import PartialSum, Placement, WeightSource
from pipeinfer.layers.rope import Rotation
from pipeinfer.models.causal_lm import FeedForward


@dataclass(frozen=True)
class SandwichLayer:
    """Attention and feed-forward, each between two norms, the second one before the addition.

    So both are built to make their sums themselves (`Placement.summed`): neither hands on a
    partial one.
    """

    input_norm: RMSNorm
    attention: SelfAttention
    attention_norm: RMSNorm
    middle_norm: RMSNorm
    mlp: FeedForward
    mlp_norm: RMSNorm

    def __call__(
        self,
        x: torch.Tensor | PartialSum | None,
        residual: torch.Tensor,
        rotation: Rotation,
        attend: Attend,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As DecoderLayer."""
        rounded, residual = self.input_norm.add_norm(x, residual, self.attention.input_quantizer)
        x = self.attention_norm(cast(torch.Tensor, self.attention(rounded, rotation, attend, rows)))
        if rows is not None:
            residual = residual[rows]
        rounded, residual = self.middle_norm.add_norm(x, residual, self.mlp.input_quantizer)
        return self.mlp_norm(cast(torch.Tensor, self.mlp(rounded))), residual

    def sources(self, prefix: str) -> Iterator[WeightSource]:
        """`prefix` is the path of this layer, with its dot."""
        for norm in (self.input_norm, self.attention_norm, self.middle_norm, self.mlp_norm):
            yield from norm.sources(prefix)
        yield from self.attention.sources(f"{prefix}self_attn.")
        yield from self.mlp.sources(f"{prefix}mlp.")


def sandwich_layer(
    config: ModelConfig,
    attention: SelfAttention,
    mlp: FeedForward,
    names: tuple[str, str, str],
    kind: NormKind,
    placement: Placement,
) -> SandwichLayer:
    """`names`: on disk, of the norms behind attention, before and behind the feed-forward block."""

    def norm(name: str) -> RMSNorm:
        return RMSNorm(name, config.hidden_size, config.rms_norm_eps, placement, kind)

    behind_attention, before, behind = map(norm, names)
    before_attention = norm("input_layernorm")
    return SandwichLayer(before_attention, attention, behind_attention, before, mlp, behind)
