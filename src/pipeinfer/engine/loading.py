"""From settings and a checkpoint's folder to an engine that can run steps.

Everything that can be wrong with them is found first, in milliseconds and in one line. Knows no
message, no plan and no process.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch

from pipeinfer.attention import registry
from pipeinfer.attention.interface import KeyCenter, KVPool
from pipeinfer.attention.registry import Gpu
from pipeinfer.checkpoint.config import ModelConfig, ModelOutline, read_outline
from pipeinfer.checkpoint.files import weight_files
from pipeinfer.checkpoint.quantization import choose_quantization
from pipeinfer.collectives import TorchCollectives
from pipeinfer.engine.device_memory import DeviceMemory, cuda_obstacle
from pipeinfer.engine.graphs import LargestStep, decode_ladder, mixed_ladder
from pipeinfer.engine.kept_memory import (
    DIRECTORY,
    GRAPH_SIZES,
    KEY_CENTERS,
    POOL,
    STEP_COST,
    WEIGHTS,
    KeptMemory,
    KeptPool,
    model_key,
    unbelieved,
)
from pipeinfer.engine.kv_store import find_key_centers
from pipeinfer.engine.machine import HOST_STEP_TOKENS, HostMachine, Machine
from pipeinfer.engine.runner import Runner
from pipeinfer.engine.sampling import LocalSampler, ShardedSampler
from pipeinfer.engine.sleeping import EngineMemory, ReloadableModel, SleepingWeights
from pipeinfer.engine.start import Start
from pipeinfer.gguf.config import int4_modules, is_low_bit
from pipeinfer.gguf.header import is_gguf, read_header
from pipeinfer.kernels.formats import UNIT_KV_SCALES, KVScales
from pipeinfer.layers.placement import AllocateParameter, Shard
from pipeinfer.malloc import return_freed_memory
from pipeinfer.memory.page_directory import PageChains
from pipeinfer.models.causal_lm import CausalLM, LanguageModel
from pipeinfer.models.loading import (
    CheckpointTensor,
    build_model,
    check_checkpoint,
    check_shard,
    fill_dummy,
    load_weights,
    read_kv_scales,
)
from pipeinfer.runtime.holder_process import keeps_memory
from pipeinfer.runtime.logs import DETAILS
from pipeinfer.settings import ConfigurationError, Settings
from pipeinfer.step_cost import (
    MEASURED_TOKENS,
    StepCost,
    Targets,
    describe_targets,
    max_graph_tokens,
    prefill_budget,
)

if TYPE_CHECKING:
    from pipeinfer.models.transformers_backend import TransformersSpec

TakeMemory = Callable[[], KeptMemory | None]  # None: nothing outlives this process


def no_memory() -> KeptMemory | None:
    """A TakeMemory."""
    return None


AS_THE_MODEL, FP8 = "auto", "fp8_e4m3"  # what keys and values are stored as


@dataclass(frozen=True)
class EngineChoices:
    """What settings and checkpoint come to, before anything is loaded.

    transformers_spec: how transformers builds the model; None: the implementation is our own.
    stored: the checkpoint's tensors by name, for our own implementation; None: random weights.
    kv_scales: of each layer's keys and values, if they
    are stored as e4m3.
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

    @property
    def layers(self) -> int:
        """Layers with attention."""
        if self.transformers_spec is not None:
            return len(self.transformers_spec.attention.shapes)
        return self.config.num_layers

    @property
    def config(self) -> ModelConfig:
        """Of our own implementation."""
        assert self.outline.config is not None, "the model is transformers'"
        return self.outline.config

    @property
    def kv_dtype(self) -> str:
        """As Hello has it."""
        return AS_THE_MODEL if self.kv_scales is None else FP8


