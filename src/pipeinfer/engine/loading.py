"""Builds an engine that can run steps from settings and a checkpoint's folder: weights, pages,
graphs.

Errors in settings and checkpoint are found before (choices.py), except memory that is too small and
ranks that do not agree. No message, no plan and no process is known here.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Container, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from pipeinfer.attention import registry
from pipeinfer.attention.interface import KeyCenter, KVPool
from pipeinfer.checkpoint.config import ModelConfig
from pipeinfer.checkpoint.files import weight_files
from pipeinfer.checkpoint.lora import read_lora_modules
from pipeinfer.collectives import TorchCollectives
from pipeinfer.engine.choices import AS_THE_MODEL, EngineChoices, choose_engine
from pipeinfer.engine.device_memory import DeviceMemory, cuda_unsupported_reason
from pipeinfer.engine.graphs import StepCapacity, decode_ladder, mixed_ladder
from pipeinfer.engine.kept_memory import (
    DIRECTORY,
    DRAFT_WEIGHTS,
    GRAPH_SIZES,
    KEY_CENTERS,
    POOL,
    STEP_COST,
    WEIGHTS,
    KeptMemory,
    KeptPool,
    model_key,
    unverified,
)
from pipeinfer.engine.kv_store import find_key_centers
from pipeinfer.engine.lora import check_adapter
from pipeinfer.engine.machine import HOST_STEP_TOKENS, HostMachine, Machine
from pipeinfer.engine.runner import Runner
from pipeinfer.engine.sampling import LocalSampler, Sampler, ShardedSampler
from pipeinfer.engine.sleeping import (
    EngineMemory,
    ReloadableModel,
    SleepingWeights,
)
from pipeinfer.engine.start import Start
from pipeinfer.engine.weight_memory import (
    Build,
    Fill,
    build_on_gpu,
    build_on_host,
    no_room_for_weights,
)
from pipeinfer.kernels.formats import UNIT_KV_SCALES, KVScales
from pipeinfer.layers.experts import resolve_backend
from pipeinfer.layers.lora import AdapterBank
from pipeinfer.layers.placement import IN_TORCH, ParameterMemory, packs_matrices
from pipeinfer.layers.weight import unsupported_reason
from pipeinfer.memory.page_directory import PageChains
from pipeinfer.models.causal_lm import CausalLM, LanguageModel
from pipeinfer.models.loading import (
    CheckpointTensor,
    build_model,
    fill_dummy,
    load_weights,
)
from pipeinfer.processes import return_freed_memory
from pipeinfer.runtime.logs import DETAILS
from pipeinfer.runtime.memory_holder import keeps_memory
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
    """A TakeMemory for engines whose memory ends with the process."""
    return None


@dataclass(frozen=True)
class LoadedEngine:
    """A runner that can run steps, and the sizes that it was built for.

    Attributes:
    - runner: the runner
    - page_size: tokens of a page
    - pages: of the pool, with the dummy page 0, as in MemoryManager and KVPool
    - max_model_len: tokens of the longest request
    - max_slots: requests at a time
    - attention: the backend's name (attention/registry.py)
    - dtype: of the model's numbers, as torch names it, such as bfloat16
    - device: "cpu" or "cuda"
    - graph_sizes: numbers of decode rows with a CUDA graph, captured or deferred
    - step_tokens: tokens of the largest step
    - step_cost: measured costs of steps; None: not measured
    - uses_transformers: whether transformers built the model
    - kv_dtype: of keys and values in pages, AS_THE_MODEL or FP8
    - kept: memory that outlives this process; None: there is none
    - memory: what the engine gives back while it sleeps; None: it cannot sleep
    - max_drafts: draft tokens that a row verifies at most
    - max_draft_rows: decodes of a step up to which rows verify drafts
    - draft_model: whether a model makes the drafts
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
    max_drafts: int = 0
    max_draft_rows: int = 0
    draft_model: bool = False

    @property
    def kept_pool(self) -> KeptPool | None:
        """The pool's memory if it outlives this process, else None."""
        return None if self.kept is None else self.kept.opened


