"""From settings and a checkpoint's folder to an engine that can run steps.

Everything that can be wrong with them is found first, in milliseconds and in one line. Knows no
message, no plan and no process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from pipeinfer.attention import registry
from pipeinfer.attention.interface import AttentionShape
from pipeinfer.engine.host_memory import available_bytes
from pipeinfer.engine.runner import ModelRunner
from pipeinfer.layers.placement import Shard
from pipeinfer.memory.pool import KVPool, bytes_per_page
from pipeinfer.models.build import build_model, check_shard
from pipeinfer.models.checkpoint import check_checkpoint, fill_dummy, load_weights
from pipeinfer.models.config import ModelConfig, read_config
from pipeinfer.settings import ConfigurationError, Settings

# A pool on the host competes with everything else that runs there, so it is not taken as large as
# it could be; --kv-pages takes more.
MOST_HOST_BYTES = 4 * 2**30


@dataclass(frozen=True)
class EngineChoices:
    """What settings and checkpoint come to, before anything is loaded."""

    config: ModelConfig
    device: str
    dtype: torch.dtype
    attention: str
    page_size: int
    max_model_len: int
    shard: Shard


@dataclass(frozen=True)
class LoadedEngine:
    """`pages` counts the dummy page 0, as MemoryManager and KVPool do."""

    runner: ModelRunner
    config: ModelConfig
    page_size: int
    pages: int
    max_model_len: int
    max_slots: int
    attention: str
    dtype: str


def choose(settings: Settings, folder: Path, rank: int = 0) -> EngineChoices:
    """Checks settings and checkpoint against each other without reading weights.

    Raises ConfigurationError that names the culprit.
    """
    if settings.device == "cuda":
        raise ConfigurationError("--device cuda: this version computes on the CPU only")
    device = "cpu"
    config = read_config(folder)
    check_shard(config, settings.tp)
    attention = registry.resolve(settings.attention, device)
    choices = EngineChoices(
        config,
        device,
        _dtype(settings.dtype, config, device),
        attention,
        registry.resolve_page_size(attention, settings.page_size),
        _max_model_len(settings.max_model_len, config),
        Shard(rank, settings.tp),
    )
    if settings.load_format != "dummy":
        check_checkpoint(folder, config)
    return choices


def load_engine(
    settings: Settings,
    folder: Path,
    progress: Callable[[int, int], None] | None = None,
    rank: int = 0,
) -> LoadedEngine:
    """Loads rank `rank`; `progress(done, total)` counts bytes of weights.

    Raises ConfigurationError before any weight is read if something does not fit. Sets torch's
    number of threads if the settings name one.
    """
    choices = choose(settings, folder, rank)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    model = build_model(choices.config, choices.shard, choices.dtype, choices.device)
    if settings.load_format == "dummy":
        fill_dummy(model, settings.seed)
    else:
        load_weights(model, folder, progress)
    shapes = model.attention_shapes()
    pages = 1 + _usable_pages(settings, choices, shapes)
    pool = KVPool(shapes, pages, choices.page_size, choices.dtype, choices.device)
    backend = registry.create(choices.attention, shapes, choices.device)
    runner = ModelRunner(model, pool, backend, settings.max_running)
    return LoadedEngine(
        runner,
        choices.config,
        choices.page_size,
        pages,
        choices.max_model_len,
        settings.max_running,
        choices.attention,
        str(choices.dtype).removeprefix("torch."),
    )


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
    budget = min(int(available_bytes() * settings.memory_fraction), MOST_HOST_BYTES)
    pages = budget // page_bytes - 1
    if pages < 1:
        raise ConfigurationError(
            f"no memory for KV pages: {budget} bytes are free, a page of {choices.page_size} "
            f"tokens takes {page_bytes}; try a smaller --page-size or --kv-pages"
        )
    return min(pages, settings.max_running * -(-choices.max_model_len // choices.page_size))
