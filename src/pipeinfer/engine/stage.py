"""Builds the engine stage: loads the model, sizes the pool, warms up.

Everything heavy is imported here, inside `build`, so that the process shows its heartbeat first.
"""

from __future__ import annotations

import gc
import logging
import os
from functools import partial
from typing import TYPE_CHECKING, Any

from pipeinfer.checkpoint.source import find_model
from pipeinfer.command_line import counted
from pipeinfer.control import Prefix
from pipeinfer.core import engine_id, stage_id
from pipeinfer.engine.start import GIB, Start, preload_torch, process_age
from pipeinfer.messages import PROTOCOL, Hello, State
from pipeinfer.processes import return_freed_memory
from pipeinfer.runtime.entry import on_gpus, usable_cores
from pipeinfer.runtime.logs import DETAILS
from pipeinfer.runtime.memory_holder import keeps_memory
from pipeinfer.runtime.stage import Stage, StageContext
from pipeinfer.version import __version__
from pipeinfer.wire import pack

if TYPE_CHECKING:
    from pathlib import Path

    from pipeinfer.collectives import TorchCollectives
    from pipeinfer.engine.executor import DeviceDriver
    from pipeinfer.engine.kept_memory import KeptMemory
    from pipeinfer.engine.loading import LoadedEngine
    from pipeinfer.engine.masks import Masks
    from pipeinfer.engine.profiling import StepProfile
    from pipeinfer.memory.prefix_cache import PrefixCache
    from pipeinfer.settings import Settings

log, details = logging.getLogger(__name__), logging.getLogger(DETAILS)
MEETING = 120.0  # seconds that ranks wait for each other while they start


def build(context: StageContext) -> Stage:
    """Builds the stage. Raises ConfigurationError, before any weight is read, for a checkpoint that
    does not fit the settings.
    """
    settings, identity = context.settings, context.identity
    state: State = "starting"

    def say(text: str) -> None:
        context.report_status(state, text)

    def wait() -> None:
        """For a standby: returns when it is to serve."""
        nonlocal context
        with start.waiting():
            context = context.promoted()

    def kept_memory() -> KeptMemory | None:
        """Returns the link to memory that outlives this process. A standby is lent memory; if none
        is kept, a standby waits here until it is to serve.
        """
        until = wait if context.promotion is not None else None
        if keeps_memory(settings):
            return KeptMemory.from_environment(os.environ, until)
        wait()
        return None

    start = Start(say)
    start.took("process", process_age())
    folder = find_model(settings, context.log_progress)
    ordinal = context.topology.gpu(identity.id)
    with start.phase("imports"):
        libraries = preload_torch(None if settings.device == "cpu" else ordinal)
        try:
            masks = _masks(settings, folder, context.identity.rank)
        finally:
            libraries.join()

        from pipeinfer.engine.choices import AS_THE_MODEL, choose_engine
        from pipeinfer.engine.core import EngineCore
        from pipeinfer.engine.kept_memory import KeptMemory
        from pipeinfer.engine.loading import load_engine, refused_without_memory
        from pipeinfer.engine.profiling import StepProfile, profile_path
        from pipeinfer.memory.manager import MemoryManager
        from pipeinfer.memory.page_directory import ChainTracker

        if not settings.in_process:  # modules stay: no search for garbage meanwhile looks at them
            gc.freeze()
    profile = profile_path(settings, identity.id)
    with start.phase("checks"):
        choices = choose_engine(settings, folder, identity.rank, ordinal)
    state = "loading"
    with start.phase("ranks"):
        collectives = _collectives(context, choices.device, ordinal)
    with refused_without_memory():
        loaded = load_engine(
            settings, folder, start.read, identity.rank, start, collectives, choices, kept_memory
        )
        chains = None
        if loaded.kept_pool is not None:
            chains = ChainTracker(loaded.pages, loaded.page_size, loaded.max_slots)
        memory = MemoryManager(
            loaded.pages,
            loaded.page_size,
            loaded.max_slots,
            loaded.max_model_len,
            settings.cache,
            chains,
        )
    if identity.rank == 0:
        log.info("%s", _placed(settings, loaded, ordinal))
    details.info(
        "keys and values in %s, %s pages of %s tokens, attention %s",
        loaded.kv_dtype if loaded.kv_dtype != AS_THE_MODEL else loaded.dtype,
        f"{loaded.pages - 1:,}",
        loaded.page_size,
        loaded.attention,
    )
    scheduler = stage_id("scheduler", identity.group)
    core = EngineCore(
        _hello(context, loaded), scheduler, memory, loaded.runner.phases.span, loaded.runner.shares
    )
    if masks is not None and loaded.device != "cpu":
        with start.phase("vocabulary"):
            masks.wait()
    if loaded.device == "cpu":  # memory that was only needed to read weights
        return_freed_memory()
    details.info("started: %s", start, extra={"start": start.seconds, "graphs": start.graphs})
    profile_observer = None
    if profile is not None:
        profile_observer = StepProfile(settings.profile, profile, loaded.runner.phases)
    driver = _driver(loaded, profile_observer, masks, start)
    return Stage(
        core,
        driver,
        0.1,
        ((scheduler, "plan"),),
        _facts(loaded),
        prefixes=partial(_prefixes, memory.cache),
    )