HOST_ALLOCATOR = "DefaultCPUAllocator"  # in what torch raises without memory of the host


@contextmanager
def refused_without_memory() -> Generator[None]:
    """Raises ConfigurationError for arrays for which the host has no memory, ever: settings have
    made them so large."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        unmapped = isinstance(error, OSError) and error.errno == errno.ENOMEM
        if not (isinstance(error, MemoryError) or unmapped or HOST_ALLOCATOR in str(error)):
            raise
        [reason, *_] = [*str(error).splitlines(), "none is left"]
        raise ConfigurationError(
            f"this host has no memory for it ({reason}): try a smaller --max-running, "
            "--max-step-tokens, --max-model-len or --kv-pages"
        ) from None


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
    """Loads rank `rank`.

    - progress: progress(done, total) counts bytes of weights
    - start: counts the seconds of each phase
    - collectives: computation with the other ranks, all of which must be loading; None: one rank
    - choices: result of `choose_engine` for this rank; None: it is called here
    - kept: gives memory that is to outlive this process; called once. A standby's memory is
      promoted when this returns

    Raises ConfigurationError before any weight is read if settings and files do not fit,
    RuntimeError if the files have changed when the weights were read and memory is kept: it would
    belong to the earlier model. Effects on the process are listed in the machines' docstrings.
    """
    choices, start = choices or choose_engine(settings, folder, rank), start or Start()
    with start.phase("weights"):
        chosen = machine(choices.device, settings, choices.ordinal)
    files = ModelFiles(settings, folder, choices)

    @cache
    def taken() -> KeptMemory | None:
        memory = kept()
        if memory is not None and choices.device == "cuda" and (why := cuda_unsupported_reason()):
            log.warning("memory will not outlive this engine: %s", why)
            memory.promote()  # and a standby has none to wait with
            return None
        if memory is not None:
            memory.begin(files.key)
        return memory

    memory = None
    if choices.device == "cuda" or keeps_memory(settings):
        memory = taken()  # weights may have been left, or room is made for them
    kernels = registry.import_packages(choices.attention)  # while weights are read

    def build() -> tuple[Runner, list[SleepingWeights]]:
        if collectives is not None:
            with start.phase("ranks"):
                _agree_on_collectives(settings, choices, collectives)
        with start.phase("weights"):
            bank = _adapter_bank(settings, choices)
            builder = ModelBuilder(files, collectives, memory)
            model = builder.target(progress, bank)
            draft = builder.draft()
            # Without trim, the allocator would put small objects that stay into memory that loading
            # has freed, and all of that memory would stay.
            chosen.trim()
            left = memory is not None and WEIGHTS in memory.taken
            lent = left and memory is not None and memory.is_standby
            if not left:  # and a standby may have waited for long since it looked at them
                files.check()
        with start.phase("attention"):
            kernels.join()
        shape = EngineShape(
            choices.attention,
            choices.page_size,
            choices.max_model_len,
            choices.dtype,
            choices.kv_scales,
            bank,
        )
        _check_lora_modules(settings, bank)
        runner = build_runner(model, settings, shape, chosen, collectives, start, taken, draft)
        for one in builder.weights if lent else ():
            one.check()
        return runner, builder.weights

    runner, weights = chosen.build(build)
    memory = taken()
    if memory is not None and memory.taken:
        details.info("an engine before has left: %s", ", ".join(memory.taken))
    loaded = _loaded(choices, runner, memory)
    if memory is None or not weights:
        return loaded
    return replace(loaded, memory=EngineMemory(memory, weights, chosen.device.run, files))


class ModelFiles:
    """WeightFiles of a model, and of its draft model if it has one.

    Attributes:
    - choices: choices from settings and files, as of the last look
    - key: of pages and weights that another engine may use; b"" if none are kept
    - reads_draft: whether the weights of the draft model are read anew when those of the model are
    """

    def __init__(self, settings: Settings, folder: Path, choices: EngineChoices) -> None:
        """Takes note of the files. folder: a checkpoint's folder or a GGUF file."""
        self.settings, self.folder, self.choices = settings, folder, choices
        self.reads_draft = False
        keeps = keeps_memory(settings) or settings.standby
        self.key = self._key_now() if keeps else b""

    def look(self) -> None:
        key, shard = self._key_now(), self.choices.shard
        if key == self.key:
            return
        found = choose_engine(self.settings, self.folder, shard.rank, self.choices.ordinal)
        # Configurations that transformers has read are never equal.
        alike = found.without_files() == self.choices.without_files()
        if not alike or (found.draft is not None and not self.reads_draft):
            raise RuntimeError("the model's files are another model's, which needs a new engine")
        self.choices, self.key = found, key

    def check(self) -> None:
        if self.key and self._key_now() != self.key:
            raise RuntimeError("the model's files have changed since they were looked at")

    def _key_now(self) -> bytes:
        settings, choices = self.settings, self.choices
        checkpoints = [_model_files(settings, self.folder)]
        if choices.draft is not None:  # the draft's keys and values lie in the same pages
            checkpoints.append(_model_files(settings, choices.draft.folder))
        numbers = choices.dtype, choices.kv_dtype, settings.quantization, choices.attention
        numbers = *numbers, settings.exact  # settings of rounding and layout
        numbers = *numbers, torch.__version__, torch.backends.cpu.get_cpu_capability()
        if choices.transformers_spec is None:  # each lays experts out in its own way
            numbers = *numbers, resolve_backend(settings.moe_backend, choices.device)
        else:  # its code computes what is in the pages
            numbers = *numbers, metadata.version("transformers")
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        where = choices.device, visible, choices.ordinal, choices.shard
        dummy = settings.seed if settings.load_format == "dummy" else None
        return model_key(checkpoints, [*map(str, (*numbers, *where)), dummy, settings.model_impl])


