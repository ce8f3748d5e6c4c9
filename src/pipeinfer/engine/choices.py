"""Choices of an engine, from settings and a checkpoint. Errors in both are found here and reported
in one line, before a weight is read; only errors that depend on memory and on other ranks are found
later.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch

from pipeinfer.attention import registry
from pipeinfer.attention.registry import Gpu
from pipeinfer.checkpoint.config import ModelConfig, ModelOutline, read_outline
from pipeinfer.checkpoint.quantization import choose_quantization
from pipeinfer.checkpoint.source import find_model
from pipeinfer.gguf.config import int4_modules, is_low_bit
from pipeinfer.gguf.header import is_gguf, read_header
from pipeinfer.kernels.formats import UNIT_KV_SCALES, KVScales
from pipeinfer.layers.placement import Shard
from pipeinfer.models.loading import (
    CheckpointTensor,
    check_checkpoint,
    check_shard,
    read_kv_scales,
)
from pipeinfer.settings import ConfigurationError, Settings

if TYPE_CHECKING:
    from pipeinfer.models.transformers_backend import TransformersSpec

log = logging.getLogger(__name__)
AS_THE_MODEL, FP8 = "auto", "fp8_e4m3"  # number formats of stored keys and values


@dataclass(frozen=True)
class DraftChoices:
    """A checkpoint whose model makes draft tokens.

    Attributes:
    - folder: files of the checkpoint
    - config: configuration of the model
    - stored: tensors by name; None: random weights
    """

    folder: Path
    config: ModelConfig
    stored: Mapping[str, CheckpointTensor] | None


@dataclass(frozen=True)
class EngineChoices:
    """Choices that follow from settings and checkpoint, before any weight is loaded.

    Attributes:
    - outline: of the checkpoint, in the number format of the computation
    - transformers_spec: how transformers builds the model; None: the implementation is our own
    - device: "cpu" or "cuda"
    - dtype: of the computation
    - attention: the backend's name (attention/registry.py)
    - page_size: tokens of a page
    - max_model_len: tokens of the longest request
    - shard: this rank, and the number of ranks
    - stored: the checkpoint's tensors by name, for our own implementation; None: random weights
    - kv_scales: of each layer's keys and values, if they are stored as e4m3; else None
    - ordinal: of this rank's GPU on its host
    - draft: the model that makes draft tokens; None: there is none
    """

    outline: ModelOutline
    transformers_spec: TransformersSpec | None
    device: str
    dtype: torch.dtype
    attention: str
    page_size: int
    max_model_len: int
    shard: Shard
    stored: Mapping[str, CheckpointTensor] | None
    kv_scales: tuple[KVScales, ...] | None
    ordinal: int
    draft: DraftChoices | None = None

    @property
    def layers(self) -> int:
        """Number of layers with attention."""
        if self.transformers_spec is not None:
            return len(self.transformers_spec.attention.shapes)
        return self.config.num_layers

    @property
    def config(self) -> ModelConfig:
        """The configuration, of a model of our own implementation."""
        assert self.outline.config is not None, "the model is transformers'"
        return self.outline.config

    def without_files(self) -> EngineChoices:
        """Returns the choices without the files: engines with equal results are built alike,
        whichever weights they have.
        """
        draft = None if self.draft is None else replace(self.draft, stored=None)
        return replace(self, stored=None, draft=draft)

    @property
    def kv_dtype(self) -> str:
        """Number format of keys and values, as in Hello."""
        return AS_THE_MODEL if self.kv_scales is None else FP8


def choose_engine(
    settings: Settings, folder: Path, rank: int = 0, ordinal: int | None = None
) -> EngineChoices:
    """Checks settings and checkpoint against each other; reads of weights what `check_checkpoint`
    reads.

    ordinal: of this rank's GPU on its host, by default `rank`. Raises ConfigurationError that names
    the setting or file at fault.
    """
    device, ordinal = _device(settings.device), rank if ordinal is None else ordinal
    outline = read_outline(folder, settings.model_impl)
    shard = Shard(rank, settings.tp, settings.enable_expert_parallel)
    max_model_len = outline.max_model_len(settings.max_model_len)
    float32 = settings.exact and settings.dtype == "auto" and device == "cpu"
    dtype = torch.float32 if float32 else _dtype(settings.dtype, outline, device)
    outline = _in_format(outline, *_quantization(settings, folder, device, dtype))
    spec, config = None, outline.config
    narrow = _narrow(settings.kv_cache_dtype, dtype)
    if config is None:
        spec = _transformers_spec(settings, folder, outline, max_model_len)
        layers = len(spec.attention.shapes)
        needs = _Needs(
            registry.padded_head_dim(spec.attention.head_dim),
            spec.attention.sinks,
            spec.attention.soft_cap,
            narrow,
        )
    else:
        check_shard(config, settings.tp, shard.expert_parallel)
        layers = config.num_layers
        needs = _Needs(config.head_dim, config.sinks, narrow=narrow)
    gpu = _gpu(dtype, needs, ordinal) if device == "cuda" else None
    resolve = registry.resolve_exact if settings.exact else registry.resolve
    attention = resolve(settings.attention, device, gpu)
    if settings.exact:
        _check_exact(settings, outline, device, dtype)
    if settings.speculate != "none" and registry.load(attention).traits.host_lengths:
        raise ConfigurationError(
            f"--speculate: the attention backend {attention} needs the lengths of requests on the "
            "host, where they are not known while draft tokens are verified"
        )
    stored = None
    if config is not None and settings.load_format != "dummy":
        config, stored = check_checkpoint(folder, config, shard)
        outline = replace(outline, config=config)
    return EngineChoices(
        outline=outline,
        transformers_spec=spec,
        device=device,
        dtype=dtype,
        attention=attention,
        page_size=registry.resolve_page_size(attention, settings.page_size),
        max_model_len=max_model_len,
        shard=shard,
        stored=stored,
        kv_scales=_scales(stored, layers) if narrow else None,
        ordinal=ordinal,
        draft=_choose_draft(
            settings, outline, max_model_len, shard, dtype, attention, narrow, ordinal
        ),
    )


def _choose_draft(
    settings: Settings,
    outline: ModelOutline,
    max_model_len: int,
    shard: Shard,
    dtype: torch.dtype,
    attention: str,
    narrow: bool,
    ordinal: int,
) -> DraftChoices | None:
    """Chooses the model that makes draft tokens for the model of `outline`, whose requests have at
    most `max_model_len` tokens; None: `--speculate` names none. Raises ConfigurationError for a
    model that cannot make them.
    """
    if not settings.draft_model:
        return None
    named = f"--speculate {settings.speculate}"
    folder = find_model(
        msgspec.structs.replace(settings, model=settings.speculate, revision=""), log.info
    )
    found = read_outline(folder)
    if found.config is None:
        raise ConfigurationError(
            f"{named}: {found.architecture} is served through transformers; draft models are of "
            "pipeinfer's own architectures"
        )
    if found.vocab_size != outline.vocab_size:
        raise ConfigurationError(
            f"{named}: it has {found.vocab_size:,} ids, the model has {outline.vocab_size:,}; "
            "draft tokens are ids of the same vocabulary"
        )
    if found.context_length < max_model_len:
        raise ConfigurationError(
            f"{named}: it reads at most {found.context_length:,} tokens, and requests may have "
            f"{max_model_len:,}; try --max-model-len {found.context_length}"
        )
    how = choose_quantization(found.config.quantization, "auto")
    if how is not None and not how.dequantize_at_load and attention == registry.EXACT:
        raise ConfigurationError(
            f"{named}: --exact has no products with quantized weights, of draft models either"
        )
    config = replace(found.config, quantization=how)
    check_shard(config, shard.size, shard.expert_parallel)
    if attention not in ("torch", registry.EXACT):
        needs = _Needs(config.head_dim, config.sinks, narrow=narrow)
        if reason := registry.unsupported_reason(attention, _gpu(dtype, needs, ordinal)):
            raise ConfigurationError(f"{named}: attention {attention}: {reason}")
    stored = None
    if settings.load_format != "dummy":
        config, stored = check_checkpoint(folder, config, shard)
    return DraftChoices(folder, config, stored)


def _transformers_spec(
    settings: Settings, folder: Path, outline: ModelOutline, max_model_len: int
) -> TransformersSpec:
    """Returns how transformers builds the model; raises ConfigurationError for settings that such
    models do not support.
    """
    named = f"{outline.architecture} is served through transformers"
    if settings.tp > 1:
        raise ConfigurationError(
            f"{named}, which is not split over ranks: --tp 1, not {settings.tp}"
        )
    if settings.compile or settings.enable_expert_parallel:
        flag = "--compile" if settings.compile else "--enable-expert-parallel"
        raise ConfigurationError(f"{named}: {flag} is for models of pipeinfer's own")
    from pipeinfer.models.transformers_backend import inspect_model  # which imports transformers

    return inspect_model(folder, outline, max_model_len)


def _check_exact(
    settings: Settings, outline: ModelOutline, device: str, dtype: torch.dtype
) -> None:
    """Raises ConfigurationError for settings that would make tokens depend on other requests."""
    config = outline.config
    if device == "cpu" and dtype != torch.float32:
        raise ConfigurationError("--exact: on a CPU only --dtype float32 computes rows alike")
    if settings.compile:
        raise ConfigurationError("--exact: not with --compile, which compiles for numbers of rows")
    if device == "cpu":
        return
    if config is None:
        raise ConfigurationError(
            f"--exact: {outline.architecture} is computed by transformers' layers on a GPU, whose "
            "products depend on the number of rows"
        )
    if config.quantization is not None and not config.quantization.dequantize_at_load:
        raise ConfigurationError(
            "--exact: there are no such products with quantized weights; --quantization none "
            "makes them plain as they are loaded"
        )
    if settings.moe_backend not in ("auto", "triton"):
        raise ConfigurationError(
            f"--exact: not with --moe-backend {settings.moe_backend}; triton keeps it"
        )


def _in_format(outline: ModelOutline, requested: str, in_int4: frozenset[str]) -> ModelOutline:
    """Returns `outline` with the number format of weights that `--quantization` makes of the
    checkpoint's. in_int4: see Quantization.int4_modules.
    """
    if outline.config is None:
        if requested not in ("auto", "none"):
            raise ConfigurationError(
                f"--quantization {requested}: {outline.architecture} is built by "
                "transformers, whose weights are plain"
            )
        return outline
    how = choose_quantization(outline.config.quantization, requested)
    if how is not None and in_int4:
        how = replace(how, int4_modules=in_int4)
    return replace(outline, config=replace(outline.config, quantization=how))


def _device(name: str) -> str:
    """Returns "cuda" if torch sees a GPU, unless the CPU was asked for."""
    if name == "cpu":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    if name == "cuda":
        raise ConfigurationError(
            f"--device cuda: torch {torch.__version__} sees no CUDA GPU; --device cpu needs none"
        )
    return "cpu"


class _Needs(NamedTuple):
    """Demands of a model and its pages that not every attention backend meets.

    Attributes:
    - head_dim: of the model
    - sinks: whether layers have attention sinks
    - soft_cap: whether layers cap their scores
    - narrow: whether keys and values are stored as e4m3
    """

    head_dim: int
    sinks: bool
    soft_cap: bool = False
    narrow: bool = False


def _gpu(dtype: torch.dtype, needs: _Needs, ordinal: int) -> Gpu:
    name = str(dtype).removeprefix("torch.")
    return Gpu(
        torch.cuda.get_device_capability(ordinal),
        name,
        needs.head_dim,
        registry.installed(),
        needs.sinks,
        needs.soft_cap,
        needs.narrow,
    )


def _narrow(name: str, dtype: torch.dtype) -> bool:
    """Whether keys and values are stored as e4m3, else in the model's dtype. Raises
    ConfigurationError for bfloat16 if the model computes in another dtype.
    """
    if name == "bfloat16" and dtype != torch.bfloat16:
        computed = str(dtype).removeprefix("torch.")
        raise ConfigurationError(
            f"--kv-cache-dtype bfloat16: the model computes in {computed}, and so are its keys and "
            "values; --dtype bfloat16 makes both so, --kv-cache-dtype auto takes them as they are"
        )
    return name in ("fp8", FP8)


def _scales(stored: Mapping[str, CheckpointTensor] | None, layers: int) -> tuple[KVScales, ...]:
    """Returns the checkpoint's scales, or 1 for each layer if the checkpoint's tensors are not read
    by our own implementation.
    """
    return (UNIT_KV_SCALES,) * layers if stored is None else read_kv_scales(stored, layers)


def _dtype(name: str, outline: ModelOutline, device: str) -> torch.dtype:
    """Returns the dtype of the computation. `auto` is the checkpoint's dtype, but float32 on a CPU
    without instructions for bfloat16.

    The dtype follows from the CPU alone and not from a measurement: a restarted engine must compute
    the same numbers as before.
    """
    if name == "auto":
        name = outline.dtype
        if device == "cpu" and not (name == "bfloat16" and multiplies_bfloat16()):
            name = "float32"
    return getattr(torch, name)


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for bfloat16: AVX512-BF16 or AMX."""
    known = torch.cpu._is_avx512_bf16_supported()  # pyright: ignore[reportPrivateUsage]
    return known or torch.cpu._is_amx_tile_supported()  # pyright: ignore[reportPrivateUsage]


def _quantization(
    settings: Settings, folder: Path, device: str, dtype: torch.dtype
) -> tuple[str, frozenset[str]]:
    """Returns (the name of --quantization, Quantization.int4_modules). `auto` for a GGUF file of at
    most eight bits, computed in bfloat16 on a CPU, is `int8`, and matrices that have 4 bits in the
    file keep them.

    Raises ConfigurationError for `int8` on a GPU or in another dtype.
    """
    name, fits = settings.quantization, device == "cpu" and dtype == torch.bfloat16
    if name == "int8" and not fits:
        raise ConfigurationError(
            "--quantization int8 is for CPUs, and computes in bfloat16; here it would be "
            f"{str(dtype).removeprefix('torch.')} on {device}"
        )
    if name == "auto" and fits and is_gguf(folder):
        header = read_header(folder)
        if is_low_bit(header):
            dummy = settings.load_format == "dummy"
            return "int8", frozenset() if dummy else int4_modules(header)
    return name, frozenset()
