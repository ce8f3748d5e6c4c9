"""Mistral: no biases, and one sliding window for all layers or none.

Knows no file and no cache.
"""

from __future__ import annotations

from pipeinfer.checkpoint.config import ModelConfig
from pipeinfer.layers.placement import Placement
from pipeinfer.models.blocks import decoder_layer, dense_mlp
from pipeinfer.models.causal_lm import CausalLM


def build(config: ModelConfig, placement: Placement) -> CausalLM:
    """The model with its parameters allocated, not filled."""
    layers = [
        decoder_layer(config, index, placement, dense_mlp(config, placement))
        for index in range(config.num_layers)
    ]
    return CausalLM(config, layers, placement)
