"""From settings and a checkpoint's folder to an engine that can run steps.

Everything that can be wrong with them is found first, in milliseconds and in one line. Knows no
message, no plan and no process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pipeinfer.attention import registry
from pipeinfer.attention.registry import Gpu
from pipeinfer.checkpoint.config import ModelConfig, read_config
from pipeinfer.engine.building import Shape, build_runner
from pipeinfer.engine.machine import HOST_STEP_TOKENS, HostMachine, Machine
from pipeinfer.engine.runner import Runner
from pipeinfer.kernels.e4m3 import ONES, Scales
from pipeinfer.layers.placement import Shard
from pipeinfer.models.build import build_model, check_shard
from pipeinfer.models.causal_lm import CausalLM
from pipeinfer.models.kv_scales import read_scales
from pipeinfer.models.loading import check_checkpoint, fill_dummy, load_weights
from pipeinfer.models.weights import Stored
from pipeinfer.settings import ConfigurationError, Settings
from pipeinfer.step_cost import StepCost

if TYPE_CHECKING:
    from pipeinfer.distributed.collectives import TorchCollectives

AS_THE_MODEL, FP8 = "auto", "fp8_e4m3"  # what keys and values are stored as


@dataclass(frozen=True)
class EngineChoices:
    """What settings and checkpoint come to, before anything is loaded. stored: where weights lie on
    disk, by name; None where they are random. kv_scales: of each layer's keys and values, if they
    are stored as e4m3."""

    config: ModelConfig
    device: str
    dtype: torch.dtype
    attention: str
    page_size: int
    max_model_len: int
    shard: Shard
    stored: Mapping[str, Stored] | None
    kv_scales: tuple[Scales, ...] | None
    ordinal: int

    @property
    def kv_dtype(self) -> str:
        """As Hello has it."""
        return AS_THE_MODEL if self.kv_scales is None else FP8


@dataclass(frozen=True)
class LoadedEngine:
    """`pages` counts the dummy page 0, as MemoryManager and KVPool do.

    graph_sizes: batch sizes with a CUDA graph. step_tokens: the largest step.
    step_cost: what steps take, if it was measured.
    """

    runner: Runner
    config: ModelConfig
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
    kv_dtype: str = AS_THE_MODEL


def choose(
    settings: Settings, folder: Path, rank: int = 0, ordinal: int | None = None
) -> EngineChoices:
    """Checks settings and checkpoint against each other without reading weights.

    ordinal: of this rank's GPU on its host, by default `rank`.
    Raises ConfigurationError that names the culprit.
    """
    device, ordinal = _device(settings.device), rank if ordinal is None else ordinal
    config = read_config(folder)
    shard = Shard(rank, settings.tp, settings.enable_expert_parallel)
    check_shard(config, settings.tp, shard.whole_experts)
    dtype = _dtype(settings.dtype, config, device)
    narrow = _narrow(settings.kv_cache_dtype, dtype)
    gpu = _gpu(dtype, config, ordinal, narrow) if device == "cuda" else None
    attention = registry.resolve(settings.attention, device, gpu)
    stored = None if settings.load_format == "dummy" else check_checkpoint(folder, config)
    return EngineChoices(
        config=config,
        device=device,
        dtype=dtype,
        attention=attention,
        page_size=registry.resolve_page_size(attention, settings.page_size),
        max_model_len=_max_model_len(settings.max_model_len, config),
        shard=shard,
        stored=stored,
        kv_scales=_scales(stored, config) if narrow else None,
        ordinal=ordinal,
    )


def load_engine(
    settings: Settings,
    folder: Path,
    progress: Callable[[int, int], None] | None = None,
    rank: int = 0,
    graph_progress: Callable[[int, int], None] | None = None,
    collectives: TorchCollectives | None = None,
    choices: EngineChoices | None = None,
) -> LoadedEngine:
    """Loads rank `rank`; `progress(done, total)` counts bytes of weights, `graph_progress` graphs.
    `collectives`: how several ranks compute together; all of them must be loading. `choices`: what
    `choose` gave for this rank; it is asked here if they are not given.

    Raises ConfigurationError before any weight is read if something does not fit. What it changes
    of the process stands in the machines' docstrings.
    """
    choices = choices or choose(settings, folder, rank)
    chosen = machine(choices.device, settings, choices.ordinal)

    def build() -> Runner:
        if collectives is not None:
            _prepare(settings, choices, collectives)
        model = _model(settings, folder, choices, collectives, progress)
        shape = Shape(
            choices.attention,
            choices.page_size,
            choices.max_model_len,
            choices.dtype,
            choices.kv_scales,
        )
        return build_runner(model, settings, shape, chosen, collectives, graph_progress)

    return _loaded(choices, settings.max_running, chosen.build(build))


def _loaded(choices: EngineChoices, max_slots: int, runner: Runner) -> LoadedEngine:
    return LoadedEngine(
        runner=runner,
        config=choices.config,
        page_size=choices.page_size,
        pages=runner.pool.pages,
        max_model_len=choices.max_model_len,
        max_slots=max_slots,
        attention=choices.attention,
        dtype=str(choices.dtype).removeprefix("torch."),
        device=choices.device,
        graph_sizes=runner.graph_sizes,
        step_tokens=runner.largest.tokens,
        step_cost=runner.step_cost,
        kv_dtype=choices.kv_dtype,
    )


def _model(
    settings: Settings,
    folder: Path,
    choices: EngineChoices,
    collectives: TorchCollectives | None,
    progress: Callable[[int, int], None] | None,
) -> CausalLM:
    """With its weights."""
    model = build_model(
        choices.config,
        choices.shard,
        choices.dtype,
        choices.device,
        collectives,
        settings.compile,
        collectives.fusion if collectives else None,
    )
    if choices.stored is None:
        fill_dummy(model, settings.seed)
    else:
        load_weights(model, folder, progress, choices.stored)
    return model


def machine(device: str, settings: Settings, ordinal: int) -> Machine:
    """What `device` ("cpu" or "cuda") stands for; `ordinal`: of the GPU on its host."""
    if device == "cuda":
        from pipeinfer.engine.cuda.machine import CudaMachine  # which needs triton

        return CudaMachine(ordinal, settings.threads)
    return HostMachine(settings.threads, settings.tp)


def _prepare(settings: Settings, choices: EngineChoices, collectives: TorchCollectives) -> None:
    """How ranks add up; raises ConfigurationError if they were told different things."""
    if choices.device == "cuda" and settings.all_reduce == "auto":
        collectives.use_custom(choices.dtype, choices.config.hidden_size)
    split = int(choices.shard.whole_experts)
    if collectives.smallest(split) != -collectives.smallest(
        -split
    ):  # their sums would mean nothing
        raise ConfigurationError(
            "--enable-expert-parallel: given to some ranks of the group and not to others"
        )


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


def _narrow(name: str, dtype: torch.dtype) -> bool:
    """Whether keys and values are stored as e4m3, else as the model has them."""
    if name == "bfloat16" and dtype != torch.bfloat16:
        computed = str(dtype).removeprefix("torch.")
        raise ConfigurationError(
            f"--kv-cache-dtype bfloat16: the model computes in {computed}, and so are its keys and "
            "values; --dtype bfloat16 makes both so, --kv-cache-dtype auto takes them as they are"
        )
    return name in ("fp8", FP8)


def _scales(stored: Mapping[str, Stored] | None, config: ModelConfig) -> tuple[Scales, ...]:
    """The checkpoint's, if there is one."""
    layers = config.num_layers
    return (ONES,) * layers if stored is None else read_scales(stored, layers)


def _gpu(dtype: torch.dtype, config: ModelConfig, rank: int, narrow: bool) -> Gpu:
    name = str(dtype).removeprefix("torch.")
    capability = torch.cuda.get_device_capability(rank)
    return Gpu(capability, name, config.head_dim, registry.installed(), config.sinks, narrow)


def _dtype(name: str, config: ModelConfig, device: str) -> torch.dtype:
    """`auto` is the checkpoint's dtype, but float32 on a CPU.

    Few CPUs multiply 16-bit matrices fast, and those that do not are several times slower than in
    float32; who has one says --dtype bfloat16.
    """
    if name == "auto":
        name = "float32" if device == "cpu" else config.dtype
    return getattr(torch, name)


def _max_model_len(asked: int, config: ModelConfig) -> int:
    limit = config.context_length
    if asked > limit:
        raise ConfigurationError(
            f"--max-model-len: {asked} is more than the checkpoint's {limit} tokens"
        )
    return asked or limit
