"""Qwen3 with mixtures of experts in the layers that config.json calls sparse.

Knows no file and no cache.
"""

from __future__ import annotations

from pipeinfer.checkpoint.config import ModelConfig
from pipeinfer.layers.placement import Placement
from pipeinfer.models.blocks import decoder_layer, dense_mlp, each_layer, sparse_mlp
from pipeinfer.models.causal_lm import CausalLM, FeedForward


def build(config: ModelConfig, placement: Placement) -> CausalLM:
    """The model with its parameters allocated, not filled."""
    layers = [
        decoder_layer(
            config,
            index,
            at,
            _mlp(config, index, at),
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
            qk_norm=True,
        )
        for index, at in each_layer(config, placement)
    ]
    return CausalLM(config, layers, placement)


def _mlp(config: ModelConfig, index: int, placement: Placement) -> FeedForward:
    if not config.sparse_layers[index]:
        return dense_mlp(config, placement)
    return sparse_mlp(config, placement)
