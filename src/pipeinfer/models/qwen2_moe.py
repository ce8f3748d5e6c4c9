"""Qwen2-MoE: Qwen2 with a mixture of experts beside an expert that all tokens go to, which has a
gate of its own.

Knows no file and no cache. Source: https://arxiv.org/abs/2407.10671.
"""

from __future__ import annotations

from pipeinfer.checkpoint.config import ModelConfig
from pipeinfer.layers.placement import Placement
from pipeinfer.models.blocks import decoder_layer, dense_mlp, each_layer, shared_expert, sparse_mlp
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
        )
        for index, at in each_layer(config, placement)
    ]
    return CausalLM(config, layers, placement)


def _mlp(config: ModelConfig, index: int, placement: Placement) -> FeedForward:
    if not config.sparse_layers[index]:
        return dense_mlp(config, placement)
    shared = shared_expert(config, "shared_expert", gated=True, placement=placement)
    return sparse_mlp(config, placement, shared=shared)
