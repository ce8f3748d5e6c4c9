"""The decoder layer that every architecture here starts from, sized by a ModelConfig.

Knows no architecture: each says which projections have biases and hands in its feed-forward block.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeinfer.checkpoint.config import ModelConfig
from pipeinfer.layers.attention import AttentionHeads, SelfAttention
from pipeinfer.layers.experts import GatedExperts
from pipeinfer.layers.mlp import GATED_ACTIVATIONS, GatedMLP
from pipeinfer.layers.moe import SharedExpert, SoftmaxRouter, SparseMoeBlock, TopKRouter
from pipeinfer.layers.norm import RMS_NORM, NormKind, RMSNorm
from pipeinfer.layers.placement import Placement
from pipeinfer.layers.rope import neox_permutation
from pipeinfer.models.causal_lm import DecoderLayer, FeedForward


def each_layer(config: ModelConfig, placement: Placement) -> Iterator[tuple[int, Placement]]:
    """Every layer's number, and `placement` within it."""
    for index in range(config.num_layers):
        yield index, placement.submodule(f"model.layers.{index}.")


def decoder_layer(
    config: ModelConfig,
    index: int,
    placement: Placement,
    mlp: FeedForward,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_norm: bool = False,
) -> DecoderLayer:
    """Layer `index` with pre-norms, its parts named on disk as Llama names them."""
    hidden, eps = config.hidden_size, config.rms_norm_eps
    head_norm = RMS_NORM if qk_norm else None
    return DecoderLayer(
        input_norm=RMSNorm("input_layernorm", hidden, eps, placement),
        attention=attention(config, index, placement, qkv_bias, output_bias, head_norm),
        middle_norm=RMSNorm("post_attention_layernorm", hidden, eps, placement),
        mlp=mlp,
    )


def attention(
    config: ModelConfig,
    index: int,
    placement: Placement,
    qkv_bias: bool,
    output_bias: bool,
    head_norm: NormKind | None,
) -> SelfAttention:
    """The attention of layer `index`; `head_norm`: the kind of its QK norm, if it has one."""
    norm = None if head_norm is None else (head_norm, config.rms_norm_eps)
    return SelfAttention(
        index,
        hidden_size=config.hidden_size,
        heads=AttentionHeads(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            norm,
            neox_permutation(config.ropes[index], config.head_dim),
            config.sinks,
        ),
        bias=qkv_bias,
        output_bias=output_bias,
        placement=placement.submodule("self_attn."),
    )


def dense_mlp(
    config: ModelConfig, placement: Placement, bias: bool = False, merged: bool = False
) -> GatedMLP:
    """The gated block of a dense layer; merged: its gate and up are one on disk."""
    gate, within = GATED_ACTIVATIONS[config.activation], placement.submodule("mlp.")
    return GatedMLP(config.hidden_size, config.intermediate_size, bias, within, gate, merged)


def softmax_router(config: ModelConfig, placement: Placement) -> SoftmaxRouter:
    """The router of a sparse layer that chooses by probability."""
    return SoftmaxRouter(
        config.hidden_size,
        config.num_experts,
        config.num_experts_per_tok,
        config.norm_topk_prob,
        placement,
    )


def sparse_mlp(
    config: ModelConfig,
    placement: Placement,
    router: TopKRouter | None = None,
    shared: SharedExpert | None = None,
) -> SparseMoeBlock:
    """The mixture of a sparse layer; without `router` it chooses by probability."""
    size, within = config.moe_intermediate_size, placement.submodule("mlp.")
    experts = GatedExperts(config.hidden_size, size, config.num_experts, within)
    return SparseMoeBlock(router or softmax_router(config, placement), experts, placement, shared)


def shared_expert(
    config: ModelConfig, name: str, gated: bool, placement: Placement
) -> SharedExpert:
    """What all tokens of a sparse layer go to, called `name` on disk."""
    size, gate = config.shared_intermediate_size, GATED_ACTIVATIONS[config.activation]
    within = placement.without_deferred_sums().submodule(f"mlp.{name}.")
    mlp = GatedMLP(config.hidden_size, size, False, within, gate)
    return SharedExpert(name, mlp, gated, placement)
