"""Qwen2, Qwen2.5 and Qwen3, dense and with mixtures of experts.

Builders allocate parameters; loading.py fills them.
"""

from __future__ import annotations

from pipeinfer.checkpoint.config import ModelConfig
from pipeinfer.layers.placement import Placement
from pipeinfer.models.causal_lm import (
    CausalLM,
    FeedForward,
    decoder_layer,
    dense_mlp,
    each_layer,
    shared_expert,
    sparse_mlp,
)


def build_qwen2(config: ModelConfig, placement: Placement) -> CausalLM:
    """Qwen2 and Qwen2.5: biases on Q, K and V, never on the output; windows by layer."""
    layers = [
        decoder_layer(config, index, at, dense_mlp(config, at), qkv_bias=True)
        for index, at in each_layer(config, placement)
    ]
    return CausalLM(config, layers, placement)


def build_qwen3(config: ModelConfig, placement: Placement) -> CausalLM:
    """Qwen3: a norm on each query and key head before RoPE, and a head size of its own."""
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


def build_qwen2_moe(config: ModelConfig, placement: Placement) -> CausalLM:
    """Qwen2-MoE: Qwen2 with a mixture of experts beside an expert that all tokens go to, which has
    a gate of its own (https://arxiv.org/abs/2407.10671)."""
    layers = [
        decoder_layer(
            config,
            index,
            at,
            _qwen2_moe_mlp(config, index, at),
            qkv_bias=config.attention_bias,
        )
        for index, at in each_layer(config, placement)
    ]
    return CausalLM(config, layers, placement)


def _qwen2_moe_mlp(config: ModelConfig, index: int, placement: Placement) -> FeedForward:
    if not config.sparse_layers[index]:
        return dense_mlp(config, placement)
    shared = shared_expert(config, "shared_expert", gated=True, placement=placement)
    return sparse_mlp(config, placement, shared=shared)


def build_qwen3_moe(config: ModelConfig, placement: Placement) -> CausalLM:
    """Qwen3 with mixtures of experts in the layers that config.json calls sparse."""
    layers = [
        decoder_layer(
            config,
            index,
            at,
            _qwen3_moe_mlp(config, index, at),
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
            qk_norm=True,
        )
        for index, at in each_layer(config, placement)
    ]
    return CausalLM(config, layers, placement)


def _qwen3_moe_mlp(config: ModelConfig, index: int, placement: Placement) -> FeedForward:
    if not config.sparse_layers[index]:
        return dense_mlp(config, placement)
    return sparse_mlp(config, placement)
