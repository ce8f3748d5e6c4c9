"""Mixtral: Mistral with a mixture of experts in every layer; a sliding window is the exception.

Knows no file and no cache; by what names files have the experts is in checkpoint/safetensors.py.
Source: https://arxiv.org/abs/2401.04088.
"""

from __future__ import annotations

from pipeinfer.checkpoint.config import ModelConfig
from pipeinfer.layers.placement import Placement
from pipeinfer.models.blocks import decoder_layer, each_layer, sparse_mlp
from pipeinfer.models.causal_lm import CausalLM


def build(config: ModelConfig, placement: Placement) -> CausalLM:
    """The model with its parameters allocated, not filled."""
    layers = [
        decoder_layer(config, index, at, sparse_mlp(config, at))
        for index, at in each_layer(config, placement)
    ]
    return CausalLM(config, layers, placement)
