"""GLM-4 (0414): norms around attention and MLP, biases on Q, K and V, and a RoPE that turns
neighbours in half of each head.

Knows no file and no cache. Source: https://arxiv.org/abs/2406.12793.
"""

from __future__ import annotations

from pipeinfer.checkpoint.config import ModelConfig
from pipeinfer.layers.norm import RMS_NORM
from pipeinfer.layers.placement import Placement
from pipeinfer.models.blocks import attention, dense_mlp, each_layer
from pipeinfer.models.causal_lm import CausalLM
from pipeinfer.models.sandwich import SandwichLayer, sandwich_layer

NORMS = ("post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


def build(config: ModelConfig, placement: Placement) -> CausalLM:
    """The model with its parameters allocated, not filled."""
    every = each_layer(config, placement.without_deferred_sums())
    layers = [_layer(config, index, at) for index, at in every]
    return CausalLM(config, layers, placement)


def _layer(config: ModelConfig, index: int, placement: Placement) -> SandwichLayer:
    return sandwich_layer(
        config,
        attention(config, index, placement, config.attention_bias, False, None),
        dense_mlp(config, placement, merged=True),
        NORMS,
        RMS_NORM,
        placement,
    )
