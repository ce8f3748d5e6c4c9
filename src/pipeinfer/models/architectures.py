"""The builders of all models: which decoder layers each architecture has.

    Llama       build_llama, build_mistral, build_mixtral
    Qwen        build_qwen2, build_qwen3, build_qwen2_moe, build_qwen3_moe
    GLM         build_glm, build_glm4, build_glm4_moe
    Gemma 3     build_gemma3
    gpt-oss     build_gpt_oss

A builder allocates a model's parameters, loading.py fills them. Blocks of layers are in
causal_lm.py; ARCHITECTURES in checkpoint/config.py names the builder of each architecture.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pipeinfer.checkpoint.config import ModelConfig
from pipeinfer.layers.elementwise import GEMMA_RMS_NORM, RMS_NORM
from pipeinfer.layers.experts import ClampedExperts
from pipeinfer.layers.linear import ScaledEmbedding
from pipeinfer.layers.moe import GroupedTopK, SigmoidRouter, SoftmaxRouter, SparseMoeBlock
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


def _decoder_model(
    config: ModelConfig,
    placement: Placement,
    mlp: Callable[[int, Placement], FeedForward],
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_norm: bool = False,
) -> CausalLM:
    """Of decoder layers as Llama has them; mlp(index, placement): of one layer."""
    layers = [
        decoder_layer(
            config,
            index,
            at,
            mlp(index, at),
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            qk_norm=qk_norm,
        )
        for index, at in each_layer(config, placement)
    ]
    return CausalLM(config, layers, placement)


def build_llama(config: ModelConfig, placement: Placement) -> CausalLM:
    """Llama 1 to 3: biases only where config.json asks for them, then on all four projections."""
    return _decoder_model(
        config,
        placement,
        lambda _, at: dense_mlp(config, at, bias=config.mlp_bias),
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
    )


def build_mistral(config: ModelConfig, placement: Placement) -> CausalLM:
    """Mistral: no biases, and one sliding window for all layers or none."""
    return _decoder_model(config, placement, lambda _, at: dense_mlp(config, at))


def build_mixtral(config: ModelConfig, placement: Placement) -> CausalLM:
    """Mixtral: Mistral with a mixture of experts in every layer (https://arxiv.org/abs/2401.04088).

    A sliding window is the exception. Names of experts in files: checkpoint/files.py.
    """
    return _decoder_model(config, placement, lambda _, at: sparse_mlp(config, at))


def build_qwen2(config: ModelConfig, placement: Placement) -> CausalLM:
    """Qwen2 and Qwen2.5: biases on Q, K and V, never on the output; windows by layer."""
    return _decoder_model(config, placement, lambda _, at: dense_mlp(config, at), qkv_bias=True)


def build_qwen3(config: ModelConfig, placement: Placement) -> CausalLM:
    """Qwen3: a norm on each query and key head before RoPE, and a head size of its own."""
    return _decoder_model(
        config,
        placement,
        lambda _, at: dense_mlp(config, at),
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        qk_norm=True,
    )


def build_qwen2_moe(config: ModelConfig, placement: Placement) -> CausalLM:
    """Qwen2-MoE: Qwen2 with a mixture of experts beside an expert that all tokens go to, which has
    a gate of its own (https://arxiv.org/abs/2407.10671)."""
    return _decoder_model(
        config,
        placement,
        lambda index, at: _qwen2_moe_mlp(config, index, at),
        qkv_bias=config.attention_bias,
    )


def _qwen2_moe_mlp(config: ModelConfig, index: int, placement: Placement) -> FeedForward:
    if not config.sparse_layers[index]:
        return dense_mlp(config, placement)
    shared = shared_expert(config, "shared_expert", gated=True, placement=placement)
    return sparse_mlp(config, placement, shared=shared)


def build_qwen3_moe(config: ModelConfig, placement: Placement) -> CausalLM:
    """Qwen3 with mixtures of experts in the layers that config.json calls sparse."""
    return _decoder_model(
        config,
        placement,
        lambda index, at: _qwen3_moe_mlp(config, index, at),
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        qk_norm=True,
    )


def _qwen3_moe_mlp(config: ModelConfig, index: int, placement: Placement) -> FeedForward:
    if not config.sparse_layers[index]:
        return dense_mlp(config, placement)
    return sparse_mlp(config, placement)


def build_glm(config: ModelConfig, placement: Placement) -> CausalLM:
    """The first GLM-4 (glm-4-9b): Llama's layers with the biases and the RoPE of GLM-4
    (https://arxiv.org/abs/2406.12793)."""
    return _decoder_model(
        config,
        placement,
        lambda _, at: dense_mlp(config, at, merged=True),
        qkv_bias=config.attention_bias,
    )


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
    last, which drafts, is left out. Source: https://arxiv.org/abs/2508.06471"""
    return _decoder_model(
        config,
        placement,
        lambda index, at: _glm4_moe_mlp(config, index, at),
        qkv_bias=config.attention_bias,
        qk_norm=config.qk_norm,
    )


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


GEMMA3_NORMS = (
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def build_gemma3(config: ModelConfig, placement: Placement) -> CausalLM:
    """Gemma 3 (text): norms around attention and MLP, five layers with a window to each without.

    Every norm multiplies by one plus its weight, embeddings are scaled by the root of their size,
    and layers with a window rotate by a RoPE of their own. Source: https://arxiv.org/abs/2503.19786
    """
    every = each_layer(config, placement.without_deferred_sums())
    layers = [_gemma3_layer(config, index, at) for index, at in every]
    embed = partial(ScaledEmbedding, scale=config.hidden_size**0.5)
    return CausalLM(config, layers, placement, GEMMA_RMS_NORM, embed)


def _gemma3_layer(config: ModelConfig, index: int, placement: Placement) -> SandwichLayer:
    bias = config.attention_bias
    return sandwich_layer(
        config,
        attention(config, index, placement, bias, bias, GEMMA_RMS_NORM),
        dense_mlp(config, placement),
        GEMMA3_NORMS,
        GEMMA_RMS_NORM,
        placement,
    )


def build_gpt_oss(config: ModelConfig, placement: Placement) -> CausalLM:
    """gpt-oss: attention with sinks, a window in each second layer, and experts with bounds and
    biases. Source: https://arxiv.org/abs/2508.10925"""
    return _decoder_model(
        config,
        placement,
        lambda _, at: _gpt_oss_mlp(config, at),
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
    )


def _gpt_oss_mlp(config: ModelConfig, placement: Placement) -> SparseMoeBlock:
    hidden, experts = config.hidden_size, config.num_experts
    top_k = config.num_experts_per_tok
    router = SoftmaxRouter(hidden, experts, top_k, True, placement, name="router", bias=True)
    size = config.moe_intermediate_size
    within = placement.submodule("mlp.")
    clamped = ClampedExperts(hidden, size, experts, config.swiglu, within)
    return SparseMoeBlock(router, clamped, placement)
