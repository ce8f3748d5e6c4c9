"""Brings a loaded model to life on a machine: warm-up, the KV pool's size, graphs, step times.

Knows settings and shapes; no message, no process and no kind of machine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import partial

import torch

from pipeinfer.attention import registry
from pipeinfer.distributed.collectives import TorchCollectives
from pipeinfer.engine.kv_store import key_shifts
from pipeinfer.engine.machine import Machine
from pipeinfer.engine.rooms import LargestStep, decode_ladder, mixed_ladder
from pipeinfer.engine.runner import Runner
from pipeinfer.engine.sampling import SplitSampler, WholeSampler
from pipeinfer.engine.start import Start
from pipeinfer.kernels.e4m3 import Scales
from pipeinfer.memory.pool import KVPool, Shift
from pipeinfer.models.interface import Model
from pipeinfer.runtime.logs import DETAILS
from pipeinfer.settings import ConfigurationError, Settings
from pipeinfer.step_budget import Targets, most_tokens, prefill_budget, said
from pipeinfer.step_cost import TOKENS, StepCost

log, details = logging.getLogger(__name__), logging.getLogger(DETAILS)


@dataclass(frozen=True)
class Shape:
    """What a runner is built for: names and sizes that settings and a checkpoint come to.

    scales: of each layer's keys and values if pages hold e4m3, see KVPool.
    """

    attention: str
    page_size: int
    max_model_len: int
    dtype: torch.dtype
    scales: tuple[Scales, ...] | None = None

    @property
    def pages_each(self) -> int:
        """Of the longest request."""
        return -(-self.max_model_len // self.page_size)


def build_runner(
    model: Model,
    settings: Settings,
    shape: Shape,
    machine: Machine,
    collectives: TorchCollectives | None = None,
    start: Start | None = None,
) -> Runner:
    """A runner with its pool and graphs; `start` is told what takes how long. `collectives`: of the
    ranks that this one computes with, `model` being its share.

    Raises ConfigurationError if not a single page fits.
    """
    layers = model.attention_shapes()
    tokens = settings.max_step_tokens or machine.step_tokens
    largest = LargestStep(min(settings.max_running, tokens), tokens, shape.pages_each)
    start = start or Start()
    with start.phase("attention"):
        backend = registry.create(shape.attention, layers, machine.where)

    shifts = _shifts(model, shape, machine)

    def pool(pages: int) -> KVPool:
        size = (pages, shape.page_size)
        return KVPool(layers, *size, shape.dtype, machine.where, shape.scales, shifts)

    if collectives is None:
        sampler = WholeSampler(model, machine.kernels)
    else:
        sampler = SplitSampler(model, collectives, machine.kernels)
    with start.phase("attention"):
        runner = Runner(model, pool(2), backend, largest, sampler, machine.device, machine.kernels)
    with start.phase("warm_up"):
        machine.warm_up(runner, shape.max_model_len)
    with start.phase("pool"):
        bytes_each = runner.pool.bytes_per_page
        pages = 1 + (settings.kv_pages or _pages(settings, shape, machine, bytes_each))
        runner.bind(pool(pages if collectives is None else _agreed(collectives, pages)))
    if not settings.no_cuda_graph:
        with start.phase("graphs"):
            _capture(runner, settings, largest, model, start)
    with start.phase("step_times"):
        runner.measure(partial(all_find, int if collectives is None else collectives.smallest))
    if runner.step_cost is not None:
        _tell(runner.step_cost, settings, tokens)
    return runner


def _shifts(model: Model, shape: Shape, machine: Machine) -> tuple[Shift, ...] | None:
    """What each layer's keys are stored less, if pages hold e4m3."""
    if shape.scales is None:
        return None
    found: list[tuple[Shift, ...]] = []
    machine.device.run(lambda: found.append(key_shifts(model, shape.max_model_len, machine.where)))
    return found[0]


def all_find(least: Callable[[int], int], slow: Container[int]) -> frozenset[int]:
    """Of numbers of tokens, those that every rank has in `slow`; least: of what all ranks say."""
    return frozenset(tokens for tokens in TOKENS if least(tokens in slow))


def _agreed(collectives: TorchCollectives, pages: int) -> int:
    """Pages with the dummy that all ranks have room for: each has measured for itself."""
    least = collectives.smallest(pages)
    if least < pages:
        log.info(
            "rank %d has room for %s pages, but another rank for %s, which all ranks use",
            collectives.rank,
            f"{pages - 1:,}",
            f"{least - 1:,}",
        )
    return least


def _tell(cost: StepCost, settings: Settings, tokens: int) -> None:
    """What was measured, and what the targets for steps of up to `tokens` tokens make of it."""
    details.info("what steps take, in ms: %s", cost)
    if not settings.mixed_step_tokens:
        targets = Targets(settings.itl_target, settings.ttft_target)
        details.info("%s", said(targets, *prefill_budget(0, tokens, cost, targets).allows()))


def _capture(
    runner: Runner, settings: Settings, largest: LargestStep, model: Model, start: Start
) -> None:
    sizes = decode_ladder(min(settings.cuda_graph_max_batch, largest.rows))
    budget = most_tokens(settings.mixed_step_tokens, largest.tokens)
    mixed = mixed_ladder(largest.tokens, largest.rows, max(sizes, default=0), budget)
    # Ranks sum within steps, so each step must take the same graph on all of them. That a model
    # cannot be captured is known when its first graph is.
    alone = settings.tp == 1
    later = alone and not settings.all_graphs_first
    try:
        runner.capture(sizes, mixed, start.captured, choose=alone, later=later)
    except RuntimeError as error:
        if not model.may_not_capture:
            raise
        reason = str(error).strip().splitlines()[0]
        log.warning("no CUDA graphs, every step runs kernel by kernel: %s", reason)
    if sizes and runner.graph_sizes and sizes[-1] < largest.rows:
        log.warning(
            "steps with more than %d decodes run kernel by kernel, several times slower: there may "
            "be %d, which --cuda-graph-max-batch %d is for",
            sizes[-1], largest.rows, largest.rows,
        )  # fmt: skip


def _pages(settings: Settings, shape: Shape, machine: Machine, page_bytes: int) -> int:
    """Pages without the dummy: what fits, and no more than all slots can use."""
    free = machine.free_for_pages(settings.memory_fraction)
    pages = free // page_bytes - 1
    if pages < 1:
        raise ConfigurationError(
            f"no memory for KV pages: {max(free, 0) / 2**20:,.1f} MiB are left for them, a page of "
            f"{shape.page_size} tokens takes {page_bytes:,} bytes; try a higher --memory-fraction, "
            "a smaller --max-step-tokens or --page-size, or --kv-pages"
        )
    return min(pages, settings.max_running * shape.pages_each)
