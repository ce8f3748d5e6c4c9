"""GLM-4 as it came out first (glm-4-9b): Llama's layers with the biases and the RoPE of GLM-4.

Knows no file and no cache. Source: https://arxiv.org/abs/2406.12793.
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
            dense_mlp(config, at, merged=True),
            qkv_bias=config.attention_bias,
        )
        for index, at in each_layer(config, placement)
    ]
    return CausalLM(config, layers, placement)
