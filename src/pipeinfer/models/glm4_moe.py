"""GLM-4.5 and after: mixtures whose experts are chosen in groups, beside an expert for all tokens.

The first layers are dense, and half of each head is rotated. Knows no file and no cache; the layer
behind the last, which drafts, is left out. Source: https://arxiv.org/abs/2508.06471.
"""

from __future__ import annotations

from pipeinfer.checkpoint.config import ModelConfig
from pipeinfer.layers.moe import GroupedTopK, SigmoidRouter
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
            qk_norm=config.qk_norm,
        )
        for index, at in each_layer(config, placement)
    ]
    return CausalLM(config, layers, placement)


def _mlp(config: ModelConfig, index: int, placement: Placement) -> FeedForward:
    if not config.sparse_layers[index]:
        return dense_mlp(config, placement)
    shared = None
    if config.shared_intermediate_size:
        shared = shared_expert(config, "shared_experts", gated=False, placement=placement)
    return sparse_mlp(config, placement, _router(config, placement), shared)


def _router(config: ModelConfig, placement: Placement) -> SigmoidRouter:
    choice = GroupedTopK(
        config.num_experts_per_tok,
        config.expert_groups,
        config.top_expert_groups,
        config.norm_topk_prob,
        config.routed_scale,
    )
    return SigmoidRouter(config.hidden_size, config.num_experts, choice, placement)