def _model_files(settings: Settings, folder: Path) -> list[Path]:
    """Returns files of configuration, and of weights if they are read. folder: a checkpoint's
    folder or a GGUF file.
    """
    if not folder.is_dir():
        return [folder]
    weights = [] if settings.load_format == "dummy" else weight_files(folder)
    return [*folder.glob("*.json"), *weights]


def _loaded(choices: EngineChoices, runner: Runner, kept: KeptMemory | None) -> LoadedEngine:
    return LoadedEngine(
        runner=runner,
        kept=kept,
        page_size=choices.page_size,
        pages=runner.pool.num_pages,
        max_model_len=choices.max_model_len,
        max_slots=runner.largest.rows,
        attention=choices.attention,
        dtype=str(choices.dtype).removeprefix("torch."),
        device=choices.device,
        graph_sizes=runner.graph_sizes,
        step_tokens=runner.largest.tokens,
        step_cost=runner.step_cost,
        uses_transformers=choices.transformers_spec is not None,
        kv_dtype=choices.kv_dtype,
        max_drafts=runner.largest.drafts,
        max_draft_rows=runner.largest.draft_rows,
        draft_model=choices.draft is not None,
    )


class ModelBuilder:
    """Builds the model of `files`, and its draft model.

    Attributes:
    - weights: weights whose memory can be given back; none if the model's own cannot
    """

    def __init__(
        self, files: ModelFiles, collectives: TorchCollectives | None, kept: KeptMemory | None
    ) -> None:
        """Builder for one rank. kept: memory that weights are kept in; None: they are not kept."""
        self._files, self._collectives, self._kept = files, collectives, kept
        self._on_gpu = files.choices.device == "cuda"
        self.weights: list[SleepingWeights] = []

    def target(
        self, progress: Callable[[int, int], None] | None, bank: AdapterBank | None
    ) -> LanguageModel:
        """Returns the model with its weights. bank: for the adapters of its linear layers; None: it
        has none.
        """
        files, settings = self._files, self._files.settings
        spec = files.choices.transformers_spec
        if spec is not None:
            if self._on_gpu and self._kept is not None:
                self._kept.promote()  # there is no room for weights beside others
            model = self._loaded(
                lambda: _transformers_model(
                    spec, settings, files.folder, files.choices, progress, bank
                )
            )
            if self._on_gpu and self._kept is not None:
                self._kept.weight_bytes = torch.cuda.memory_allocated()
            return model

        def fill(model: CausalLM) -> None:
            _fill(settings, files.folder, files.choices.stored, progress, model)

        build = partial(self._build, files.choices.config, settings.compile, bank)
        return self._with_weights(WEIGHTS, build, fill)

    def draft(self) -> LanguageModel | None:
        """Returns the draft model with its weights; None: there is none."""
        files, first = self._files, self._files.choices.draft
        if first is None:
            return None

        def fill(model: CausalLM) -> None:
            draft = files.choices.draft
            assert draft is not None
            _fill(files.settings, draft.folder, draft.stored, None, model)

        target = list(self.weights)
        model = self._with_weights(
            DRAFT_WEIGHTS, partial(self._build, first.config, False, None), fill
        )
        files.reads_draft = len(self.weights) > len(target)
        if not target:
            self.weights.clear()
        return model

    def _build(
        self,
        config: ModelConfig,
        compiled: bool,
        bank: AdapterBank | None,
        memory: ParameterMemory = IN_TORCH,
    ) -> CausalLM:
        settings, choices = self._files.settings, self._files.choices
        collectives = self._collectives
        return build_model(
            config,
            choices.shard,
            choices.dtype,
            choices.device,
            collectives,
            compiled,
            collectives.fusion if collectives else None,
            settings.moe_backend,
            memory,
            settings.exact,
            bank,
        )

    def _with_weights(self, name: str, build: Build, fill: Fill) -> LanguageModel:
        kept = self._kept
        if kept is not None and self._on_gpu:
            model, weights = build_on_gpu(kept, name, build, fill, _least(self._collectives))
            self.weights += [] if weights is None else [weights]
            return model
        if kept is not None and not self._host_unsupported_reason():
            model, weights = build_on_host(kept, name, build, fill)
            self.weights.append(weights)
            return model

        def load() -> LanguageModel:
            model = build(IN_TORCH)
            fill(model)
            return model

        return self._loaded(load)

    def _host_unsupported_reason(self) -> str:
        """The reason why a host's weights cannot be kept, or ""."""
        dtype = self._files.choices.dtype
        found = no_room_for_weights()
        if not found and packs_matrices(torch.device("cpu"), dtype):
            found = unsupported_reason(dtype)
        if found:
            details.info("weights are read by each engine anew: %s", found)
        return found

    def _loaded(self, load: Callable[[], LanguageModel]) -> LanguageModel:
        """Loads a model whose weights are not kept; if the engine can sleep, the model can be
        reloaded.
        """
        if self._on_gpu or not keeps_memory(self._files.settings):
            return load()
        model = ReloadableModel(load, return_freed_memory)
        self.weights.append(model)
        return model


