"""The transformers backend: models that transformers builds, called as the engine calls its own.

- `inspect_model` finds the class and refuses unsupported models, before weights are read.
- `load_model` reads weights, by transformers and from safetensors alone, and tries a step.
- `TransformersForCausalLM` is the LanguageModel that the engine calls.

Attention is a function that is registered with transformers: it hands queries, keys and values to
the engine's attention, as layers of the project's own do. Knows no page, no request and no backend.
"""

from __future__ import annotations

import itertools
import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple, Protocol, cast

import torch
from torch.nn import functional
from transformers.configuration_utils import PreTrainedConfig
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface, PreTrainedModel
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from pipeinfer.checkpoint.config import ModelOutline
from pipeinfer.layers.attention import Attend, RotatedQKV
from pipeinfer.layers.lora import AdaptedLinear, AdaptedModule, AdapterBank
from pipeinfer.layers.placement import DUMMY_STD
from pipeinfer.settings import ConfigurationError
from pipeinfer.step import AttentionShape

log = logging.getLogger(__name__)

# Unsupported features.
SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
LENGTH_DEPENDENT_ROPES = {"dynamic", "longrope"}  # angles depend on the step's longest sequence
MAX_HEAD_DIM = 256  # values; the most that a backend here computes

# How attention is called.
ATTENTION_NAME = "pipeinfer"  # attention as steps compute it, without a mask
TRACING_NAME = "pipeinfer-traced"  # attention as `trace_attention` sees it, with a placeholder mask
HOOK_ATTRIBUTE = "pipeinfer_hook"  # attribute of every module of a model
# Options of a call that change nothing here; the window is in the mask.
IGNORED_OPTIONS = {
    "dropout", "position_ids", "cache_position", "use_cache", "sliding_window", "output_attentions",
    "output_hidden_states", "output_router_logits", "return_dict", "is_causal",
}  # fmt: skip

TRACE_TOKENS = 4  # tokens of the call that traces attention
FAR_POSITION = 16_777_213  # a position behind all windows; odd, so that no chunk begins there
TRIAL_TOKENS = 8  # tokens of the step that is tried with the weights
TRIAL_TOLERANCE = 0.02  # of the largest value; a median over tokens: experts may be near ties

LoadingInfo = Mapping[str, Set[object]]  # names of tensors, by error
# (batch, head, query position, key position), tensors, to whether the query sees the key.
MaskFunction = Callable[[int, int, torch.Tensor, torch.Tensor], torch.Tensor]
AttentionFunction = Callable[["AttentionCall"], torch.Tensor]  # gives [1, T, heads, head_dim]


@dataclass(frozen=True)
class TransformersSpec:
    """A model's description before its weights are read.

    Attributes:
    - outline: fields of config.json that every model has
    - model_class, config: transformers' class and configuration
    - attention: the model's demands of attention
    """

    outline: ModelOutline
    model_class: type[PreTrainedModel]
    config: PreTrainedConfig
    attention: TracedAttention


def inspect_model(folder: Path, outline: ModelOutline, max_model_len: int) -> TransformersSpec:
    """Finds transformers' class for the checkpoint in `folder`, and the model's demands of
    attention.

    - max_model_len: tokens of the longest request

    Raises ConfigurationError for a model that cannot be served, with the reason.
    """
    with _transformers_silent():
        model_class, config = find_model_class(folder, outline.architecture)
        check_supported(model_class, config, outline.architecture, max_model_len)
        attention = trace_attention(model_class, config, outline.architecture)
    return TransformersSpec(outline, model_class, config, attention)


