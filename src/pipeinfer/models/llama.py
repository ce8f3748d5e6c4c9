"""Llama, Mistral and Mixtral: decoder layers with pre-norms.

Builders allocate parameters; loading.py fills them.
"""

from __future__ import annotations

from pipeinfer.checkpoint.config import ModelConfig
from pipeinfer.layers.placement import Placement
from pipeinfer.models.causal_lm import CausalLM, decoder_layer, dense_mlp, each_layer, sparse_mlp


def build_llama(config: ModelConfig, placement: Placement) -> CausalLM:
    """Llama 1 to 3: biases only where config.json asks for them, then on all four projections."""
    layers = [
        decoder_layer(
            config,
            index,
            at,
            dense_mlp(config, at, bias=config.mlp_bias),
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
        )
        for index, at in each_layer(config, placement)
    ]
    return CausalLM(config, layers, placement)


def build_mistral(config: ModelConfig, placement: Placement) -> CausalLM:
    """Mistral: no biases, and one sliding window for all layers or none."""
    layers = [
        decoder_layer(config, index, at, dense_mlp(config, at))
        for index, at in each_layer(config, placement)
    ]
    return CausalLM(config, layers, placement)


def build_mixtral(config: ModelConfig, placement: Placement) -> CausalLM:
    """Mixtral: Mistral with a mixture of experts in every layer (https://arxiv.org/abs/2401.04088).

    A sliding window is the exception. Names of experts in files: checkpoint/files.py.
    """
    layers = [
        decoder_layer(config, index, at, sparse_mlp(config, at))
        for index, at in each_layer(config, placement)
    ]
    return CausalLM(config, layers, placement)
