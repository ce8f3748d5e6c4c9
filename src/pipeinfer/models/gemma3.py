"""Gemma 3 (text): norms around attention and MLP, five layers with a window to each without.

Every norm multiplies by one plus its weight, embeddings are scaled by the root of their size, and
layers with a window rotate by a RoPE of their own. Knows no file and no cache.
Source: https://arxiv.org/abs/2503.19786.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch

from pipeinfer.checkpoint.config import ModelConfig
from pipeinfer.layers.attention import Attend, SelfAttention
from pipeinfer.layers.embedding import ScaledEmbedding
from pipeinfer.layers.norm import OFFSET, RMSNorm
from pipeinfer.layers.partial_sum import PartialSum
from pipeinfer.layers.placement import Placement, Source
from pipeinfer.layers.rope import Rotation
from pipeinfer.models.blocks import attention, dense_mlp
from pipeinfer.models.causal_lm import CausalLM, FeedForward


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
        x, residual = self.input_norm.add(x, residual)
        x = self.attention_norm(cast(torch.Tensor, self.attention(x, rotation, attend, rows)))
        if rows is not None:
            residual = residual[rows]
        x, residual = self.middle_norm.add(x, residual)
        return self.mlp_norm(cast(torch.Tensor, self.mlp(x))), residual

    def sources(self, prefix: str) -> Iterator[Source]:
        """`prefix` is the path of this layer, with its dot."""
        for norm in (self.input_norm, self.attention_norm, self.middle_norm, self.mlp_norm):
            yield from norm.sources(prefix)
        yield from self.attention.sources(f"{prefix}self_attn.")
        yield from self.mlp.sources(f"{prefix}mlp.")


def build(config: ModelConfig, placement: Placement) -> CausalLM:
    """The model with its parameters allocated, not filled."""
    layers = [_layer(config, index, placement.summed()) for index in range(config.num_layers)]
    embed = partial(ScaledEmbedding, scale=config.hidden_size**0.5)
    return CausalLM(config, layers, placement, OFFSET, embed)


def _layer(config: ModelConfig, index: int, placement: Placement) -> SandwichLayer:
    hidden, eps = config.hidden_size, config.rms_norm_eps
    return SandwichLayer(
        input_norm=RMSNorm("input_layernorm", hidden, eps, placement, OFFSET),
        attention=attention(
            config, index, placement, config.attention_bias, config.attention_bias, OFFSET
        ),
        attention_norm=RMSNorm("post_attention_layernorm", hidden, eps, placement, OFFSET),
        middle_norm=RMSNorm("pre_feedforward_layernorm", hidden, eps, placement, OFFSET),
        mlp=dense_mlp(config, placement),
        mlp_norm=RMSNorm("post_feedforward_layernorm", hidden, eps, placement, OFFSET),
    )