def _fill(
    settings: Settings,
    folder: Path,
    stored: Mapping[str, CheckpointTensor] | None,
    progress: Callable[[int, int], None] | None,
    model: CausalLM,
) -> None:
    """Loads the weights `stored` in `folder` into `model`; None: random weights."""
    if stored is None:
        fill_dummy(model, settings.seed)
    else:
        load_weights(model, folder, progress, stored)


def _adapter_bank(settings: Settings, choices: EngineChoices) -> AdapterBank | None:
    """Returns memory for adapters, of which the model's layers take their parts; None without
    --enable-lora.
    """
    if not settings.enable_lora:
        return None
    where = torch.device(choices.device)
    slots, rank = settings.max_loras, settings.max_lora_rank
    return AdapterBank(slots, rank, choices.dtype, where)


def _check_lora_modules(settings: Settings, bank: AdapterBank | None) -> None:
    """Raises ConfigurationError for an adapter of the settings that does not fit the model."""
    for name, files in read_lora_modules(settings).items():
        assert bank is not None
        try:
            check_adapter(files, bank)
        except ConfigurationError as error:
            raise ConfigurationError(f"--lora-modules {name}: {error}") from None


def _transformers_model(
    spec: TransformersSpec,
    settings: Settings,
    folder: Path,
    choices: EngineChoices,
    progress: Callable[[int, int], None] | None,
    bank: AdapterBank | None,
) -> LanguageModel:
    """Builds a model by transformers, which reads the weights: progress is reported at the
    beginning and at the end.
    """
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
    if bank is not None:
        model.use_adapters(bank)
    if progress is not None and total:
        progress(total, total)
    return model


