"""GLM-4 and GLM-4.5 (https://arxiv.org/abs/2406.12793, https://arxiv.org/abs/2508.06471).

Builders allocate parameters; loading.py fills them.
"""

from __future__ import annotations

from pipeinfer.checkpoint.config import ModelConfig
from pipeinfer.layers.elementwise import RMS_NORM
from pipeinfer.layers.moe import GroupedTopK, SigmoidRouter
from pipeinfer.layers.placement import Placement
from pipeinfer.models.causal_lm import (
    CausalLM,
    FeedForward,
    SandwichLayer,
    attention,
    decoder_layer,
    dense_mlp,
    each_layer,
    sandwich_layer,
    shared_expert,
    sparse_mlp,
)


def build_glm(config: ModelConfig, placement: Placement) -> CausalLM:
    """The first GLM-4 (glm-4-9b): Llama's layers with the biases and the RoPE of GLM-4."""
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


GLM4_NORMS = ("post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


def build_glm4(config: ModelConfig, placement: Placement) -> CausalLM:
    """GLM-4 (0414): norms around attention and MLP, biases on Q, K and V, and a RoPE that turns
    neighbours in half of each head."""
    every = each_layer(config, placement.without_deferred_sums())
    layers = [_glm4_layer(config, index, at) for index, at in every]
    return CausalLM(config, layers, placement)


def _glm4_layer(config: ModelConfig, index: int, placement: Placement) -> SandwichLayer:
    return sandwich_layer(
        config,
        attention(config, index, placement, config.attention_bias, False, None),
        dense_mlp(config, placement, merged=True),
        GLM4_NORMS,
        RMS_NORM,
        placement,
    )


def build_glm4_moe(config: ModelConfig, placement: Placement) -> CausalLM:
    """GLM-4.5 and after: mixtures whose experts are chosen in groups, beside an expert that all
    tokens go to. The first layers are dense, and half of each head is rotated. The layer behind the
    last, which drafts, is left out."""
    layers = [
        decoder_layer(
            config,
            index,
            at,
            _glm4_moe_mlp(config, index, at),
            qkv_bias=config.attention_bias,
            qk_norm=config.qk_norm,
        )
        for index, at in each_layer(config, placement)
    ]
    return CausalLM(config, layers, placement)


def _glm4_moe_mlp(config: ModelConfig, index: int, placement: Placement) -> FeedForward:
    if not config.sparse_layers[index]:
        return dense_mlp(config, placement)
    shared = None
    if config.shared_intermediate_size:
        shared = shared_expert(config, "shared_experts", gated=False, placement=placement)
    return sparse_mlp(config, placement, _glm4_moe_router(config, placement), shared)


def _glm4_moe_router(config: ModelConfig, placement: Placement) -> SigmoidRouter:
    choice = GroupedTopK(
        config.num_experts_per_tok,
        config.expert_groups,
        config.top_expert_groups,
        config.norm_topk_prob,
        config.routed_scale,
    )
    return SigmoidRouter(config.hidden_size, config.num_experts, choice, placement)
