"""A checkpoint's configuration: config.json and generation_config.json as frozen dataclasses.

- ModelConfig: of a model that pipeinfer builds; FAMILIES has how each architecture reads the fields
  that architectures disagree on (sliding windows, defaults, names).
- RopeConfig: its RoPE, from `rope_parameters`, or from `rope_scaling` and `rope_theta`. Most models
  have one for all layers; some have one for layers with a sliding window and one for the others.
  layers/attention.py computes with the numbers.
- ModelOutline: of any model, also of one that transformers builds.
- GenerationDefaults: defaults of sampling.

Files of transformers 4 and 5 are read. Imports no torch, because the tokenizer and the gateway read
configurations, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from pipeinfer.checkpoint.files import Fields, read_json
from pipeinfer.checkpoint.quantization import Quantization, read_quantization
from pipeinfer.gguf.header import is_gguf
from pipeinfer.params import JsonObject
from pipeinfer.settings import ConfigurationError

# The RoPE of a gpt-oss file that has no object about it.
GPT_OSS_ROPE: JsonObject = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}


def read_rope(
    fields: Fields, theta: float = 10_000.0, missing: JsonObject | None = None
) -> RopeConfig:
    """The RoPE of a model that rotates whole heads.

    - theta: default of rope_theta
    - missing: the object about RoPE if the file has none; None: an empty one

    Raises ConfigurationError for an unknown type, a missing number, or a partial rotation.
    """
    rope = _rope_fields(fields)
    if not rope.raw and missing is not None:
        rope = Fields(fields.path, missing)
    partial = _partial(fields, rope)
    if partial not in (None, 1, 1.0):
        raise fields.error(f"partial_rotary_factor {partial!r} is not supported")
    return _read(fields, rope, theta)


def read_partial_rope(fields: Fields, interleaved: bool) -> RopeConfig:
    """The RoPE of a model that rotates the first part of each head; without partial_rotary_factor,
    half of it.

    - interleaved: as in RopeConfig

    Raises ConfigurationError as `read_rope` does, and for a factor above 1.
    """
    rope = _rope_fields(fields)
    given = Fields(fields.path, {"partial_rotary_factor": _partial(fields, rope)})
    rotary = given.number("partial_rotary_factor", 0.5)
    if rotary > 1:
        raise fields.error(f"partial_rotary_factor {rotary!r} is above 1")
    return replace(_read(fields, rope, 10_000.0), rotary=rotary, interleaved=interleaved)


def _partial(fields: Fields, rope: Fields) -> object:
    return rope.raw.get("partial_rotary_factor", fields.raw.get("partial_rotary_factor"))


def _read(fields: Fields, rope: Fields, theta: float) -> RopeConfig:
    kind = rope.raw.get("rope_type") or rope.raw.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise fields.error(f"unknown RoPE type {kind!r}; supported: {', '.join(ROPE_TYPES)}")
    theta = rope.number("rope_theta", fields.number("rope_theta", theta))
    limit = fields.integer("max_position_embeddings")
    if kind == "default":
        return RopeConfig(theta=theta, original_max=limit)
    factor = rope.number("factor")
    if kind in ("linear", "dynamic"):
        return RopeConfig(type=kind, theta=theta, factor=factor, original_max=limit)
    original = fields.integer(
        "original_max_position_embeddings",
        rope.integer("original_max_position_embeddings", limit),
    )
    scaled = RopeConfig(type=kind, theta=theta, factor=factor, original_max=original)
    return _llama3(rope, scaled) if kind == "llama3" else _yarn(rope, scaled)


def read_two_ropes(fields: Fields) -> tuple[RopeConfig, RopeConfig]:
    """Returns (RoPE of layers without a window, RoPE of layers with one), each of type "default" or
    "linear".

    Files of transformers 5 have an object for each in `rope_parameters`. Older ones have
    `rope_theta` and `rope_scaling` for the first, `rope_local_base_freq` for the second.
    max_position_embeddings includes the scaling already. Raises ConfigurationError as `read_rope`
    does.
    """
    both = fields.raw.get("rope_parameters") or {}
    if not isinstance(both, dict) or not all(isinstance(one, dict) for one in both.values()):
        raise fields.error("rope_parameters must have an object for each layer type")
    scaling = fields.raw.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise fields.error(f"rope_scaling must be an object, not {scaling!r}")
    full = Fields(fields.path, (both.get("full_attention") or {}) | scaling)
    sliding = Fields(fields.path, both.get("sliding_attention") or {})
    limit = fields.integer("max_position_embeddings")
    return (
        _plain_or_linear(full, fields.number("rope_theta", 1_000_000.0), limit),
        _plain_or_linear(sliding, fields.number("rope_local_base_freq", 10_000.0), limit),
    )


def _plain_or_linear(rope: Fields, theta: float, limit: int) -> RopeConfig:
    kind = rope.raw.get("rope_type") or rope.raw.get("type") or "default"
    theta = rope.number("rope_theta", theta)
    if kind == "default":
        return RopeConfig(theta=theta, original_max=limit)
    if kind != "linear":
        raise rope.error(f"RoPE type {kind!r} by layer type is not supported, only default, linear")
    factor = rope.number("factor")
    return RopeConfig(type="linear", theta=theta, factor=factor, original_max=int(limit / factor))


def _llama3(rope: Fields, scaled: RopeConfig) -> RopeConfig:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.error(f"high_freq_factor {high} must be above low_freq_factor {low}")
    return replace(scaled, low_freq=low, high_freq=high)


def _yarn(rope: Fields, scaled: RopeConfig) -> RopeConfig:
    return replace(
        scaled,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.boolean("truncate", True),
        attention_factor=_yarn_attention_factor(rope, scaled.factor),
    )


def _rope_fields(fields: Fields) -> Fields:
    """The object about RoPE, empty if there is none. `rope_scaling` wins over `rope_parameters`, as
    in transformers.
    """
    name = "rope_scaling" if fields.raw.get("rope_scaling") else "rope_parameters"
    raw = fields.raw.get(name) or {}
    if not isinstance(raw, dict):
        raise fields.error(f"{name} must be an object, not {raw!r}")
    if any(isinstance(value, dict) for value in raw.values()):
        raise fields.error("rope_parameters that differ between layers are not supported")
    return Fields(fields.path, raw)


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    """The factor of cos and sin. Source: https://arxiv.org/abs/2309.00071, eq. 22."""
    if rope.raw.get("attention_factor") is not None:
        return rope.number("attention_factor")

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.raw.get("mscale") and rope.raw.get("mscale_all_dim"):
        return scale(rope.number("mscale")) / scale(rope.number("mscale_all_dim"))
    return scale(1.0)