@dataclass(frozen=True)
class LoadedEngine:
    """A runner that can run steps, and what it was built for.

    page_size: tokens of a page. pages: of the pool, with the dummy page 0, as in MemoryManager and
    KVPool. max_model_len: tokens of the longest request. max_slots: requests at a time.
    attention: the backend's name (attention/registry.py). dtype: of the model's numbers, as torch
    names it, such as bfloat16. device: "cpu" or "cuda". graph_sizes: numbers of decode rows with a
    CUDA graph, now or later. step_tokens: of the largest step. step_cost: what steps take, None
    where it was not measured. uses_transformers: transformers built the model. kv_dtype: of keys
    and values in pages, AS_THE_MODEL or FP8.
    kept: where memory outlives this process; None: nowhere. memory: what it gives back while it
    sleeps; None: it cannot.
    """

    runner: Runner
    page_size: int
    pages: int
    max_model_len: int
    max_slots: int
    attention: str
    dtype: str
    device: str = "cpu"
    graph_sizes: tuple[int, ...] = ()
    step_tokens: int = HOST_STEP_TOKENS
    step_cost: StepCost | None = None
    uses_transformers: bool = False
    kv_dtype: str = AS_THE_MODEL
    kept: KeptMemory | None = None
    memory: EngineMemory | None = None

    @property
    def kept_pool(self) -> KeptPool | None:
        """The pool's memory, where it outlives this process."""
        return None if self.kept is None else self.kept.opened


def choose_engine(
    settings: Settings, folder: Path, rank: int = 0, ordinal: int | None = None
) -> EngineChoices:
    """Checks settings and checkpoint against each other; of weights it reads what
    `check_checkpoint` says.

    ordinal: of this rank's GPU on its host, by default `rank`.
    Raises ConfigurationError that names the culprit.
    """
    device, ordinal = _device(settings.device), rank if ordinal is None else ordinal
    if settings.standby and device == "cuda" and settings.tp > 1:
        raise ConfigurationError(
            f"--standby: not with --tp {settings.tp} on GPUs yet, where it was never run"
        )
    outline = read_outline(folder, settings.model_impl)
    shard = Shard(rank, settings.tp, settings.enable_expert_parallel)
    max_model_len = outline.max_model_len(settings.max_model_len)
    dtype = _dtype(settings.dtype, outline, device)
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
    attention = registry.resolve(settings.attention, device, gpu)
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
    )


def load_engine(
    settings: Settings,
    folder: Path,
    progress: Callable[[int, int], None] | None = None,
    rank: int = 0,
    start: Start | None = None,
    collectives: TorchCollectives | None = None,
    choices: EngineChoices | None = None,
    kept: TakeMemory = no_memory,
) -> LoadedEngine:
    """Loads rank `rank`; `progress(done, total)` counts bytes of weights, `start` the seconds.
    `collectives`: how several ranks compute together; all of them must be loading. `choices`: what
    `choose_engine` gave for this rank; it is asked here if they are not given. `kept`: gives memory
    that is to outlive this process; it is called once, on a CPU when all is done that needs none.
    A standby's is promoted when this returns.

    Raises ConfigurationError before any weight is read if something does not fit, RuntimeError if
    the files of a model with standbys are others once weights were read: what is kept would belong
    to the model before. What it changes of the process stands in the machines' docstrings.
    """
    choices, start = choices or choose_engine(settings, folder, rank), start or Start()
    with start.phase("weights"):
        chosen = machine(choices.device, settings, choices.ordinal)
    key = b""
    if keeps_memory(settings) or settings.standby:
        key = _memory_key(settings, folder, choices)

    @cache
    def taken() -> KeptMemory | None:
        memory = kept()
        if memory is not None and choices.device == "cuda" and (why := cuda_obstacle()):
            log.warning("memory will not outlive this engine: %s", why)
            memory.promote()  # and a standby has none to wait with
            return None
        if memory is not None:
            memory.begin(key)
        return memory

    if choices.device == "cuda":  # weights may have been left, or room is made for them
        taken()
    kernels = registry.import_packages(choices.attention)  # while weights are read

    def build() -> tuple[Runner, SleepingWeights | None]:
        if collectives is not None:
            with start.phase("ranks"):
                _agree_on_collectives(settings, choices, collectives)
        with start.phase("weights"):
            model, weights = _model(settings, folder, choices, collectives, progress, taken)
            # Else what loading has freed is cut up for small things that stay, and stays with them.
            chosen.trim()
            memory = taken() if choices.device == "cuda" else None
            left = memory is not None and WEIGHTS in memory.taken
            lent = left and memory is not None and memory.is_standby
            # A standby may have waited for long since it looked at the files.
            if settings.standby and not left and _memory_key(settings, folder, choices) != key:
                raise RuntimeError("the model's files have changed since they were looked at")
        with start.phase("attention"):
            kernels.join()
        shape = EngineShape(
            choices.attention,
            choices.page_size,
            choices.max_model_len,
            choices.dtype,
            choices.kv_scales,
        )
        runner = build_runner(model, settings, shape, chosen, collectives, start, taken)
        if lent and weights is not None:
            weights.check()
        return runner, weights

    runner, weights = chosen.build(build)
    memory = taken()
    if memory is not None and memory.taken:
        details.info("an engine before has left: %s", ", ".join(memory.taken))
    loaded = _loaded(choices, settings.max_running, runner, memory)
    if memory is None or weights is None:
        return loaded
    return replace(loaded, memory=EngineMemory(memory, weights, chosen.device.run))