def machine(device: str, settings: Settings, ordinal: int) -> Machine:
    """Returns the machine of `device` ("cpu" or "cuda"). ordinal: of the GPU on its host."""
    if device == "cuda":
        from pipeinfer.engine.machine import CudaMachine  # which needs triton

        return CudaMachine(ordinal, settings.threads)
    return HostMachine(settings.threads, settings.tp)


def _agree_on_collectives(
    settings: Settings, choices: EngineChoices, collectives: TorchCollectives
) -> None:
    """Chooses how ranks add up; raises ConfigurationError if their settings differ."""
    collectives.in_order = settings.exact
    if choices.device == "cuda" and settings.all_reduce == "auto" and not settings.exact:
        collectives.enable_custom_all_reduce(choices.dtype, choices.config.hidden_size)
    split = int(choices.shard.expert_parallel)
    if collectives.all_reduce_min(split) != -collectives.all_reduce_min(
        -split
    ):  # their sums would mean nothing
        raise ConfigurationError(
            "--enable-expert-parallel: given to some ranks of the group and not to others"
        )


log, details = logging.getLogger(__name__), logging.getLogger(DETAILS)


@dataclass(frozen=True)
class EngineShape:
    """Names and sizes that a runner is built for, from settings and a checkpoint.

    Attributes:
    - attention: the backend's name
    - page_size: tokens of a page
    - max_model_len: tokens of the longest request
    - dtype: of the computation
    - scales: of each layer's keys and values if pages hold e4m3, see KVPool; else None
    - adapters: of the model's linear layers; None: it has none
    """

    attention: str
    page_size: int
    max_model_len: int
    dtype: torch.dtype
    scales: tuple[KVScales, ...] | None = None
    adapters: AdapterBank | None = None

    @property
    def pages_each(self) -> int:
        """Pages of the longest request."""
        return -(-self.max_model_len // self.page_size)


def build_runner(
    model: LanguageModel,
    settings: Settings,
    shape: EngineShape,
    machine: Machine,
    collectives: TorchCollectives | None = None,
    start: Start | None = None,
    take: TakeMemory = no_memory,
    draft: LanguageModel | None = None,
) -> Runner:
    """Builds a runner with its pool and graphs.

    - model: this rank's shard if there are several ranks
    - collectives: computation with the other ranks; None: one rank
    - start: times the phases
    - take: gives memory in which the pool outlives this process; a pool that an earlier engine left
      keeps its number of pages
    - draft: makes draft tokens; its layers are the last ones of the pool. None: no draft model

    Raises ConfigurationError if not a single page fits.
    """
    layers = model.attention_shapes()
    tokens = settings.max_step_tokens or machine.step_tokens
    rows, drafts = min(settings.max_running, tokens), 0
    if settings.speculate != "none":
        drafts = settings.num_speculative_tokens
    draft_rows = min(settings.speculative_max_requests, rows) if drafts else 0
    acceptance = settings.synthetic_acceptance_rate
    largest = StepCapacity(rows, tokens, shape.pages_each, drafts, draft_rows, acceptance)
    start = start or Start()
    with start.phase("attention"):
        backend = registry.create(shape.attention, layers, machine.where)

    key_centers = None
    if shape.scales is not None:
        key_centers = _key_centers(model, shape, machine, collectives, take())

    draft_layers = () if draft is None else draft.attention_shapes()

    def pool(pages: int, memory: torch.Tensor | None = None) -> KVPool:
        scales, centers = shape.scales, key_centers
        if scales is not None and centers is not None:
            scales = *scales, *[UNIT_KV_SCALES] * len(draft_layers)
            centers = *centers, *[None] * len(draft_layers)
        return KVPool(
            (*layers, *draft_layers),
            pages,
            shape.page_size,
            shape.dtype,
            machine.where,
            scales,
            centers,
            memory,
        )

    def sampler(model: LanguageModel) -> Sampler:
        if collectives is None:
            return LocalSampler(model, machine.kernels, settings.exact)
        return ShardedSampler(model, collectives, machine.kernels, settings.exact)

    with start.phase("attention"):
        runner = Runner(
            model, pool(2), backend, largest, sampler(model), machine.device, machine.kernels
        )
        if draft is not None:
            of_draft = registry.create(shape.attention, draft_layers, machine.where)
            runner.use_draft_model(draft, of_draft, sampler(draft))
        if shape.adapters is not None:
            runner.use_adapters(shape.adapters)
    kept = take()
    shares_device = kept is not None and kept.is_standby
    with start.phase("warm_up"):
        machine.warm_up(runner, shape.max_model_len, shares_device)
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
        machine.trim()  # memory that captures have freed is taken by the first steps
        kept.promote()
        with start.phase("pool"):
            kept.open(*pool_of, partial(_map, scratch), sized_by)
            _settle_pages(runner, machine, collectives, kept)
    if runner.step_cost is not None:
        _log_step_cost(runner.step_cost, settings, tokens)
    return runner


def _map(scratch: DeviceMemory, _size: int, descriptor: int | None) -> DeviceMemory:
    """An Allocate that puts memory behind scratch addresses. descriptor: None: new memory."""
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
    """Makes all ranks agree on the verified pages of those that were left, and zeroes the
    others.
    """
    opened = None if kept is None else kept.opened
    pages, found = runner.pool.num_pages, PageChains.none(runner.pool.page_size)
    if opened is not None:
        found = opened.found
    if collectives is not None:
        found = found.agreed(pages, collectives.all_gather_host)
        if opened is not None:
            opened.found, opened.single_rank = found, False
    if kept is not None and opened is not None and POOL in kept.taken:
        others, zero = unverified(pages, found.pages), opened.memory.zero_pages
        machine.device.run(lambda: zero(runner.pool, others))


def _least(collectives: TorchCollectives | None) -> Callable[[int], int]:
    """Returns a function from a number of this rank to the least of all ranks, which must all call
    it.
    """
    return int if collectives is None else collectives.all_reduce_min


def _pool_pages(
    settings: Settings,
    shape: EngineShape,
    machine: Machine,
    page_bytes: int,
    collectives: TorchCollectives | None,
    kept: KeptMemory | None,
) -> int:
    """Returns the number of pages of the pool, with the dummy: the number of a pool that earlier
    engines have left for the same settings, if it is the same on all ranks; else the number of
    `--kv-pages`, or as many as fit on each rank.
    """
    sized_by, least = _sized_by(settings, shape), _least(collectives)

    def left() -> int:
        """Returns the number of pages that were left on all ranks; 0: some rank has none, or
        numbers differ.
        """
        found = 0 if kept is None else kept.found_pages(shape.page_size, sized_by)
        return found if least(found) == -least(-found) else 0

    found = left()
    if not least(found > 0 and kept is not None and kept.is_standby):
        # A standby has no room for another pool, and must not wait for a rank that is no standby.
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
    if settings.kv_pages:
        _check_kv_pages(settings.kv_pages, page_bytes, machine.total_bytes)
    pages = 1 + (settings.kv_pages or _pages(settings, shape, machine, page_bytes, shared))
    return pages if collectives is None else _agreed(collectives, pages)


def _check_kv_pages(kv_pages: int, page_bytes: int, total: int) -> None:
    """Raises ConfigurationError for more pages than the whole device has room for."""
    if kv_pages * page_bytes > total:
        needed, there = kv_pages * page_bytes / 2**30, total / 2**30
        raise ConfigurationError(
            f"--kv-pages {kv_pages:,}: they take {needed:,.1f} GiB, of {there:,.1f} GiB of memory"
        )


def _sized_by(settings: Settings, shape: EngineShape) -> str:
    """Returns the settings that decide on the number of pages, as text: a pool made for other
    settings is not taken over.
    """
    if settings.kv_pages:
        return f"{settings.kv_pages} pages"
    beside = " beside a standby" if settings.standby else ""
    steps = settings.max_running, settings.max_step_tokens, shape.pages_each
    return f"{settings.memory_fraction} of the memory{beside}, {steps}"


def _left_to_all(
    kept: KeptMemory | None, name: str, note: bytes, least: Callable[[int], int]
) -> bytes | None:
    """Returns data that an earlier engine has left on all ranks; None: not on all. Standbys that
    were not all lent the data wait until they serve: their own measurement would run beside the
    steps of others, or would not be what pages were stored with.
    """
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
    """Measures the cost of steps, or takes the measurement of an earlier engine; leaves it for the
    next.
    """
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
    """Returns the vectors that are subtracted from each layer's keys before pages store them as
    e4m3. Pages that were left can only be used with the centers that they were stored with.
    """
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
    """Returns the MEASURED_TOKENS that every rank has in its `slow`. least(n): the least of the
    numbers n with which all ranks call it, so every rank must make the same calls.
    """
    return frozenset(tokens for tokens in MEASURED_TOKENS if least(tokens in slow))


def _agreed(collectives: TorchCollectives, pages: int) -> int:
    """Returns a number of pages, with the dummy, that all ranks have room for: each rank has
    measured for itself.
    """
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
    """Logs the measured costs, and the prefill budget that the targets give for steps of up to
    `tokens` tokens.
    """
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
    largest: StepCapacity,
    model: LanguageModel,
    start: Start,
    kept: KeptMemory | None,
) -> None:
    """Captures the CUDA graphs. The small sizes that need no graph are measured once; an engine
    leaves its list to the next one.
    """
    sizes = decode_ladder(min(settings.cuda_graph_max_batch, largest.rows))
    budget = max_graph_tokens(settings.mixed_step_tokens, largest.tokens)
    mixed = mixed_ladder(largest.tokens, largest.rows, max(sizes, default=0), budget)
    # Ranks sum within steps, so each step must use the same graph on all of them. Whether a model
    # can be captured shows when its first graph is captured.
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
    """Returns pages without the dummy: as many as fit, and no more than all slots can use. shared:
    as in Machine.free_for_pages.
    """
    free = machine.free_for_pages(settings.memory_fraction, shared)
    pages = free // page_bytes - 1
    if pages < 1:
        raise ConfigurationError(
            f"no memory for KV pages: {max(free, 0) / 2**20:,.1f} MiB are left for them, a page of "
            f"{shape.page_size} tokens takes {page_bytes:,} bytes; try a higher --memory-fraction, "
            "a smaller --max-step-tokens or --page-size, or --kv-pages"
        )
    return min(pages, settings.max_running * shape.pages_each)
