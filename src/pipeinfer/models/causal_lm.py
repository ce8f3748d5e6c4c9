"""The decoder-only transformer that all architectures here are: embedding, layers, norm, head. And
the builders of all models.

- LanguageModel: what the engine calls, be it CausalLM or a model that transformers built.
- CausalLM, made of DecoderLayer or SandwichLayer. Architectures differ in the layers that they hand
  in; `sources` say which tensor of the checkpoint fills which parameter.
- `decoder_layer`, `sandwich_layer`, `attention`, `dense_mlp`, `sparse_mlp`...: parts that builders
  of architectures are made of, with the sizes of a ModelConfig.
- The builders say which decoder layers each architecture has. A builder allocates a model's
  parameters, loading.py fills them; ARCHITECTURES in checkpoint/config.py names the builder of each
  architecture:

    Llama       build_llama, build_mistral, build_mixtral
    Qwen        build_qwen2, build_qwen3, build_qwen2_moe, build_qwen3_moe
    GLM         build_glm, build_glm4, build_glm4_moe
    Gemma 3     build_gemma3
    gpt-oss     build_gpt_oss

Knows no cache, no request and no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, cast

import torch

from pipeinfer.checkpoint.config import ModelConfig
from pipeinfer.layers.attention import (
    Attend,
    AttentionHeads,
    Rope,
    Rotation,
    SelfAttention,
    neox_permutation,
)
from pipeinfer.layers.elementwise import (
    GATED_ACTIVATIONS,
    GEMMA_RMS_NORM,
    RMS_NORM,
    NormKind,
    RMSNorm,
)
from pipeinfer.layers.experts import ClampedExperts, GatedExperts
from pipeinfer.layers.linear import (
    Embedding,
    GatedMLP,
    LMHead,
    ScaledEmbedding,
    VocabParallelWeight,
)
from pipeinfer.layers.moe import (
    GroupedTopK,
    SharedExpert,
    SigmoidRouter,
    SoftmaxRouter,
    SparseMoeBlock,
    TopKRouter,
)
from pipeinfer.layers.placement import (
    IN_TORCH,
    ParameterMemory,
    PartialSum,
    Placement,
    WeightSource,
)
from pipeinfer.layers.weight import ActivationQuantizer, Activations
from pipeinfer.step import AttentionShape


class VocabShard(Protocol):
    """The ids whose logits one rank gives: start .. stop - 1 of `vocab_size`."""

    @property
    def vocab_size(self) -> int:
        """Ids of all ranks together."""
        ...

    @property
    def start(self) -> int:
        """First id of this rank."""
        ...

    @property
    def stop(self) -> int:
        """The id after this rank's last."""
        ...


class LanguageModel(Protocol):
    """A rank's share of a model, with its weights, in the interface that the engine calls."""

    @property
    def vocab_shard(self) -> VocabShard:
        """The ids of `local_logits`."""
        ...

    @property
    def capture_may_fail(self) -> bool:
        """Whether its steps may turn out to be no CUDA graph, which is no fault then."""
        ...

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        rows: torch.Tensor | None = None,
        /,
    ) -> torch.Tensor:
        """Hidden states [T, hidden], normed, for `logits`; or [L, hidden], of `rows` alone.

        - tokens, positions: int64 [T]
        - attend: called once in each layer
        - rows: int64 [L], which of the T tokens
        """
        ...

    def logits(self, hidden: torch.Tensor, /) -> torch.Tensor:
        """Logits [L, vocab_size] of hidden states [L, hidden]; the same on all ranks."""
        ...

    def local_logits(self, hidden: torch.Tensor, /) -> torch.Tensor:
        """The logits of this rank's ids, [L, stop - start]."""
        ...

    def attention_shapes(self) -> Sequence[AttentionShape]:
        """Returns the shape of this rank's heads in each layer."""
        ...


class FeedForward(Protocol):
    """A dense or a sparse MLP, [T, hidden] to [T, hidden]. input_quantizer: see Weight
    (layers/weight.py)."""

    @property
    def input_quantizer(self) -> ActivationQuantizer | None: ...

    def __call__(self, x: Activations) -> torch.Tensor | PartialSum: ...

    def pack(self, memory: ParameterMemory = IN_TORCH, /) -> None: ...

    def sources(self, prefix: str) -> Iterator[WeightSource]: ...


class Layer(Protocol):
    """A layer of the residual stream, called and filled as DecoderLayer is."""

    @property
    def attention(self) -> SelfAttention: ...

    @property
    def mlp(self) -> FeedForward: ...

    def __call__(
        self,
        x: torch.Tensor | PartialSum | None,
        residual: torch.Tensor,
        rotation: Rotation,
        attend: Attend,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | PartialSum, torch.Tensor]: ...

    def sources(self, prefix: str) -> Iterator[WeightSource]: ...