def _memory_key(settings: Settings, folder: Path, choices: EngineChoices) -> bytes:
    """Of pages and weights that another engine may use: see `model_key`."""
    files = [folder]
    if folder.is_dir():
        files = [*folder.glob("*.json")]
        if settings.load_format != "dummy":
            files += weight_files(folder)
    numbers = choices.dtype, choices.kv_dtype, settings.quantization, choices.attention
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    where = choices.device, visible, choices.ordinal, choices.shard
    dummy = settings.seed if settings.load_format == "dummy" else None
    return model_key(files, [*map(str, (*numbers, *where)), dummy, settings.model_impl])


def _loaded(
    choices: EngineChoices, max_slots: int, runner: Runner, kept: KeptMemory | None
) -> LoadedEngine:
    return LoadedEngine(
        runner=runner,
        kept=kept,
        page_size=choices.page_size,
        pages=runner.pool.num_pages,
        max_model_len=choices.max_model_len,
        max_slots=max_slots,
        attention=choices.attention,
        dtype=str(choices.dtype).removeprefix("torch."),
        device=choices.device,
        graph_sizes=runner.graph_sizes,
        step_tokens=runner.largest.tokens,
        step_cost=runner.step_cost,
        uses_transformers=choices.transformers_spec is not None,
        kv_dtype=choices.kv_dtype,
    )


def _model(
    settings: Settings,
    folder: Path,
    choices: EngineChoices,
    collectives: TorchCollectives | None,
    progress: Callable[[int, int], None] | None,
    kept: TakeMemory,
) -> tuple[LanguageModel, SleepingWeights | None]:
    """With its weights; None: they stay where they are as long as the process lives."""
    spec = choices.transformers_spec

    def build(allocate: AllocateParameter | None = None) -> CausalLM:
        return build_model(
            choices.config,
            choices.shard,
            choices.dtype,
            choices.device,
            collectives,
            settings.compile,
            collectives.fusion if collectives else None,
            settings.moe_backend,
            allocate,
        )

    def fill(model: CausalLM) -> None:
        if choices.stored is None:
            fill_dummy(model, settings.seed)
        else:
            load_weights(model, folder, progress, choices.stored)

    plain = spec is None and choices.config.quantization is None
    on_gpu = choices.device == "cuda"
    if on_gpu and (memory := kept()) is not None:
        if plain:
            from pipeinfer.engine.kept_weights import build_with_weights

            return build_with_weights(memory, build, fill, _least(collectives))
        memory.promote()  # there is no room for weights beside others

    def load() -> LanguageModel:
        if spec is not None:
            return _transformers_model(spec, settings, folder, choices, progress)
        model = build()
        fill(model)
        return model

    if on_gpu or not keeps_memory(settings):
        model = load()
        if on_gpu and (memory := kept()) is not None:
            memory.weight_bytes = torch.cuda.memory_allocated()
        return model, None
    model = ReloadableModel(load, return_freed_memory)
    return model, model


def _transformers_spec(
    settings: Settings, folder: Path, outline: ModelOutline, max_model_len: int
) -> TransformersSpec:
    """What transformers is to build; raises ConfigurationError for what it cannot serve here."""
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