RopeType = Literal["default", "linear", "dynamic", "yarn", "llama3"]
ROPE_TYPES: tuple[str, ...] = get_args(RopeType)


@dataclass(frozen=True)
class RopeConfig:
    """The parameters of a rotary position embedding (RoPE).

    Attributes:
    - type: of the scaling
    - theta: base of the frequencies
    - factor: by which the context is extended; for all types but "default"
    - original_max: context length of the pretraining, before any scaling, in tokens
    - low_freq, high_freq: low_freq_factor and high_freq_factor, for "llama3"
    - beta_fast, beta_slow, truncate: fields of config.json with these names, for "yarn"
    - attention_factor: factor of cos and sin, for "yarn"
    - rotary: the share of a head that is rotated, from its first value on
    - interleaved: which values form a pair in the checkpoint's matrices. True: values 2 i and 2 i +
      1; False: values i and i + half of the rotated ones
    """

    type: RopeType = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max: int = 0
    low_freq: float = 1.0
    high_freq: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    rotary: float = 1.0
    interleaved: bool = False

    def rotated(self, head_dim: int) -> int:
        """The number of values of a head that are rotated."""
        return int(head_dim * self.rotary)


DTYPES = ("float32", "bfloat16", "float16")
SLIDING, FULL = "sliding_attention", "full_attention"  # values of layer_types


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer that pipeinfer builds itself. Sizes are those of the whole model,
    before it is split over ranks.

    Attributes:
    - architecture: name in config.json, of ARCHITECTURES
    - vocab_size: rows of the embedding, and width of the logits
    - hidden_size: of the residual stream
    - intermediate_size: of a dense MLP
    - num_layers, num_heads, num_kv_heads, head_dim: of layers and their attention
    - rms_norm_eps: of all RMS norms
    - tie_word_embeddings: whether the embedding is the output matrix, too
    - attention_bias, mlp_bias: as in config.json; the builder decides which projections have them
    - rope: of all layers; if `window_rope` is given, of the layers without a sliding window
    - max_position_embeddings: tokens, as in config.json; see `context_length`
    - sliding_windows: per layer, tokens that a query sees, itself included; None: all up to itself
    - dtype: of the weights, of DTYPES
    - eos_ids: of config.json alone; GenerationDefaults has those of generation_config.json, too
    - num_experts: of a mixture of experts; 0: all layers are dense
    - num_experts_per_tok: experts that a token is routed to
    - moe_intermediate_size: of one expert
    - norm_topk_prob: whether the weights of a token's experts are normalized to a sum of 1
    - sparse_layers: per layer, whether its MLP is a mixture of experts; empty: none is
    - activation: of the MLP's gate, "silu" or "gelu_tanh"
    - window_rope: of the layers with a sliding window; None: `rope`
    - attention_scale: factor of the attention scores; None: head_dim ** -0.5
    - shared_intermediate_size: of the shared expert of a sparse layer; 0: there is none
    - qk_norm: whether queries and keys are normalized, for architectures whose config.json decides
      that
    - expert_groups, top_expert_groups, routed_scale: groups, top_groups and scale of GroupedTopK in
      layers/moe.py
    - swiglu: slope and limit of ClampedExperts in layers/experts.py
    - sinks: whether attention has sinks, see AttentionShape
    - quantization: of the weight matrices; None: they are unquantized
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    rope: RopeConfig
    max_position_embeddings: int
    sliding_windows: tuple[int | None, ...]
    dtype: str
    eos_ids: tuple[int, ...] = ()
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    sparse_layers: tuple[bool, ...] = ()
    activation: str = "silu"
    window_rope: RopeConfig | None = None
    attention_scale: float | None = None
    shared_intermediate_size: int = 0
    qk_norm: bool = False
    expert_groups: int = 1
    top_expert_groups: int = 1
    routed_scale: float = 1.0
    swiglu: tuple[float, float] = (1.0, inf)
    sinks: bool = False
    quantization: Quantization | None = None

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The RoPE of each layer."""
        windowed = self.window_rope or self.rope
        return tuple(self.rope if one is None else windowed for one in self.sliding_windows)

    @property
    def context_length(self) -> int:
        """The most tokens of a sequence, with RoPE scaling."""
        limit = self.max_position_embeddings
        if self.window_rope is not None:  # such files have the scaled limit
            return limit
        if self.rope.type in ("linear", "dynamic"):
            return int(limit * self.rope.factor)
        if self.rope.type == "yarn":
            return max(limit, int(self.rope.original_max * self.rope.factor))
        return limit


@dataclass(frozen=True)
class Activations:
    """The activation functions that an architecture may name.

    Attributes:
    - field: the field of config.json
    - name: ModelConfig.activation for each of `values`
    - values: supported values of the field; the first one is the default
    """

    field: str
    name: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Family:
    """How one architecture reads the fields that architectures disagree on.

    Attributes:
    - windows: from (fields, number of layers) to ModelConfig.sliding_windows
    - missing: defaults of fields, by name, as in transformers' configuration class
    - head_dim: default of head_dim; None: hidden_size / num_attention_heads
    - bias: the name of the field for the attention's bias, and its default
    - tied: default of tie_word_embeddings
    - activations: possible activations
    - rope: reads ModelConfig.rope
    - extra_fields: from (fields, number of layers) to further fields of the ModelConfig, by name
    """

    windows: Callable[[Fields, int], tuple[int | None, ...]]
    missing: Mapping[str, Any] = field(default_factory=dict)
    head_dim: int | None = None
    bias: tuple[str, bool] = ("attention_bias", False)
    tied: bool = False
    activations: Activations = Activations("hidden_act", "silu", ("silu", "swish"))
    rope: Callable[[Fields], RopeConfig] = read_rope
    extra_fields: Callable[[Fields, int], Mapping[str, Any]] = lambda fields, layers: {}


def _full_attention(fields: Fields, layers: int) -> tuple[int | None, ...]:
    return (None,) * layers


def _one_window(fields: Fields, layers: int, missing: int | None = 4096) -> tuple[int | None, ...]:
    return (fields.optional_integer("sliding_window", missing),) * layers


def _switched_window(fields: Fields, layers: int) -> tuple[int | None, ...]:
    if not fields.boolean("use_sliding_window", False):
        return (None,) * layers
    return _one_window(fields, layers)


def _layered_window(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Reads the windows: `layer_types` lists the layers with the window. In older files without
    this field, all layers from `max_window_layers` on have it.
    """
    window = _switched_window(fields, layers)[0]
    types = fields.raw.get("layer_types")
    if types is None:
        first = fields.integer("max_window_layers", 28, least=0)
        types = [SLIDING if i >= first else FULL for i in range(layers)]
    return _by_type(fields, types, layers, window)