class TokenEmbedding(Protocol):
    """Ids int64 [T] to a new tensor [T, hidden], taken from `rows`."""

    rows: VocabParallelWeight

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class DecoderLayer:
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    input_norm: RMSNorm
    attention: SelfAttention
    pre_mlp_norm: RMSNorm
    mlp: FeedForward

    def __call__(
        self,
        x: torch.Tensor | PartialSum | None,
        residual: torch.Tensor,
        rotation: Rotation,
        attend: Attend,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | PartialSum, torch.Tensor]:
        """Returns (the sum that the next norm adds to the residual, the residual), [T, hidden]
        each.

        - x: to be added to the residual; None in the first layer
        - residual: changed in place
        - rows: int64 [L], the tokens whose values are wanted, in the last layer; the results are
          [L, hidden] then
        """
        normed, residual = self.input_norm.add_norm(x, residual, self.attention.input_quantizer)
        x = self.attention(normed, rotation, attend, rows)
        if rows is not None:
            residual = residual[rows]
        normed, residual = self.pre_mlp_norm.add_norm(x, residual, self.mlp.input_quantizer)
        return self.mlp(normed), residual

    def sources(self, prefix: str) -> Iterator[WeightSource]:
        """Yields the sources of the layer's weights. prefix: the layer's path in the checkpoint,
        with a dot at its end.
        """
        yield from self.input_norm.sources(prefix)
        yield from self.attention.sources(f"{prefix}self_attn.")
        yield from self.pre_mlp_norm.sources(prefix)
        yield from self.mlp.sources(f"{prefix}mlp.")


class CausalLM:
    """A LanguageModel of layers.

    Attributes:
    - config: sizes, RoPE and windows
    - layers: of the residual stream
    - embedding, norm, head: before and behind the layers; a tied head has the embedding's rows
    - ropes: the different ones; layers with the same RoPE share its rotation
    """

    capture_may_fail = False

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[Layer],
        placement: Placement,
        norm_kind: NormKind = RMS_NORM,
        embed: Callable[[VocabParallelWeight, Placement], TokenEmbedding] = Embedding,
    ) -> None:
        """Model that is not filled yet.

        - config: of the model
        - layers: decoder layers
        - placement: of this rank's share
        - norm_kind: of the last norm
        - embed: makes the embedding from its rows
        """
        self.config = config
        self.layers = layers
        size = (config.vocab_size, config.hidden_size)
        rows = VocabParallelWeight("embed_tokens", *size, placement)
        self.embedding = embed(rows, placement)
        tied = config.tie_word_embeddings
        self.head = LMHead(
            rows if tied else VocabParallelWeight("lm_head", *size, placement, looked_up=False),
            placement,
        )
        self.norm = RMSNorm("norm", config.hidden_size, config.rms_norm_eps, placement, norm_kind)
        different = list(dict.fromkeys(config.ropes))
        self.ropes = [
            Rope(rope, config.head_dim, placement.dtype, placement.device, config.context_length)
            for rope in different
        ]
        self._rope_of_layer = [different.index(rope) for rope in config.ropes]
        self._adapters, self._memory = placement.adapters, placement.memory

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes hidden states, see LanguageModel. For tokens that are not in `rows` the last
        layer computes keys and values only, unless some have an adapter, which goes by the number
        of the token.
        """
        narrowed = None if self._adapters is not None and self._adapters.active else rows
        rotations = [rope(positions) for rope in self.ropes]
        residual = self.embedding(tokens)
        x = None
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            rotation = rotations[self._rope_of_layer[index]]
            x, residual = layer(x, residual, rotation, attend, narrowed if index == last else None)
        hidden = self.norm.add_norm(x, residual)[0]
        return hidden if rows is None or narrowed is not None else hidden[rows]

    @property
    def vocab_shard(self) -> VocabShard:
        """The ids of `local_logits`."""
        return self.head.rows

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [L, vocab_size], in the model's dtype, of hidden states [L, hidden]."""
        return self.head(hidden)

    def local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits of this rank's ids, [L, stop - start], from id `vocab_shard.start` on."""
        return self.head.local_logits(hidden)

    def attention_shapes(self) -> list[AttentionShape]:
        """Returns the shape of this rank's heads in each layer."""
        return [
            AttentionShape(
                layer.attention.num_heads,
                layer.attention.num_kv_heads,
                layer.attention.head_dim,
                self.config.attention_scale or layer.attention.head_dim**-0.5,
                window,
                layer.attention.sinks,
            )
            for layer, window in zip(self.layers, self.config.sliding_windows, strict=True)
        ]

    def pack(self) -> None:
        """Lays the weights out for speed. They are final then: `sources` may not be used any more.

        A tied embedding stays beside the head's packed copy of it.
        """
        for layer in self.layers:
            layer.attention.pack(self._memory)
            layer.mlp.pack(self._memory)
        self.head.rows.weight.pack(self._memory)

    def sources(self) -> Iterator[WeightSource]:
        """Every parameter, with the tensor of the checkpoint that fills it."""
        yield from self.embedding.rows.sources("model.")
        for index, layer in enumerate(self.layers):
            yield from layer.sources(f"model.layers.{index}.")
        yield from self.norm.sources("model.")
        if not self.config.tie_word_embeddings:
            yield from self.head.rows.sources("")


