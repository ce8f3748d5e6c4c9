"""Brings a loaded model to life on a GPU: warm-up, the KV pool's size, CUDA graphs.

Knows settings and shapes; no message and no process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from pipeinfer.attention import registry
from pipeinfer.engine.cuda.memory import free_for_pages, warm_up
from pipeinfer.engine.cuda.rooms import Limits, decode_ladder, mixed_ladder
from pipeinfer.engine.cuda.runner import CudaRunner
from pipeinfer.engine.cuda.sampling import Ranks, SplitSampler
from pipeinfer.memory.pool import KVPool, bytes_per_page
from pipeinfer.settings import ConfigurationError, Settings
from pipeinfer.step_budget import Targets, mixed_budget, most_tokens, said
from pipeinfer.step_cost import StepCost
from pipeinfer.steps.shape import AttentionShape

log = logging.getLogger(__name__)

GPU_STEP_TOKENS = 8192


def build_runner(
    model: Any,
    shapes: list[AttentionShape],
    settings: Settings,
    *,
    attention: str,
    page_size: int,
    max_model_len: int,
    dtype: torch.dtype,
    progress: Callable[[int, int], None] | None = None,
    agree: Callable[[int], int] | None = None,
    ranks: Ranks | None = None,
) -> CudaRunner:
    """A runner with its pool and graphs; progress(done, total) counts the graphs. `agree`: makes
    of the pages that each rank found room for what all of them have. `ranks`: whom this one
    samples with, `model` being a CausalLM's part.

    Raises ConfigurationError if not a single page fits.
    """
    pages_each = -(-max_model_len // page_size)
    tokens = settings.max_step_tokens or GPU_STEP_TOKENS
    limits = Limits(min(settings.max_running, tokens), tokens, pages_each)
    device = torch.device("cuda", torch.cuda.current_device())
    backend = registry.create(attention, shapes, device)
    sampler = SplitSampler(model, ranks) if ranks is not None else None
    tiny = KVPool(shapes, 2, page_size, dtype, device)
    runner = CudaRunner(model, tiny, backend, limits, sampler)
    warm_up(runner, limits, page_size, max_model_len)
    pages = 1 + (settings.kv_pages or _pages(settings, shapes, page_size, dtype, pages_each))
    if agree is not None:
        pages = agree(pages)
    runner.bind(KVPool(shapes, pages, page_size, dtype, device))
    if not settings.no_cuda_graph:
        _capture(runner, settings, limits, progress)
    runner.measure()
    if runner.step_cost is not None:
        _tell(runner.step_cost, settings, tokens)
    return runner


def _tell(cost: StepCost, settings: Settings, tokens: int) -> None:
    """What was measured, and what the targets for steps of up to `tokens` tokens make of it."""
    log.info("what steps take, in ms: %s", cost)
    if not settings.mixed_step_tokens:
        targets = Targets(settings.itl_target, settings.ttft_target)
        log.info("%s", said(targets, *mixed_budget(0, tokens, cost, targets).allows()))


def _capture(
    runner: CudaRunner,
    settings: Settings,
    limits: Limits,
    progress: Callable[[int, int], None] | None,
) -> None:
    sizes = decode_ladder(min(settings.cuda_graph_max_batch, limits.rows))
    budget = most_tokens(settings.mixed_step_tokens, limits.tokens)
    mixed = mixed_ladder(limits.tokens, limits.rows, max(sizes, default=0), budget)
    runner.capture(sizes, mixed, progress, choose=settings.tp == 1)


def _pages(
    settings: Settings,
    shapes: list[AttentionShape],
    page_size: int,
    dtype: torch.dtype,
    pages_each: int,
) -> int:
    """Pages without the dummy: what fits, and no more than all slots can use."""
    free = free_for_pages(settings.memory_fraction)
    page_bytes = bytes_per_page(shapes, page_size, dtype)
    pages = free // page_bytes - 1
    if pages < 1:
        raise ConfigurationError(
            f"no memory for KV pages: {free / 2**30:.2f} GiB of the GPU are left for them, a page "
            f"of {page_size} tokens takes {page_bytes} bytes; try a higher --memory-fraction, or a "
            "smaller --max-step-tokens"
        )
    return min(pages, settings.max_running * pages_each)