def _alternating_window(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Reads the windows: `layer_types` lists the layers with the window; without the field, layers
    0, 2, 4 ... below `max_window_layers` have it.
    """
    window = _switched_window(fields, layers)[0]
    types = fields.raw.get("layer_types")
    if types is None:
        end = fields.integer("max_window_layers", 28, least=0)
        types = [SLIDING if i < end and i % 2 == 0 else FULL for i in range(layers)]
    return _by_type(fields, types, layers, window)


def _every_second_window(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Reads the windows: `layer_types` lists the layers with the window; without the field, layers
    0, 2, 4 ... have it.
    """
    window = fields.optional_integer("sliding_window", missing=128)
    types = fields.raw.get("layer_types")
    types = [FULL if i % 2 else SLIDING for i in range(layers)] if types is None else types
    return _by_type(fields, types, layers, window)


def _patterned_window(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Reads the windows: `layer_types` lists the layers with the window. In older files without
    this field, all layers but each `sliding_window_pattern`-th have it.
    """
    window = fields.optional_integer("sliding_window", missing=4096)
    if window is None:
        raise fields.error("sliding_window is null")
    types = fields.raw.get("layer_types")
    if types is None:
        every = fields.integer("sliding_window_pattern", 6)
        types = [SLIDING if (i + 1) % every else FULL for i in range(layers)]
    return _by_type(fields, types, layers, window)


def _by_type(
    fields: Fields, types: list[str], layers: int, window: int | None
) -> tuple[int | None, ...]:
    if len(types) != layers:
        raise fields.error(f"layer_types has {len(types)} entries for {layers} layers")
    for kind in types:
        if kind not in (SLIDING, FULL):
            raise fields.error(f"layer type {kind!r} is not supported")
    return tuple(window if kind == SLIDING else None for kind in types)


def _gemma3(fields: Fields, layers: int) -> dict[str, Any]:
    """The RoPE of layers with a window, and the scale of attention. Raises ConfigurationError for
    features that are not implemented.
    """
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        if fields.raw.get(name) is not None:
            raise fields.error(f"{name} {fields.raw[name]!r} is not supported, only null")
    if fields.boolean("use_bidirectional_attention", False):
        raise fields.error("use_bidirectional_attention is not supported")
    return {
        "window_rope": read_two_ropes(fields)[1],
        "attention_scale": fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
    }


def _missing(
    context: int, kv_heads: int | None = None, rms_norm_eps: float = 1e-6
) -> Mapping[str, Any]:
    """Defaults of fields, for Family.missing. kv_heads: None: as many as attention heads."""
    found = {"max_position_embeddings": context, "rms_norm_eps": rms_norm_eps}
    return found if kv_heads is None else {**found, "num_key_value_heads": kv_heads}


class ExpertFields(TypedDict, total=False):
    """The fields of a ModelConfig that mixtures of experts have."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    sparse_layers: tuple[bool, ...]
    shared_intermediate_size: int
    qk_norm: bool
    expert_groups: int
    top_expert_groups: int
    routed_scale: float
    swiglu: tuple[float, float]
    sinks: bool


def qwen_experts(fields: Fields, layers: int, chosen: int = 8) -> ExpertFields:
    """Reads the experts of Qwen3-MoE. Files of transformers 5 call num_experts num_local_experts.

    - chosen: default of num_experts_per_tok
    """
    experts = fields.integer("num_experts", fields.integer("num_local_experts", 0, least=0))
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.raw.get("mlp_only_layers") or []
    return {
        "num_experts": experts,
        "num_experts_per_tok": _chosen(fields, experts, chosen),
        "moe_intermediate_size": fields.integer("moe_intermediate_size"),
        "norm_topk_prob": fields.boolean("norm_topk_prob", False),
        "sparse_layers": tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
    }


def qwen2_experts(fields: Fields, layers: int) -> ExpertFields:
    """Reads the experts of Qwen2-MoE: those of `qwen_experts`, and a shared expert."""
    size = fields.integer("shared_expert_intermediate_size", 5632)
    return {**qwen_experts(fields, layers, chosen=4), "shared_intermediate_size": size}


def mixtral_experts(fields: Fields, layers: int) -> ExpertFields:
    """Reads the experts of Mixtral: every layer is sparse, and `intermediate_size` is that of an
    expert.
    """
    experts = fields.integer("num_local_experts", 8)
    return {
        "num_experts": experts,
        "num_experts_per_tok": _chosen(fields, experts, 2),
        "moe_intermediate_size": fields.integer("intermediate_size"),
        "norm_topk_prob": True,
        "sparse_layers": (True,) * layers,
    }


def glm4_experts(fields: Fields, layers: int) -> ExpertFields:
    """Reads the experts of GLM-4-MoE: grouped top-k, shared experts, dense layers at the beginning.
    Raises ConfigurationError if groups and experts do not fit.
    """
    experts, (groups, top_groups) = fields.integer("n_routed_experts", 128), _groups(fields)
    if experts % groups or (groups > 1 and experts < 2 * groups):
        raise fields.error(f"n_group {groups} does not fit n_routed_experts {experts}")
    size = fields.integer("moe_intermediate_size")
    first = fields.integer("first_k_dense_replace", 1, least=0)
    return {
        "num_experts": experts,
        "num_experts_per_tok": _chosen(fields, experts // groups * top_groups, 8),
        "moe_intermediate_size": size,
        "norm_topk_prob": fields.boolean("norm_topk_prob", True),
        "sparse_layers": tuple(i >= first for i in range(layers)),
        "shared_intermediate_size": size * fields.integer("n_shared_experts", 1, least=0),
        "qk_norm": fields.boolean("use_qk_norm", False),
        "expert_groups": groups,
        "top_expert_groups": top_groups,
        "routed_scale": fields.number("routed_scaling_factor", 1.0),
    }


def gpt_oss_experts(fields: Fields, layers: int) -> ExpertFields:
    """Reads the experts of gpt-oss: like Mixtral's, with clamped activations, and with attention
    sinks.
    """
    return {
        "num_experts": (experts := fields.integer("num_local_experts", 128)),
        "num_experts_per_tok": _chosen(fields, experts, 4),
        "moe_intermediate_size": fields.integer("intermediate_size"),
        "norm_topk_prob": True,
        "sparse_layers": (True,) * layers,
        "swiglu": (fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0)),
        "sinks": True,
    }


def _groups(fields: Fields) -> tuple[int, int]:
    groups, top_groups = fields.integer("n_group", 1), fields.integer("topk_group", 1)
    if top_groups > groups:
        raise fields.error(f"topk_group {top_groups} is above n_group {groups}")
    return groups, top_groups


def _chosen(fields: Fields, among: int, default: int) -> int:
    chosen = fields.integer("num_experts_per_tok", default)
    if chosen > among:
        raise fields.error(f"num_experts_per_tok {chosen} is above num_experts {among}")
    return chosen


GLM = Family(
    _full_attention,
    _missing(131_072, kv_heads=2, rms_norm_eps=1.5625e-7),
    head_dim=128,
    bias=("attention_bias", True),
    rope=partial(read_partial_rope, interleaved=True),
)
FAMILIES = {
    "Gemma3ForCausalLM": Family(
        _patterned_window,
        _missing(131_072, kv_heads=4),
        head_dim=256,
        tied=True,
        activations=Activations("hidden_activation", "gelu_tanh", ("gelu_pytorch_tanh",)),
        rope=lambda fields: read_two_ropes(fields)[0],
        extra_fields=_gemma3,
    ),
    "Glm4ForCausalLM": GLM,
    "Glm4MoeForCausalLM": Family(
        _full_attention,
        _missing(131_072, kv_heads=8, rms_norm_eps=1e-5),
        rope=partial(read_partial_rope, interleaved=False),
        extra_fields=glm4_experts,
    ),
    "GlmForCausalLM": GLM,
    "GptOssForCausalLM": Family(
        _every_second_window,
        _missing(131_072, kv_heads=8, rms_norm_eps=1e-5),
        head_dim=64,
        bias=("attention_bias", True),
        rope=partial(read_rope, theta=150_000.0, missing=GPT_OSS_ROPE),
        extra_fields=gpt_oss_experts,
    ),
    "LlamaForCausalLM": Family(_full_attention, _missing(2_048)),
    "MistralForCausalLM": Family(_one_window, _missing(131_072, kv_heads=8)),
    "MixtralForCausalLM": Family(
        partial(_one_window, missing=None),
        _missing(131_072, kv_heads=8, rms_norm_eps=1e-5),
        rope=partial(read_rope, theta=1e6),
        extra_fields=mixtral_experts,
    ),
    "Qwen2ForCausalLM": Family(_layered_window, _missing(32_768, kv_heads=32)),
    "Qwen2MoeForCausalLM": Family(
        _alternating_window,
        _missing(32_768, kv_heads=16),
        bias=("qkv_bias", True),
        extra_fields=qwen2_experts,
    ),
    "Qwen3ForCausalLM": Family(_layered_window, _missing(32_768, kv_heads=32), head_dim=128),
    "Qwen3MoeForCausalLM": Family(
        _switched_window, _missing(32_768, kv_heads=4), extra_fields=qwen_experts
    ),
}


def read_config(folder: Path) -> ModelConfig:
    """Reads the configuration of the checkpoint in `folder`. Raises ConfigurationError, in one line
    that names the field, for a field that is missing, wrong or not supported.
    """
    fields = read_json(folder, "config.json")
    architecture = _architecture(fields)
    family = FAMILIES[architecture]
    fields = Fields(fields.path, {**family.missing, **fields.raw})
    layers = fields.integer("num_hidden_layers")
    heads = fields.integer("num_attention_heads")
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=_head_dim(fields, family, heads),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=is_headless(fields)
        or fields.boolean("tie_word_embeddings", family.tied),
        attention_bias=fields.boolean(*family.bias),
        mlp_bias=fields.boolean("mlp_bias", False),
        rope=family.rope(fields),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        sliding_windows=family.windows(fields, layers),
        dtype=read_dtype(fields),
        eos_ids=fields.ids("eos_token_id"),
        activation=_activation(fields, family.activations),
        quantization=read_quantization(fields),
        **family.extra_fields(fields, layers),
    )
    rotated = config.rope.rotated(config.head_dim)
    if rotated % 2 or not rotated:
        raise fields.error(f"partial_rotary_factor {config.rope.rotary} rotates {rotated} values")
    if config.num_heads % config.num_kv_heads:
        raise fields.error(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads "
            f"{config.num_kv_heads}"
        )
    return config


def _architecture(fields: Fields) -> str:
    named = _named(fields)
    for name in map(_with_head, named):
        if name in ARCHITECTURES:
            return name
    what = ", ".join(named) or "(none named)"
    raise ConfigurationError(
        f"unsupported architecture {what}; supported: {', '.join(ARCHITECTURES)}"
    )


def _named(fields: Fields) -> list[str]:
    """The architectures that config.json names."""
    named = fields.raw.get("architectures") or []
    if not isinstance(named, list):
        raise fields.error(f"architectures must be a list of names, not {named!r:.100}")
    return [str(name) for name in named]


HEADLESS = "Model"  # suffix of the names of models without a head for logits


def _with_head(name: str) -> str:
    """The architecture of a decoder that is named without its head, as "Qwen3Model"."""
    return name.removesuffix(HEADLESS) + "ForCausalLM" if name.endswith(HEADLESS) else name


def is_headless(fields: Fields) -> bool:
    """Whether config.json is that of a decoder without a head for logits."""
    named = _named(fields)
    return any(_with_head(name) in ARCHITECTURES and name.endswith(HEADLESS) for name in named)


def _activation(fields: Fields, known: Activations) -> str:
    given = fields.raw.get(known.field, known.values[0])
    if given not in known.values:
        raise fields.error(f"{known.field} {given!r} is not supported, only {known.values[0]!r}")
    return known.name


def _head_dim(fields: Fields, family: Family, heads: int) -> int:
    given = fields.optional_integer("head_dim", missing=family.head_dim)
    hidden = fields.integer("hidden_size")
    if given is None and hidden % heads:
        raise fields.error(f"hidden_size {hidden} is not a multiple of {heads} attention heads")
    head_dim = given or hidden // heads
    if head_dim % 2:
        raise fields.error(f"head_dim {head_dim} is odd, which RoPE cannot rotate")
    return head_dim


def read_dtype(fields: Fields) -> str:
    """The dtype of the weights, one of DTYPES. Raises ConfigurationError for another."""
    given = fields.raw.get("dtype") or fields.raw.get("torch_dtype") or "float32"
    name = str(given).removeprefix("torch.")
    if name not in DTYPES:
        raise fields.error(f"dtype {name!r} is not supported, only {', '.join(DTYPES)}")
    return name


# Names that configurations have for the maximum length of a sequence.
CONTEXTS = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "max_seq_len")
DECODERS = ("ForCausalLM", "LMHeadModel")  # suffixes of decoders' names in transformers