@dataclass(frozen=True)
class SandwichLayer:
    """Attention and feed-forward, each between two norms: the second norm comes before the addition
    to the residual stream, so it needs sums over all ranks, and both blocks are built with
    `Placement.without_deferred_sums`.
    """

    input_norm: RMSNorm
    attention: SelfAttention
    post_attention_norm: RMSNorm
    pre_mlp_norm: RMSNorm
    mlp: FeedForward
    post_mlp_norm: RMSNorm

    def __call__(
        self,
        x: torch.Tensor | PartialSum | None,
        residual: torch.Tensor,
        rotation: Rotation,
        attend: Attend,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes the layer, see DecoderLayer."""
        normed, residual = self.input_norm.add_norm(x, residual, self.attention.input_quantizer)
        x = self.post_attention_norm(
            cast(torch.Tensor, self.attention(normed, rotation, attend, rows))
        )
        if rows is not None:
            residual = residual[rows]
        normed, residual = self.pre_mlp_norm.add_norm(x, residual, self.mlp.input_quantizer)
        return self.post_mlp_norm(cast(torch.Tensor, self.mlp(normed))), residual

    def sources(self, prefix: str) -> Iterator[WeightSource]:
        """Yields the sources of the layer's weights. prefix: the layer's path in the checkpoint,
        with a dot at its end.
        """
        for norm in (
            self.input_norm,
            self.post_attention_norm,
            self.pre_mlp_norm,
            self.post_mlp_norm,
        ):
            yield from norm.sources(prefix)
        yield from self.attention.sources(f"{prefix}self_attn.")
        yield from self.mlp.sources(f"{prefix}mlp.")


def sandwich_layer(
    config: ModelConfig,
    attention: SelfAttention,
    mlp: FeedForward,
    names: tuple[str, str, str],
    kind: NormKind,
    placement: Placement,
) -> SandwichLayer:
    """A layer with norms on both sides.

    - names: on disk, of the norms behind attention, before and behind the feed-forward block
    - kind: of all its norms
    """

    def norm(name: str) -> RMSNorm:
        return RMSNorm(name, config.hidden_size, config.rms_norm_eps, placement, kind)

    post_attention, pre_mlp, post_mlp = map(norm, names)
    return SandwichLayer(norm("input_layernorm"), attention, post_attention, pre_mlp, mlp, post_mlp)


def each_layer(config: ModelConfig, placement: Placement) -> Iterator[tuple[int, Placement]]:
    """The number of each layer, with the placement within that layer."""
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
    """Layer number `index` with pre-norms; its parts are named on disk as Llama's are."""
    hidden, eps = config.hidden_size, config.rms_norm_eps
    head_norm = RMS_NORM if qk_norm else None
    return DecoderLayer(
        input_norm=RMSNorm("input_layernorm", hidden, eps, placement),
        attention=attention(config, index, placement, qkv_bias, output_bias, head_norm),
        pre_mlp_norm=RMSNorm("post_attention_layernorm", hidden, eps, placement),
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
    """The attention of layer number `index`. head_norm: the kind of its QK norm, if it has one."""
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
    """The gated MLP of a dense layer. merged: gate and up are one tensor on disk."""
    gate, within = GATED_ACTIVATIONS[config.activation], placement.submodule("mlp.")
    return GatedMLP(config.hidden_size, config.intermediate_size, bias, within, gate, merged)


def softmax_router(config: ModelConfig, placement: Placement) -> SoftmaxRouter:
    """A router that chooses experts by probability."""
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
    """The mixture of experts of a sparse layer.

    - router: by default one that chooses by probability
    - shared: an expert for all tokens
    """
    size, within = config.moe_intermediate_size, placement.submodule("mlp.")
    experts = GatedExperts(config.hidden_size, size, config.num_experts, within)
    return SparseMoeBlock(router or softmax_router(config, placement), experts, placement, shared)


def shared_expert(
    config: ModelConfig, name: str, gated: bool, placement: Placement
) -> SharedExpert:
    """The expert of a sparse layer that all tokens go to.

    - name: on disk
    - gated: the expert has a gate of its own
    """
    size, gate = config.shared_intermediate_size, GATED_ACTIVATIONS[config.activation]
    within = placement.without_deferred_sums().without_adapters().submodule(f"mlp.{name}.")
    mlp = GatedMLP(config.hidden_size, size, False, within, gate)
    return SharedExpert(name, mlp, gated, placement)


def _decoder_model(
    config: ModelConfig,
    placement: Placement,
    mlp: Callable[[int, Placement], FeedForward],
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_norm: bool = False,
) -> CausalLM:
    """Builds a model of decoder layers like Llama's. mlp(index, placement): makes the MLP of one
    layer.
    """
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
    """Qwen2-MoE: Qwen2 with a mixture of experts beside an expert for all tokens, which has a gate
    of its own (https://arxiv.org/abs/2407.10671).
    """
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
    """GLM-4.5 and after: mixtures whose experts are chosen in groups, beside an expert for all
    tokens. The first layers are dense, and half of each head is rotated. The layer after the last,
    which drafts, is left out. Source: https://arxiv.org/abs/2508.06471
    """
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