def _transformers_model(
    spec: TransformersSpec,
    settings: Settings,
    folder: Path,
    choices: EngineChoices,
    progress: Callable[[int, int], None] | None,
) -> LanguageModel:
    """transformers reads the weights, so there is no progress between nothing and all."""
    from pipeinfer.models.transformers_backend import load_model

    total = 0
    if settings.load_format != "dummy":
        total = sum(file.stat().st_size for file in weight_files(folder))
    if progress is not None and total:
        progress(0, total)
    model = load_model(
        spec,
        None if settings.load_format == "dummy" else folder,
        settings.seed,
        torch.device(choices.device),
        choices.dtype,
        choices.max_model_len,
        registry.padded_head_dim(spec.attention.head_dim, choices.attention),
    )
    if progress is not None and total:
        progress(total, total)
    return model


def machine(device: str, settings: Settings, ordinal: int) -> Machine:
    """What `device` ("cpu" or "cuda") stands for; `ordinal`: of the GPU on its host."""
    if device == "cuda":
        from pipeinfer.engine.machine import CudaMachine  # which needs triton

        return CudaMachine(ordinal, settings.threads)
    return HostMachine(settings.threads, settings.tp)


def _agree_on_collectives(
    settings: Settings, choices: EngineChoices, collectives: TorchCollectives
) -> None:
    """How ranks add up; raises ConfigurationError if their settings differ."""
    if choices.device == "cuda" and settings.all_reduce == "auto":
        collectives.enable_custom_all_reduce(choices.dtype, choices.config.hidden_size)
    split = int(choices.shard.expert_parallel)
    if collectives.all_reduce_min(split) != -collectives.all_reduce_min(
        -split
    ):  # their sums would mean nothing
        raise ConfigurationError(
            "--enable-expert-parallel: given to some ranks of the group and not to others"
        )


def _in_format(outline: ModelOutline, requested: str, in_int4: frozenset[str]) -> ModelOutline:
    """With the number format that `--quantization` makes of the checkpoint's. in_int4: see
    Quantization.int4_modules."""
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
    """ "cuda" where torch sees a GPU, unless the CPU was asked for."""
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
    """What a model and its pages want of attention that not every backend has."""

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
    """Whether keys and values are stored as e4m3, else as the model has them."""
    if name == "bfloat16" and dtype != torch.bfloat16:
        computed = str(dtype).removeprefix("torch.")
        raise ConfigurationError(
            f"--kv-cache-dtype bfloat16: the model computes in {computed}, and so are its keys and "
            "values; --dtype bfloat16 makes both so, --kv-cache-dtype auto takes them as they are"
        )
    return name in ("fp8", FP8)


def _scales(stored: Mapping[str, CheckpointTensor] | None, layers: int) -> tuple[KVScales, ...]:
    """The checkpoint's, if there is one that is ours to read."""
    return (UNIT_KV_SCALES,) * layers if stored is None else read_kv_scales(stored, layers)


def _dtype(name: str, outline: ModelOutline, device: str) -> torch.dtype:
    """`auto` is the checkpoint's dtype, but float32 on a CPU without instructions for bfloat16.

    Which it is follows from the CPU alone and not from a measurement: an engine that starts anew
    must go on with the numbers that it left.
    """
    if name == "auto":
        name = outline.dtype
        if device == "cpu" and not (name == "bfloat16" and multiplies_bfloat16()):
            name = "float32"
    return getattr(torch, name)


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for it: AVX512-BF16 or AMX."""
    known = torch.cpu._is_avx512_bf16_supported()  # pyright: ignore[reportPrivateUsage]
    return known or torch.cpu._is_amx_tile_supported()  # pyright: ignore[reportPrivateUsage]


def _quantization(
    settings: Settings, folder: Path, device: str, dtype: torch.dtype
) -> tuple[str, frozenset[str]]:
    """(the name of --quantization, Quantization.int4_modules). `auto` of a GGUF file of at most
    eight bits, computed in bfloat16 on a CPU, is `int8`, and what the file has in 4 bits stays so.

    Raises ConfigurationError for `int8` where there are no products with it.
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


log, details = logging.getLogger(__name__), logging.getLogger(DETAILS)