@dataclass(frozen=True)
class ModelOutline:
    """The facts about a model that all stages need.

    Attributes:
    - architecture: name in config.json
    - vocab_size: width of the logits
    - context_length: the most tokens of a sequence
    - dtype: of the weights, of DTYPES
    - config: the configuration of pipeinfer's implementation; None: transformers builds the model
    """

    architecture: str
    vocab_size: int
    context_length: int
    dtype: str
    config: ModelConfig | None = None

    def max_model_len(self, requested: int) -> int:
        """Tokens of the longest request; requested: --max-model-len, 0 for the checkpoint's. Raises
        ConfigurationError for more than that."""
        if requested > self.context_length:
            raise ConfigurationError(
                f"--max-model-len: {requested} is more than the checkpoint's "
                f"{self.context_length} tokens"
            )
        return requested or self.context_length


def read_outline(checkpoint: Path, model_impl: str = "auto") -> ModelOutline:
    """The outline of a checkpoint, a folder or a GGUF file.

    - model_impl: as in Settings. With "auto", transformers builds decoders that are not in
      ARCHITECTURES

    Raises ConfigurationError in one line.
    """
    if model_impl == "transformers" and is_gguf(checkpoint):
        raise ConfigurationError(
            f"--model-impl transformers: {checkpoint} is a GGUF file, read by pipeinfer's own"
        )
    fields = read_json(checkpoint, "config.json")
    named = _named(fields)
    have = any(name in ARCHITECTURES for name in named)
    foreign = [name for name in named if name.endswith(DECODERS)]
    if model_impl == "pipeinfer" or (model_impl == "auto" and have) or not foreign:
        return _native_outline(read_config(checkpoint))
    return _transformers_outline(fields, foreign[0])


