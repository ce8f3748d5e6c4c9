"""From settings and a checkpoint's folder to an engine that can run steps.

Everything that can be wrong with them is found first, in milliseconds and in one line. Knows no
message, no plan and no process.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pipeinfer.attention import registry
from pipeinfer.attention.registry import Gpu
from pipeinfer.engine.host_memory import available_bytes
from pipeinfer.engine.runner import ModelRunner
from pipeinfer.engine.sampler import HostSampler
from pipeinfer.engine.sharded_sampler import SplitHostSampler
from pipeinfer.layers.placement import Shard
from pipeinfer.memory.pool import KVPool, bytes_per_page
from pipeinfer.models.build import build_model, check_shard
from pipeinfer.models.causal_lm import CausalLM
from pipeinfer.models.checkpoint import check_checkpoint, fill_dummy, load_weights
from pipeinfer.models.config import ModelConfig, read_config
from pipeinfer.models.weights import Stored
from pipeinfer.settings import ConfigurationError, Settings
from pipeinfer.step_cost import StepCost
from pipeinfer.steps.shape import AttentionShape

if TYPE_CHECKING:
    from pipeinfer.distributed.group import TorchGroup
    from pipeinfer.engine.cuda.runner import CudaRunner

log = logging.getLogger(__name__)

# A pool on the host competes with everything else that runs there, so it is not taken as large as
# it could be; --kv-pages takes more.
MOST_HOST_BYTES = 4 * 2**30
CPU_STEP_TOKENS = 2048
SWITCH_SECONDS = 2e-4


@dataclass(frozen=True)
class EngineChoices:
    """What settings and checkpoint come to, before anything is loaded. stored: where weights lie on
    disk, by name; None where they are random."""

    config: ModelConfig
    device: str
    dtype: torch.dtype
    attention: str
    page_size: int
    max_model_len: int
    shard: Shard
    stored: Mapping[str, Stored] | None


@dataclass(frozen=True)
class LoadedEngine:
    """`pages` counts the dummy page 0, as MemoryManager and KVPool do.

    graph_sizes: batch sizes with a CUDA graph. step_tokens: the largest step.
    step_cost: what steps take, if it was measured.
    """

    runner: ModelRunner | CudaRunner
    config: ModelConfig
    page_size: int
    pages: int
    max_model_len: int
    max_slots: int
    attention: str
    dtype: str
    device: str = "cpu"
    graph_sizes: tuple[int, ...] = ()
    step_tokens: int = CPU_STEP_TOKENS
    step_cost: StepCost | None = None


def choose(
    settings: Settings, folder: Path, rank: int = 0, place: int | None = None
) -> EngineChoices:
    """Checks settings and checkpoint against each other without reading weights.

    place: of this rank's GPU on its host, by default `rank`.
    Raises ConfigurationError that names the culprit.
    """
    device = _device(settings.device)
    config = read_config(folder)
    shard = Shard(rank, settings.tp, settings.enable_expert_parallel)
    check_shard(config, settings.tp, shard.whole_experts)
    dtype = _dtype(settings.dtype, config, device)
    gpu = _gpu(dtype, config, rank if place is None else place) if device == "cuda" else None
    attention = registry.resolve(settings.attention, device, gpu)
    return EngineChoices(
        config,
        device,
        dtype,
        attention,
        registry.resolve_page_size(attention, settings.page_size),
        _max_model_len(settings.max_model_len, config),
        shard,
        None if settings.load_format == "dummy" else check_checkpoint(folder, config),
    )


def load_engine(
    settings: Settings,
    folder: Path,
    progress: Callable[[int, int], None] | None = None,
    rank: int = 0,
    graph_progress: Callable[[int, int], None] | None = None,
    group: TorchGroup | None = None,
    place: int | None = None,
    choices: EngineChoices | None = None,
) -> LoadedEngine:
    """Loads rank `rank`; `progress(done, total)` counts bytes of weights, `graph_progress` graphs.
    `group`: how several ranks compute together; all of them must be loading. `place`: see `choose`,
    which gave `choices`, or is asked here.

    Raises ConfigurationError before any weight is read if something does not fit. Sets torch's
    number of threads if the settings name one, and on a GPU its current device and how long Python
    lets a thread run.
    """
    choices = choices or choose(settings, folder, rank, place)
    _prepare(settings, choices, group, rank if place is None else place)
    model = build_model(choices.config, choices.shard, choices.dtype, choices.device, group,
                        settings.compile, group.fusion if group else None)  # fmt: skip
    if choices.stored is None:
        fill_dummy(model, settings.seed)
    else:
        load_weights(model, folder, progress, choices.stored)
    if choices.device == "cuda":
        from pipeinfer.engine.cuda.building import GPU_STEP_TOKENS, build_runner

        runner = build_runner(
            model, model.attention_shapes(), settings, attention=choices.attention,
            page_size=choices.page_size, max_model_len=choices.max_model_len, dtype=choices.dtype,
            progress=graph_progress, agree=partial(_agreed, group) if group is not None else None,
            ranks=group,
        )  # fmt: skip
        return _loaded(settings, choices, runner, runner.graph_sizes, GPU_STEP_TOKENS)
    runner = _host_runner(settings, choices, model, group)
    return _loaded(settings, choices, runner, (), CPU_STEP_TOKENS)


def _prepare(
    settings: Settings, choices: EngineChoices, group: TorchGroup | None, place: int
) -> None:
    """Threads, the current device, and how ranks on GPUs add up."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    elif choices.device == "cpu" and settings.tp > 1:
        torch.set_num_threads(max(torch.get_num_threads() // settings.tp, 1))
    if choices.device == "cuda":
        # The thread that launches steps must not wait 5 ms, the default, for another one of Python.
        sys.setswitchinterval(SWITCH_SECONDS)
        torch.cuda.set_device(place)
        if group is not None and settings.all_reduce == "auto":
            group.use_custom(choices.dtype, choices.config.hidden_size)
    if group is not None:
        split = int(choices.shard.whole_experts)
        if group.smallest(split) != -group.smallest(-split):  # their sums would mean nothing
            raise ConfigurationError(
                "--enable-expert-parallel: given to some ranks of the group and not to others"
            )


def _host_runner(
    settings: Settings, choices: EngineChoices, model: CausalLM, group: TorchGroup | None
) -> ModelRunner:
    shapes = model.attention_shapes()
    pages = 1 + _usable_pages(settings, choices, shapes)
    if group is not None:
        pages = _agreed(group, pages)
    pool = KVPool(shapes, pages, choices.page_size, choices.dtype, choices.device)
    backend = registry.create(choices.attention, shapes, pool.device)
    sampler = HostSampler(model) if group is None else SplitHostSampler(model, group)
    return ModelRunner(model, pool, backend, settings.max_running, sampler)


def _agreed(group: TorchGroup, pages: int) -> int:
    """Pages with the dummy that all ranks have room for: each has measured for itself."""
    least = group.smallest(pages)
    if least < pages:
        log.info(
            "rank %d has room for %s pages, but another rank for %s, which all ranks use",
            group.rank, f"{pages - 1:,}", f"{least - 1:,}",
        )  # fmt: skip
    return least


def _loaded(
    settings: Settings,
    choices: EngineChoices,
    runner: ModelRunner | CudaRunner,
    graph_sizes: tuple[int, ...],
    step_tokens: int,
) -> LoadedEngine:
    return LoadedEngine(
        runner,
        choices.config,
        choices.page_size,
        runner.pool.pages,
        choices.max_model_len,
        settings.max_running,
        choices.attention,
        str(choices.dtype).removeprefix("torch."),
        choices.device,
        graph_sizes,
        settings.max_step_tokens or step_tokens,
        runner.step_cost,
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


def _gpu(dtype: torch.dtype, config: ModelConfig, rank: int) -> Gpu:
    name = str(dtype).removeprefix("torch.")
    capability = torch.cuda.get_device_capability(rank)
    return Gpu(capability, name, config.head_dim, registry.installed())


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


def _usable_pages(settings: Settings, choices: EngineChoices, shapes: list[AttentionShape]) -> int:
    """Pages without the dummy: --kv-pages, or what memory allows and requests can use."""
    if settings.kv_pages:
        return settings.kv_pages
    page_bytes = bytes_per_page(shapes, choices.page_size, choices.dtype)
    free = available_bytes() // choices.shard.size  # the ranks share this host
    budget = min(int(free * settings.memory_fraction), MOST_HOST_BYTES)
    pages = budget // page_bytes - 1
    if pages < 1:
        raise ConfigurationError(
            f"no memory for KV pages: {budget} bytes are free, a page of {choices.page_size} "
            f"tokens takes {page_bytes}; try a smaller --page-size or --kv-pages"
        )
    return min(pages, settings.max_running * -(-choices.max_model_len // choices.page_size))