@dataclass(frozen=True)
class EngineShape:
    """What a runner is built for: names and sizes that settings and a checkpoint come to.

    scales: of each layer's keys and values if pages hold e4m3, see KVPool.
    """

    attention: str
    page_size: int
    max_model_len: int
    dtype: torch.dtype
    scales: tuple[KVScales, ...] | None = None

    @property
    def pages_each(self) -> int:
        """Of the longest request."""
        return -(-self.max_model_len // self.page_size)


def build_runner(
    model: LanguageModel,
    settings: Settings,
    shape: EngineShape,
    machine: Machine,
    collectives: TorchCollectives | None = None,
    start: Start | None = None,
    take: TakeMemory = no_memory,
) -> Runner:
    """A runner with its pool and graphs; `start` times the phases. `collectives`: of the
    ranks that this one computes with, `model` being its share. `take`: gives what the pool is to
    outlive this process in; a pool that an earlier one left has as many pages as it had.

    Raises ConfigurationError if not a single page fits.
    """
    layers = model.attention_shapes()
    tokens = settings.max_step_tokens or machine.step_tokens
    largest = LargestStep(min(settings.max_running, tokens), tokens, shape.pages_each)
    start = start or Start()
    with start.phase("attention"):
        backend = registry.create(shape.attention, layers, machine.where)

    key_centers = None
    if shape.scales is not None:
        key_centers = _key_centers(model, shape, machine, collectives, take())

    def pool(pages: int, memory: torch.Tensor | None = None) -> KVPool:
        size = (pages, shape.page_size)
        return KVPool(layers, *size, shape.dtype, machine.where, shape.scales, key_centers, memory)

    if collectives is None:
        sampler = LocalSampler(model, machine.kernels)
    else:
        sampler = ShardedSampler(model, collectives, machine.kernels)
    with start.phase("attention"):
        runner = Runner(model, pool(2), backend, largest, sampler, machine.device, machine.kernels)
    with start.phase("warm_up"):
        machine.warm_up(runner, shape.max_model_len)
    kept = take()
    with start.phase("pool"):
        pages = _pool_pages(settings, shape, machine, runner.pool.bytes_per_page, collectives, kept)
        size = pages * runner.pool.bytes_per_page
        pool_of = pages, shape.page_size, size
        sized_by = _sized_by(settings, shape)
        scratch = machine.scratch(size) if kept is not None and kept.is_standby else None
        memory = scratch
        if kept is not None and scratch is None:
            memory = kept.open(*pool_of, machine.allocate, sized_by).memory
        runner.bind(pool(pages, None if memory is None else memory.data))
        if scratch is None:
            _settle_pages(runner, machine, collectives, kept)
    if not settings.no_cuda_graph:
        with start.phase("graphs"):
            _capture(runner, settings, largest, model, start, kept)
    with start.phase("step_times"):
        _measure(runner, settings, collectives, kept)
    if kept is not None and scratch is not None:
        machine.trim()  # what captures have freed is taken by the first steps, and not before
        kept.promote()
        with start.phase("pool"):
            kept.open(*pool_of, partial(_map, scratch), sized_by)
            _settle_pages(runner, machine, collectives, kept)
    if runner.step_cost is not None:
        _log_step_cost(runner.step_cost, settings, tokens)
    return runner


def _map(scratch: DeviceMemory, _size: int, descriptor: int | None) -> DeviceMemory:
    """An Allocate, where there is only scratch."""
    if descriptor is None:
        scratch.take_back()
    else:
        scratch.map(descriptor)
    return scratch


def _settle_pages(
    runner: Runner,
    machine: Machine,
    collectives: TorchCollectives | None,
    kept: KeptMemory | None,
) -> None:
    """All ranks believe the same pages of those that were left, and the others are zero."""
    opened = None if kept is None else kept.opened
    pages, found = runner.pool.num_pages, PageChains.none(runner.pool.page_size)
    if opened is not None:
        found = opened.found
    if collectives is not None:
        found = found.agreed(pages, collectives.all_gather_host)
        if opened is not None:
            opened.found, opened.single_rank = found, False
    if kept is not None and opened is not None and POOL in kept.taken:
        others, zero = unbelieved(pages, found.pages), opened.memory.zero_pages
        machine.device.run(lambda: zero(runner.pool, others))


def _least(collectives: TorchCollectives | None) -> Callable[[int], int]:
    """From a number of this rank to the least of all ranks, which all call it."""
    return int if collectives is None else collectives.all_reduce_min


def _pool_pages(
    settings: Settings,
    shape: EngineShape,
    machine: Machine,
    page_bytes: int,
    collectives: TorchCollectives | None,
    kept: KeptMemory | None,
) -> int:
    """Pages of the pool, with the dummy: as many as one has that engines before have left for the
    same settings, if it is the same on all ranks; else as `--kv-pages` says, or as fit on each of
    them."""
    sized_by, least = _sized_by(settings, shape), _least(collectives)

    def left() -> int:
        """By all ranks; 0: not by all of them, or not by all the same."""
        found = 0 if kept is None else kept.found_pages(shape.page_size, sized_by)
        return found if least(found) == -least(-found) else 0

    found = left()
    if not least(found > 0 and kept is not None and kept.is_standby):
        # A standby has no room for another pool, and waits for no rank that is none.
        if kept is not None:
            kept.promote()
        found = left()
    if found:
        return found
    if kept is not None:
        kept.discard(*({POOL, DIRECTORY} & kept.left))
    shared = None
    if settings.standby:
        shared = 0 if kept is None else kept.weight_bytes
    pages = 1 + (settings.kv_pages or _pages(settings, shape, machine, page_bytes, shared))
    return pages if collectives is None else _agreed(collectives, pages)


def _sized_by(settings: Settings, shape: EngineShape) -> str:
    """The settings that decide on the number of pages: a pool of others is not taken over."""
    if settings.kv_pages:
        return f"{settings.kv_pages} pages"
    beside = " beside a standby" if settings.standby else ""
    steps = settings.max_running, settings.max_step_tokens, shape.pages_each
    return f"{settings.memory_fraction} of the memory{beside}, {steps}"


def _left_to_all(
    kept: KeptMemory | None, name: str, note: bytes, least: Callable[[int], int]
) -> bytes | None:
    """What an engine before has left; None: not on all ranks. Standbys that were not all lent it
    wait until they are to serve: what they found out for themselves would be measured beside the
    steps of others, or not be what pages were stored with."""
    raw = None if kept is None else kept.read(name, note)
    if not least(raw is not None) and kept is not None and kept.is_standby:
        kept.promote()
        raw = kept.read(name, note) if raw is None else raw
    return raw if least(raw is not None) else None


def _measure(
    runner: Runner,
    settings: Settings,
    collectives: TorchCollectives | None,
    kept: KeptMemory | None,
) -> None:
    """What steps take; an engine that another one follows leaves it what it has measured."""
    least = _least(collectives)
    note = repr((runner.largest, runner.graph_sizes, runner.pool.num_pages)).encode()
    raw = _left_to_all(kept, STEP_COST, note, least)
    known = None if raw is None else msgspec.msgpack.decode(raw, type=StepCost)
    runner.measure(partial(all_find, least), known)
    if kept is not None and known is None and runner.measured_cost is not None:
        kept.write(STEP_COST, "measured", note, msgspec.msgpack.encode(runner.measured_cost))


def _key_centers(
    model: LanguageModel,
    shape: EngineShape,
    machine: Machine,
    collectives: TorchCollectives | None,
    kept: KeptMemory | None,
) -> tuple[KeyCenter, ...]:
    """What each layer's keys are stored less, as pages hold e4m3. Pages that were left are of use
    with the centers that they were stored with, and with no others."""
    raw = _left_to_all(kept, KEY_CENTERS, b"", _least(collectives))
    if raw is not None:
        stored = msgspec.msgpack.decode(raw, type=list[bytes | None])
        return tuple(
            None
            if one is None
            else torch.frombuffer(bytearray(one), dtype=torch.float32)
            .view(layer.num_kv_heads, layer.head_dim)
            .to(machine.where)
            for one, layer in zip(stored, model.attention_shapes(), strict=True)
        )
    centers = _find_key_centers(model, shape, machine)
    if kept is not None:
        kept.discard(*({POOL, DIRECTORY} & kept.left))
        numbers = [None if one is None else one.cpu().numpy().tobytes() for one in centers]
        kept.write(KEY_CENTERS, "measured", b"", msgspec.msgpack.encode(numbers))
    return centers


def _find_key_centers(
    model: LanguageModel, shape: EngineShape, machine: Machine
) -> tuple[KeyCenter, ...]:
    found: list[tuple[KeyCenter, ...]] = []
    machine.device.run(
        lambda: found.append(find_key_centers(model, shape.max_model_len, machine.where))
    )
    return found[0]


def all_find(least: Callable[[int], int], slow: Container[int]) -> frozenset[int]:
    """Those of MEASURED_TOKENS that every rank has in its `slow`. least(n): the least of the
    numbers n with which all ranks call it, so every rank must make the same calls."""
    return frozenset(tokens for tokens in MEASURED_TOKENS if least(tokens in slow))


def _agreed(collectives: TorchCollectives, pages: int) -> int:
    """Pages with the dummy that all ranks have room for: each has measured for itself."""
    least = collectives.all_reduce_min(pages)
    if least < pages:
        log.info(
            "rank %d has room for %s pages, but another rank for %s, which all ranks use",
            collectives.rank,
            f"{pages - 1:,}",
            f"{least - 1:,}",
        )
    return least


def _log_step_cost(cost: StepCost, settings: Settings, tokens: int) -> None:
    """What was measured, and what the targets for steps of up to `tokens` tokens make of it."""
    details.info("what steps take, in ms: %s", cost)
    if not settings.mixed_step_tokens:
        targets = Targets(settings.itl_target, settings.ttft_target)
        details.info(
            "%s",
            describe_targets(
                targets, *prefill_budget(0, tokens, cost, targets).within_itl_target()
            ),
        )


def _capture(
    runner: Runner,
    settings: Settings,
    largest: LargestStep,
    model: LanguageModel,
    start: Start,
    kept: KeptMemory | None,
) -> None:
    """Which small sizes have no graph is measured once; an engine leaves it to the next one."""
    sizes = decode_ladder(min(settings.cuda_graph_max_batch, largest.rows))
    budget = max_graph_tokens(settings.mixed_step_tokens, largest.tokens)
    mixed = mixed_ladder(largest.tokens, largest.rows, max(sizes, default=0), budget)
    # Ranks sum within steps, so each step must take the same graph on all of them. That a model
    # cannot be captured is known when its first graph is.
    single_rank = settings.tp == 1
    later = single_rank and not settings.all_graphs_first
    note = repr(sizes).encode()
    raw = _left_to_all(kept, GRAPH_SIZES, note, int) if single_rank else None
    chosen = sizes if raw is None else msgspec.msgpack.decode(raw, type=tuple[int, ...])
    drop_slower = single_rank and raw is None
    try:
        runner.capture(chosen, mixed, start.captured, drop_slower=drop_slower, later=later)
        if kept is not None and drop_slower and runner.graph_sizes:
            kept.write(GRAPH_SIZES, "measured", note, msgspec.msgpack.encode(runner.graph_sizes))
    except RuntimeError as error:
        if not model.capture_may_fail:
            raise
        reason = str(error).strip().splitlines()[0]
        log.warning("no CUDA graphs, every step runs kernel by kernel: %s", reason)
    if sizes and runner.graph_sizes and sizes[-1] < largest.rows:
        log.warning(
            "steps with more than %d decodes run kernel by kernel, several times slower. Steps may "
            "have %d decodes: --cuda-graph-max-batch %d captures graphs for all of them",
            sizes[-1], largest.rows, largest.rows,
        )  # fmt: skip


def _pages(
    settings: Settings, shape: EngineShape, machine: Machine, page_bytes: int, shared: int | None
) -> int:
    """Pages without the dummy: what fits, and no more than all slots can use. shared: as
    Machine.free_for_pages has it."""
    free = machine.free_for_pages(settings.memory_fraction, shared)
    pages = free // page_bytes - 1
    if pages < 1:
        raise ConfigurationError(
            f"no memory for KV pages: {max(free, 0) / 2**20:,.1f} MiB are left for them, a page of "
            f"{shape.page_size} tokens takes {page_bytes:,} bytes; try a higher --memory-fraction, "
            "a smaller --max-step-tokens or --page-size, or --kv-pages"
        )
    return min(pages, settings.max_running * shape.pages_each)