def _native_outline(config: ModelConfig) -> ModelOutline:
    return ModelOutline(
        config.architecture, config.vocab_size, config.context_length, config.dtype, config
    )


def _transformers_outline(fields: Fields, architecture: str) -> ModelOutline:
    if read_quantization(fields) is not None:
        raise fields.error(
            f"quantization_config is not supported for {architecture}, which transformers builds"
        )
    context = next((name for name in CONTEXTS if fields.raw.get(name) is not None), CONTEXTS[0])
    return ModelOutline(
        architecture, fields.integer("vocab_size"), fields.integer(context), read_dtype(fields)
    )


# From names in config.json to "module:builder"; a builder takes (ModelConfig, Placement).
ARCHITECTURES = {
    "Gemma3ForCausalLM": "pipeinfer.models.causal_lm:build_gemma3",
    "Glm4ForCausalLM": "pipeinfer.models.causal_lm:build_glm4",
    "Glm4MoeForCausalLM": "pipeinfer.models.causal_lm:build_glm4_moe",
    "GlmForCausalLM": "pipeinfer.models.causal_lm:build_glm",
    "GptOssForCausalLM": "pipeinfer.models.causal_lm:build_gpt_oss",
    "LlamaForCausalLM": "pipeinfer.models.causal_lm:build_llama",
    "MistralForCausalLM": "pipeinfer.models.causal_lm:build_mistral",
    "MixtralForCausalLM": "pipeinfer.models.causal_lm:build_mixtral",
    "Qwen2ForCausalLM": "pipeinfer.models.causal_lm:build_qwen2",
    "Qwen2MoeForCausalLM": "pipeinfer.models.causal_lm:build_qwen2_moe",
    "Qwen3ForCausalLM": "pipeinfer.models.causal_lm:build_qwen3",
    "Qwen3MoeForCausalLM": "pipeinfer.models.causal_lm:build_qwen3_moe",
}


