"""Gemma 3 (text): norms around attention and MLP, five layers with a window to each without.

Every norm multiplies by one plus its weight, embeddings are scaled by the root of their size, and
layers with a window rotate by a RoPE of their own. Source: https://arxiv.org/abs/2503.19786.
"""

from __future__ import annotations

from functools import partial

from pipeinfer.checkpoint.config import ModelConfig
from pipeinfer.layers.elementwise import GEMMA_RMS_NORM
from pipeinfer.layers.linear import ScaledEmbedding
from pipeinfer.layers.placement import Placement
from pipeinfer.models.causal_lm import (
    CausalLM,
    SandwichLayer,
    attention,
    dense_mlp,
    each_layer,
    sandwich_layer,
)

NORMS = (
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def build_gemma3(config: ModelConfig, placement: Placement) -> CausalLM:
    """The model with its parameters allocated, not filled."""
    every = each_layer(config, placement.without_deferred_sums())
    layers = [_layer(config, index, at) for index, at in every]
    embed = partial(ScaledEmbedding, scale=config.hidden_size**0.5)
    return CausalLM(config, layers, placement, GEMMA_RMS_NORM, embed)


def _layer(config: ModelConfig, index: int, placement: Placement) -> SandwichLayer:
    bias = config.attention_bias
    return sandwich_layer(
        config,
        attention(config, index, placement, bias, bias, GEMMA_RMS_NORM),
        dense_mlp(config, placement),
        NORMS,
        GEMMA_RMS_NORM,
        placement,
    )