def _placed(settings: Settings, loaded: LoadedEngine, ordinal: int) -> str:
    """Returns the text of what runs where, and for how many tokens there is memory. ordinal: this
    rank's GPU.
    """
    import torch

    if loaded.device == "cpu":
        threads = torch.get_num_threads()
        where = f"the CPU with {counted(threads, 'thread')}"
    else:
        where = f"GPU {ordinal} ({torch.cuda.get_device_name(ordinal)})"
    others = f" and {settings.tp - 1} more" if settings.tp > 1 else ""
    tokens = (loaded.pages - 1) * loaded.page_size
    return (
        f"{settings.model_name} runs on {where}{others}, in {loaded.dtype}; memory for {tokens:,} "
        f"tokens ({loaded.runner.pool.total_bytes / GIB:.2f} GiB)"
    )


def _prefixes(cache: PrefixCache, count: int, ids: int) -> tuple[Prefix, ...]:
    """Returns the cache's largest prefixes as messages."""
    return tuple(
        Prefix(
            tokens=one.num_tokens,
            sequences=one.num_sequences,
            locks=one.num_locks,
            first=pack(one.first_ids),
        )
        for one in cache.largest(count, ids)
    )


def _hello(context: StageContext, loaded: LoadedEngine) -> Hello:
    settings = context.settings
    return Hello(
        protocol=PROTOCOL,
        version=__version__,
        rank=context.identity.rank,
        tp=settings.tp,
        incarnation=context.incarnation,
        model=settings.model_name,
        page_size=loaded.page_size,
        pages=loaded.pages - 1,
        max_slots=loaded.max_slots,
        max_model_len=loaded.max_model_len,
        attention=loaded.attention,
        graph_sizes=loaded.graph_sizes,
        step_tokens=loaded.step_tokens,
        step_cost=loaded.step_cost,
        kv_dtype=loaded.kv_dtype,
        max_drafts=loaded.max_drafts,
        max_draft_rows=loaded.max_draft_rows,
        draft_model=loaded.draft_model,
    )


def _facts(loaded: LoadedEngine) -> dict[str, Any]:
    """Returns the facts that a replay needs to build the same engine; `pages` counts the dummy
    page.
    """
    import torch

    names = (
        "pages", "page_size", "max_slots", "max_model_len", "attention", "dtype", "device",
        "graph_sizes", "step_tokens", "step_cost", "kv_dtype", "max_drafts", "max_draft_rows",
        "draft_model",
    )  # fmt: skip
    facts = {name: getattr(loaded, name) for name in names}
    keeps = loaded.kept_pool is not None
    return {"threads": torch.get_num_threads(), "keeps_pages": keeps, **facts}


def _collectives(context: StageContext, device: str, ordinal: int) -> TorchCollectives | None:
    """Joins the other ranks, and waits for them; None: there are none. ordinal: this rank's GPU."""
    size, identity = context.settings.tp, context.identity
    if size == 1:
        return None
    import zmq

    from pipeinfer.bus.bus import SocketFactory
    from pipeinfer.collectives import join_group

    context.report_status("loading", "waiting for the other ranks")
    first = context.topology.address(engine_id(identity.group, 0))
    # Longer than the scheduler's patience, because the scheduler reports the reason.
    timeout = max(MEETING, context.settings.watchdog + 10)
    shared = zmq.Context[zmq.Socket[bytes]].instance()
    wires = SocketFactory(context.topology, shared, identity.id)
    wires.load_keys(authenticate=False)  # the bus has it
    return join_group(first, identity.rank, size, device, timeout, ordinal, wires)


def _masks(settings: Settings, folder: Path, rank: int) -> Masks | None:
    """Returns the masks for requests with a grammar; None: grammars are off. For a GPU, rank 0's
    vocabulary is built while torch's libraries are loaded: it holds the interpreter, which little
    else at the start leaves free. On a CPU its memory counts for more than the steps that the first
    grammar delays.
    """
    if settings.grammar_backend == "none":
        return None
    from pipeinfer.engine.masks import GrammarMasks, ReceivedMasks

    if rank > 0:
        return ReceivedMasks()
    from pipeinfer.grammars.compiling import GrammarStore
    from pipeinfer.text import grammar_setup

    setup = partial(grammar_setup, folder, settings.model_impl)
    store = GrammarStore(setup, settings.grammar_cache_mib << 20, on_gpus(settings))
    return GrammarMasks(store, usable_cores() or 1)


def _driver(
    loaded: LoadedEngine,
    observer: StepProfile | None,
    masks: Masks | None,
    start: Start,
) -> DeviceDriver:
    from pipeinfer.engine.executor import (
        BackgroundCapture,
        DeviceDriver,
        Executor,
        nothing_to_prepare,
    )

    adapters = None
    if loaded.runner.adapters is not None:
        from pipeinfer.engine.lora import AdapterLoads

        adapters = AdapterLoads(loaded.runner.adapters, loaded.runner.device)
    return DeviceDriver(
        partial(Executor, loaded.runner, observer=observer, masks=masks),
        loaded.runner.phases,
        nothing_to_prepare if masks is None else masks.prepare,
        BackgroundCapture(loaded.runner),
        start.statistics(),
        loaded.kept,
        loaded.memory,
        adapters,
    )