def load_model(
    spec: TransformersSpec,
    folder: Path | None,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    max_model_len: int,
    head_dim: int = 0,
) -> TransformersForCausalLM:
    """Returns the model on `device`, with the weights in `folder`; without a folder, random ones.

    - seed: of random weights
    - dtype: of the weights
    - max_model_len: tokens of the longest request
    - head_dim: heads with fewer values are padded to `head_dim`

    Raises ConfigurationError for weights that do not fit, and for a model whose tokens depend on
    their neighbours by more than attention.
    """
    register_attention()
    outline = spec.outline
    with _transformers_silent():
        if folder is None:
            model = _random_weights(spec, seed, device, dtype)
        else:
            model = _pretrained(spec, folder, dtype)
    torch.nn.Module.to(model, device).eval().requires_grad_(False)
    shapes, hidden = run_probe(model, spec.attention.shapes, outline, max_model_len)
    served = TransformersForCausalLM(model, shapes, outline.vocab_size, head_dim)
    with torch.inference_mode():
        width = served.logits(hidden).shape[-1]
    if width != outline.vocab_size:
        raise unsupported(
            outline.architecture,
            f"it has logits of {width} ids, config.json says {outline.vocab_size}",
        )
    return served


def _pretrained(spec: TransformersSpec, folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Returns the model with the weights in `folder`. Raises ConfigurationError if some are missing
    or have another shape; warns of tensors that the model lacks.
    """
    architecture = spec.outline.architecture
    read = cast(
        Callable[..., tuple[PreTrainedModel, LoadingInfo]], spec.model_class.from_pretrained
    )
    try:
        model, info = read(
            folder,
            config=deepcopy(spec.config),
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # such weights are reported below
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigurationError(f"{folder}: {' '.join(str(error).split())[:300]}") from error
    for what, key in (("lacks", "missing_keys"), ("has in another shape", "mismatched_keys")):
        wrong = sorted(map(str, info[key]))
        if wrong:
            raise ConfigurationError(
                f"{folder} {what} {len(wrong)} tensors that {architecture} needs: "
                f"{_first_names(wrong)}"
            )
    extra = sorted(map(str, info["unexpected_keys"]))
    if extra:
        log.warning(
            "%s: ignoring %d tensors that the model lacks: %s",
            folder,
            len(extra),
            _first_names(extra),
        )
    return model


def _first_names(names: list[str]) -> str:
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")


@torch.no_grad()
def _random_weights(
    spec: TransformersSpec, seed: int, device: torch.device, dtype: torch.dtype
) -> PreTrainedModel:
    """Returns the model with random weights, as of `fill_dummy` (loading.py): each tensor depends
    on `seed` and its name only.
    """
    with device:
        model = instantiate(spec.model_class, spec.config, ATTENTION_NAME, dtype)
    for name, weight in model.named_parameters():
        if weight.dim() == 1 and name.endswith("weight"):  # weight of a norm
            weight.fill_(1.0)
            continue
        generator = torch.Generator(weight.device)
        generator.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        full = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
        weight.copy_(full.normal_(0.0, DUMMY_STD, generator=generator))
    return model


@contextmanager
def _transformers_silent() -> Iterator[None]:
    """transformers logs nothing and shows no progress bar meanwhile."""
    level = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


# --------------------------------------------------------- models refused by their configuration


def find_model_class(
    folder: Path, architecture: str
) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """transformers' class for the checkpoint in `folder`, and its configuration.

    No Python of the checkpoint runs. Raises ConfigurationError.
    """
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # a configuration class may raise anything for a wrong value
        raise unsupported(
            architecture, f"transformers does not read config.json: {error}"
        ) from error
    found = cast(
        "type[PreTrainedModel] | None", MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    )
    if found is None or found.__name__ != architecture:
        raise ConfigurationError(
            f"unsupported architecture {architecture}: neither pipeinfer nor transformers "
            f"{version('transformers')} has it as a decoder"
        )
    return found, config


def check_supported(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    architecture: str,
    max_model_len: int,
) -> None:
    """Raises ConfigurationError, with the reason, for models that a flat step over pages cannot
    compute.

    - max_model_len: tokens of the longest request
    """
    types = set(getattr(config, "layer_types", None) or ()) - SUPPORTED_LAYER_TYPES
    if getattr(model_class, "_is_stateful", False):
        raise unsupported(
            architecture, "it has a recurrent state, and pages hold keys and values only"
        )
    if types:
        named = ", ".join(sorted(map(str, types)))
        raise unsupported(architecture, f"layers of type {named} are more than keys and values")
    if getattr(config, "kv_lora_rank", None):
        raise unsupported(architecture, "it has latent attention (MLA)")
    if getattr(config, "alibi", False):
        raise unsupported(architecture, "it has ALiBi, a bias of scores that no backend here adds")
    for rope in _rope_parameters(getattr(config, "rope_parameters", None)):
        limit = rope.get("original_max_position_embeddings")
        limit = limit or getattr(config, "original_max_position_embeddings", None)
        rope_type = rope.get("rope_type")
        too_long = isinstance(limit, int) and max_model_len > limit
        if rope_type in LENGTH_DEPENDENT_ROPES and too_long:
            raise unsupported(
                architecture,
                f"RoPE of type {rope_type} turns all requests of a step by the longest of them; "
                f"--max-model-len {limit} works",
            )


def unsupported(architecture: str, reason: str) -> ConfigurationError:
    """The error to raise, in one line."""
    line = " ".join(reason.split())
    return ConfigurationError(f"{architecture} is not served through transformers: {line[:300]}")


def _rope_parameters(parameters: object) -> Iterator[Mapping[str, object]]:
    """The RoPE of a model, or of each type of layers."""
    if isinstance(parameters, Mapping):
        yield parameters
        for one in parameters.values():
            yield from _rope_parameters(one)


# ------------------------------------------------------------- how transformers calls our attention


class AttentionCall(NamedTuple):
    """The arguments that a layer passes its attention.

    Attributes:
    - query, key, value: [1, heads, T, head_dim], normed and rotated
    - mask: None by ATTENTION_NAME; by TRACING_NAME the model's mask, made from a placeholder mask
    - options: all other arguments
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: object
    options: Mapping[str, object]


class AttentionHook:
    """The attention function of one model, stored in each of its modules, so that two models of a
    process do not share it.

    Attributes:
    - attention: the function that answers the model's calls now
    """

    attention: AttentionFunction


class _FromConfig(Protocol):
    """A model class. transformers does not annotate the result of `_from_config`, and pyright would
    read all models to find out, for half a minute.
    """

    def _from_config(
        self, config: PreTrainedConfig, *, attn_implementation: str, dtype: torch.dtype
    ) -> PreTrainedModel: ...


def instantiate(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, name: str, dtype: torch.dtype
) -> PreTrainedModel:
    """A model whose weights mean nothing yet, and that calls the attention registered as `name`."""
    typed = cast(_FromConfig, model_class)
    return typed._from_config(deepcopy(config), attn_implementation=name, dtype=dtype)


def install_hook(model: torch.nn.Module) -> AttentionHook:
    """A new hook, in all modules of `model` from now on."""
    hook = AttentionHook()
    for module in model.modules():
        setattr(module, HOOK_ATTRIBUTE, hook)
    return hook


def register_attention() -> None:
    """Registers both names with transformers, for all models of the process. By ATTENTION_NAME
    models make no mask, by TRACING_NAME a placeholder (`mask_function_of`)."""
    AttentionInterface.register(ATTENTION_NAME, _attention_forward)
    AttentionInterface.register(TRACING_NAME, _attention_forward)
    AttentionMaskInterface.register(TRACING_NAME, _placeholder_mask)


def mask_function_of(mask: object) -> MaskFunction | None:
    """Returns the function of keys that a query sees, if `mask` is the placeholder; otherwise
    None.
    """
    return getattr(mask, "mask_function", None)


def _attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object = None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    hook: AttentionHook = getattr(module, HOOK_ATTRIBUTE)
    return hook.attention(AttentionCall(query, key, value, attention_mask, options)), None


def _placeholder_mask(
    *, q_length: int, kv_length: int, mask_function: MaskFunction, **others: object
) -> torch.Tensor:
    """A mask without values, since a window may be longer than any mask that fits in memory."""
    mask = torch.empty((1, 1, q_length, kv_length), dtype=torch.bool, device="meta")
    setattr(mask, "mask_function", mask_function)  # noqa: B010
    return mask


# ----------------------------------------------- a model's demands of attention, found by tracing


@dataclass(frozen=True)
class TracedAttention:
    """A model's demands of attention.

    Attributes:
    - shapes: of each layer, in the order of calls, without sinks, which are weights
    - sinks: whether some layer has them
    """

    shapes: tuple[AttentionShape, ...]
    sinks: bool

    @property
    def head_dim(self) -> int:
        """Values of the largest heads."""
        return max(shape.head_dim for shape in self.shapes)

    @property
    def soft_cap(self) -> bool:
        """Whether some layer caps its scores."""
        return any(shape.soft_cap is not None for shape in self.shapes)


class _Unsupported(Exception):
    """The exception for models that `trace_attention` refuses; the text is the reason."""


def trace_attention(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, architecture: str
) -> TracedAttention:
    """Calls the model once, without weights on torch's meta device, and looks at its calls.

    The keys that a layer hides are taken from its mask, not from its configuration, so a model
    whose mask is no window is refused, and not served wrongly. Raises ConfigurationError, with the
    reason, for attention that no backend here computes.
    """
    register_attention()
    calls: list[AttentionCall] = []
    windows: list[int | None] = []

    def attention(call: AttentionCall) -> torch.Tensor:
        calls.append(call)
        windows.append(_window_of(call.mask))
        query, dim = call.query, call.value.shape[-1]
        return query.new_zeros((1, query.shape[2], query.shape[1], dim))

    try:
        with torch.device("meta"), torch.inference_mode():
            model = instantiate(model_class, config, TRACING_NAME, torch.bfloat16).eval()
            _refuse_alibi(model)
            install_hook(model).attention = attention
            ids = torch.zeros((1, TRACE_TOKENS), dtype=torch.long)
            model.base_model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        if not calls:
            raise _Unsupported("its attention does not go through transformers' interface for it")
        shapes = tuple(map(_checked_shape, calls, windows))
    except _Unsupported as error:
        raise unsupported(architecture, str(error)) from None
    except Exception as error:  # transformers' code was not written to be called like this
        reason = f"a probe of it failed with {type(error).__name__}: {error}"
        if isinstance(error, KeyError) and TRACING_NAME in str(error):
            reason = "its attention does not go through transformers' interface for it"
        raise unsupported(architecture, reason) from error
    return TracedAttention(shapes, any(call.options.get("s_aux") is not None for call in calls))


def _refuse_alibi(model: PreTrainedModel) -> None:
    if any("alibi" in name for name in dir(model.base_model)):
        raise _Unsupported("it has ALiBi, a bias of scores that no backend here adds")


def _checked_shape(call: AttentionCall, window: int | None) -> AttentionShape:
    heads, dim = call.query.shape[1], call.query.shape[3]
    kv_heads, values = call.key.shape[1], call.value.shape[3]
    if call.key.shape[3] != dim or values != dim:
        raise _Unsupported(f"its heads have keys of {dim} values, and values of {values}")
    if dim > MAX_HEAD_DIM:
        raise _Unsupported(f"its heads have {dim} values, and at most {MAX_HEAD_DIM} are served")
    if call.value.shape[1] != kv_heads or heads % kv_heads:
        raise _Unsupported(f"it has {heads} query heads, {kv_heads} of keys")
    options = dict(call.options)
    if options.get("is_causal") is False:
        raise _Unsupported("its attention is not causal")
    scale, cap = options.pop("scaling", None), options.pop("softcap", None)
    options.pop("s_aux", None)
    unknown = [
        name
        for name, value in options.items()
        if name not in IGNORED_OPTIONS and value is not None and value is not False
    ]
    if unknown:
        raise _Unsupported(f"it passes its attention {', '.join(unknown)}")
    return AttentionShape(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        scale=dim**-0.5 if scale is None else float(cast(float, scale)),
        sliding_window=window,
        soft_cap=None if cap is None else float(cast(float, cap)),
    )


def _window_of(mask: object) -> int | None:
    """Tokens that a query sees, its own included; None: all before it."""
    sees = mask_function_of(mask)
    if sees is None:
        raise _Unsupported("its attention has a mask or a bias of its own")
    with torch.device("cpu"):
        far = FAR_POSITION
        low, high = 0, far  # the first key that the last query sees
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if _visible(sees, far, middle) else (middle + 1, high)
        window = None if low == 0 else far - low + 1
        for query in {0, 1, 5, 100, 8191, 8192, low, far - low, 2 * (far - low) + 1, far}:
            edge = -1 if window is None else query - window
            for key in {0, edge, edge + 1, query // 2, query - 1, query, query + 1}:
                if key >= 0 and _visible(sees, query, key) != (edge < key <= query):
                    raise _Unsupported("its mask is neither causal nor a sliding window")
    return window


def _visible(sees: MaskFunction, query: int, key: int) -> bool:
    return bool(sees(0, 0, torch.tensor(query), torch.tensor(key)))


# ------------------------------------------------------------------------- a probe with the weights


class ProbeResult(NamedTuple):
    """Result of a probe of a model.

    Attributes:
    - shapes: of each layer, with its sinks
    - hidden: [n, hidden], hidden states for the head
    """

    shapes: list[AttentionShape]
    hidden: torch.Tensor


@torch.inference_mode()
def run_probe(
    model: PreTrainedModel,
    shapes: Sequence[AttentionShape],
    outline: ModelOutline,
    max_model_len: int,
) -> ProbeResult:
    """Computes a step twice, with its tokens in another order.

    A step is one flat row of tokens of many requests, so the result of a token may depend on its
    neighbours by attention alone, and not on its place in the row. Raises ConfigurationError for a
    model of which that is not true.

    - shapes: as traced
    - max_model_len: tokens of the longest request
    """
    sinks: list[torch.Tensor | None] = []

    def attention(call: AttentionCall) -> torch.Tensor:
        sinks.append(cast("torch.Tensor | None", call.options.get("s_aux")))
        return _attend_to_itself(call)

    install_hook(model).attention = attention
    ids = torch.arange(3, 3 + 7 * TRIAL_TOKENS, 7, device=model.device) % outline.vocab_size
    positions = torch.linspace(0, max_model_len - 1, TRIAL_TOKENS, device=model.device).long()
    first = _hidden_states(model, ids, positions)
    if len(sinks) != len(shapes):
        raise unsupported(
            outline.architecture, f"it called attention {len(shapes)}, then {len(sinks)} times"
        )
    found = [replace(shape, sinks=s) for shape, s in zip(shapes, sinks, strict=True)]
    # In reverse order, and with another token in the place of the last.
    ids, positions = ids.flip(0), positions.flip(0)
    ids[0], positions[0] = (ids[0] + 1) % outline.vocab_size, 0
    second = _hidden_states(model, ids, positions).flip(0)
    changed = (first - second)[:-1].float().abs().amax(dim=1)
    difference = changed.median() / first.float().abs().max()
    if not float(difference) <= TRIAL_TOLERANCE:
        raise unsupported(
            outline.architecture,
            "its tokens depend on those beside them by more than attention (a convolution, a "
            "recurrence, or positions that are counted)",
        )
    return ProbeResult(found, first)


def _hidden_states(
    model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    out = model.base_model(input_ids=ids[None], position_ids=positions[None], use_cache=False)
    return out.last_hidden_state[0]


def _attend_to_itself(call: AttentionCall) -> torch.Tensor:
    """Stands in for attention: returns the mean of a token's own query, key and value, so that a
    rotation by the place in the row shows.
    """
    group = call.query.shape[1] // call.key.shape[1]
    own = call.query + (call.key + call.value).repeat_interleave(group, dim=1)
    return (own / 3).transpose(1, 2).contiguous()


# --------------------------------------------------------------------- interface of the engine


@dataclass(frozen=True)
class FullVocabulary:
    """The VocabShard of one rank that has all ids."""

    vocab_size: int
    start: int = 0

    @property
    def stop(self) -> int:
        """End of the ids, see VocabShard."""
        return self.vocab_size


class PassThroughOutput:
    """The output of a base model, reduced to its hidden states [1, L, hidden]."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor | None:
        return None if index else self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None


class PassThroughBase(torch.nn.Module):
    """Stands in for the base model, so that the head alone can be called: returns the hidden states
    that it gets.
    """

    @property
    def decoder(self) -> PassThroughBase:
        """The part of the base model that some models call."""
        return self

    def forward(
        self, *ids: None, inputs_embeds: torch.Tensor, **others: object
    ) -> PassThroughOutput:
        """Returns inputs_embeds, hidden states [1, L, hidden]. Some models pass ids, None, before
        them.
        """
        return PassThroughOutput(inputs_embeds)


class TransformersForCausalLM:
    """A decoder of transformers as a LanguageModel: the tokens of a step are one row.

    Attention is handed in with each call. The head stays transformers', with whatever scales or
    caps logits.
    """

    capture_may_fail = True

    def __init__(
        self,
        model: PreTrainedModel,
        shapes: Sequence[AttentionShape],
        vocab_size: int,
        head_dim: int = 0,
    ) -> None:
        """Model with its weights.

        - shapes: of each layer, in the order of calls, with sinks
        - vocab_size: number of ids
        - head_dim: heads with fewer values are padded with zeros to `head_dim`
        """
        self._hook = install_hook(model)
        self._shapes = tuple(shapes)
        self._dims = [max(shape.head_dim, head_dim) for shape in shapes]
        self.vocab_shard = FullVocabulary(vocab_size)
        self._base: torch.nn.Module = model.base_model
        self._path = f"{model.base_model_prefix}."
        setattr(model, model.base_model_prefix, PassThroughBase())
        self._head = model

    def use_adapters(self, bank: AdapterBank) -> None:
        """Every linear layer of the base model that computes all tokens, in their order, may have
        adapters of `bank`: all but experts."""
        for name, module in self._base.named_modules():
            linear = isinstance(module, torch.nn.Linear)
            if not linear or module.weight.dtype != bank.dtype or "expert" in name:
                continue
            out_features, in_features = module.out_features, module.in_features
            every, columns = slice(0, out_features), slice(0, in_features)
            shape = out_features, in_features
            path = f"{self._path}{name}"
            layer = bank.linear([AdaptedModule(path, shape, every, columns, every)])
            module.register_forward_hook(partial(_add_adapters, layer))

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes hidden states, see LanguageModel."""
        layers = itertools.count()

        def attention(call: AttentionCall) -> torch.Tensor:
            return self._attend(next(layers), call, attend)

        self._hook.attention = attention
        ids, at = tokens.long()[None], positions.long()[None]
        out = self._base(input_ids=ids, position_ids=at, use_cache=False)
        hidden = out.last_hidden_state[0]
        return hidden if rows is None else hidden[rows]

    def _attend(self, layer: int, call: AttentionCall, attend: Attend) -> torch.Tensor:
        """Returns the attention of layer number `layer`, [1, T, heads, head_dim]."""
        dim, padded = self._shapes[layer].head_dim, self._dims[layer]
        heads = (call.query, call.key, call.value)
        ready = (_by_token(part[0], padded - dim) for part in heads)
        out = attend(layer, RotatedQKV(*ready))
        return out[None, ..., :dim]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns logits [L, vocab] of hidden states [L, hidden]."""
        return self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]

    def local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns `logits`, because there is one rank."""
        return self.logits(hidden)

    def attention_shapes(self) -> Sequence[AttentionShape]:
        """Returns the shape of each layer's heads, with padded heads."""
        return [
            replace(shape, head_dim=dim)
            for shape, dim in zip(self._shapes, self._dims, strict=True)
        ]


def _add_adapters(
    layer: AdaptedLinear,
    _module: torch.nn.Module,
    given: tuple[torch.Tensor, ...],
    product: torch.Tensor,
) -> torch.Tensor:
    """A forward hook of a linear layer."""
    if not layer.active:
        return product
    added = layer.add(product.flatten(0, -2), given[0].flatten(0, -2))
    return added.view(product.shape)


def _by_token(heads: torch.Tensor, padding: int) -> torch.Tensor:
    """Returns [heads, T, dim] as [T, heads, dim + padding], contiguous."""
    heads = heads.transpose(0, 1)
    return functional.pad(heads, (0, padding)) if padding else heads.contiguous()
