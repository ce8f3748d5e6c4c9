"""gpt-oss: attention with sinks, a window in each second layer, and experts with bounds and biases.

Source: https://arxiv.org/abs/2508.10925.
"""

from __future__ import annotations

from pipeinfer.checkpoint.config import ModelConfig
from pipeinfer.layers.experts import ClampedExperts
from pipeinfer.layers.moe import SoftmaxRouter, SparseMoeBlock
from pipeinfer.layers.placement import Placement
from pipeinfer.models.causal_lm import CausalLM, decoder_layer, each_layer


def build_gpt_oss(config: ModelConfig, placement: Placement) -> CausalLM:
    """The model with its parameters allocated, not filled."""
    layers = [
        decoder_layer(
            config,
            index,
            at,
            _mlp(config, at),
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
        )
        for index, at in each_layer(config, placement)
    ]
    return CausalLM(config, layers, placement)


def _mlp(config: ModelConfig, placement: Placement) -> SparseMoeBlock:
    hidden, experts = config.hidden_size, config.num_experts
    top_k = config.num_experts_per_tok
    router = SoftmaxRouter(hidden, experts, top_k, True, placement, name="router", bias=True)
    size = config.moe_intermediate_size
    within = placement.submodule("mlp.")
    clamped = ClampedExperts(hidden, size, experts, config.swiglu, within)
    return SparseMoeBlock(router, clamped, placement)
