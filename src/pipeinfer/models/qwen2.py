"""Qwen2 and Qwen2.5: biases on Q, K and V, never on the output; windows by layer.

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
        decoder_layer(config, index, at, dense_mlp(config, at), qkv_bias=True)
        for index, at in each_layer(config, placement)
    ]
    return CausalLM(config, layers, placement)