@dataclass(frozen=True)
class GenerationDefaults:
    """The sampling defaults of a checkpoint; None: the checkpoint does not say.

    Attributes:
    - eos_ids: end tokens in config.json and in generation_config.json
    - temperature, top_k, top_p, min_p, repetition_penalty: as in RequestParams
    - max_new_tokens: as max_tokens in RequestParams
    """

    eos_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None

    def sampling(self) -> dict[str, float]:
        """The defaults that the checkpoint gives, by the names of RequestParams' fields."""
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        values = {name: getattr(self, name) for name in names} | {"max_tokens": self.max_new_tokens}
        return {name: value for name, value in values.items() if value is not None}


def read_generation(folder: Path) -> GenerationDefaults:
    """Reads config.json and, if there is one, generation_config.json. Raises ConfigurationError."""
    eos = read_json(folder, "config.json").ids("eos_token_id")
    path = folder / "generation_config.json"
    if not path.exists():
        return GenerationDefaults(eos_ids=eos)
    fields = read_json(folder, path.name)
    return GenerationDefaults(
        eos_ids=tuple(dict.fromkeys(eos + fields.ids("eos_token_id"))),
        temperature=_number(fields, "temperature"),
        top_k=fields.optional_integer("top_k", least=0),
        top_p=_number(fields, "top_p"),
        min_p=_number(fields, "min_p"),
        repetition_penalty=_number(fields, "repetition_penalty"),
        max_new_tokens=fields.optional_integer("max_new_tokens"),
    )


def _number(fields: Fields, name: str) -> float | None:
    value = fields.raw.get(name)
    if value is None or value == 0:  # 0 is a valid default of temperature and min_p
        return None if value is None else 0.0
    return fields.number(name)
