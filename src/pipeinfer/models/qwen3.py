"""Qwen3: a norm on each query and key head before RoPE, and a head size of its own.

Knows no file and no cache.
"""

from __future__ import annotations

from pipeinfer.checkpoint.config import ModelConfig
from pipeinfer.layers.placement import Placement
from pipeinfer.models.blocks import decoder_layer, dense_mlp, each_layer
from pipeinfer.models.causal_lm import CausalLM


def build(config: ModelConfig, placement: Placement) -> CausalLM:
    """The model with its parameters allocated, not filled."""
    layers = [
        decoder_layer(
            config,
            index,
            at,
            dense_mlp(config, at),
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
            qk_norm=True,
        )
        for index, at in each_layer(config, placement)
    ]
    return CausalLM(config, layers, placement)
