"""Qwen3 with mixtures of experts in the layers that config.json calls sparse.

Knows no file and no cache.
"""

from __future__ import annotations

from pipeinfer.checkpoint.config import ModelConfig
from pipeinfer.layers.placement import Placement
from pipeinfer.models.blocks import decoder_layer, dense_mlp, sparse_mlp
from pipeinfer.models.causal_lm import CausalLM, FeedForward


def build(config: ModelConfig, placement: Placement) -> CausalLM:
    """The model with its parameters allocated, not filled."""
    layers = [
        decoder_layer(
            config,
            index,
            placement,
            _mlp(config, index, placement),
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
            qk_norm=True,
        )
        for index in range(config.num_layers)
    ]
    return CausalLM(config, layers, placement)


def _mlp(config: ModelConfig, index: int, placement: Placement) -> FeedForward:
    if not config.sparse_layers[index]:
        return dense_mlp(config, placement)
    return sparse_mlp(config, placement)
