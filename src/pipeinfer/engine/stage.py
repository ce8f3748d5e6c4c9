"""Builds the engine stage: loads the model, sizes the pool, warms up.

Everything heavy is imported here, inside `build`, so that the process shows its heartbeat first.
"""

from __future__ import annotations

import logging
import sys

from pipeinfer.messages import PROTOCOL, Hello
from pipeinfer.models.source import resolve_model
from pipeinfer.runtime.stage import Stage, StageContext
from pipeinfer.version import __version__

log = logging.getLogger(__name__)


def build(context: StageContext) -> Stage:
    """ConfigurationError, before any weight is read, for a checkpoint that does not fit."""
    settings, identity = context.settings, context.identity
    folder = resolve_model(settings.model, settings.revision)

    from pipeinfer.engine.core import EngineCore
    from pipeinfer.engine.driver import DeviceDriver
    from pipeinfer.engine.loading import choose, load_engine
    from pipeinfer.memory.manager import MemoryManager

    choose(settings, folder, identity.rank)
    context.report("loading", "weights")
    with Progress(identity.id) as progress:
        loaded = load_engine(settings, folder, progress.show, identity.rank)
    memory = MemoryManager(
        loaded.pages, loaded.page_size, loaded.max_slots, loaded.max_model_len, settings.cache
    )
    tokens = (loaded.pages - 1) * loaded.page_size
    log.info(
        "%s in %s: %s tokens of KV in %s pages of %s (%.2f GiB), attention %s",
        settings.model_name, loaded.dtype, f"{tokens:,}", f"{loaded.pages - 1:,}",
        loaded.page_size, loaded.runner.pool.total_bytes / 2**30, loaded.attention,
    )  # fmt: skip
    hello = Hello(
        PROTOCOL, __version__, identity.rank, settings.tp, context.incarnation,
        settings.model_name, loaded.page_size, loaded.pages - 1, loaded.max_slots,
        loaded.max_model_len, loaded.attention,
    )  # fmt: skip
    scheduler = f"scheduler-{identity.group}"
    core = EngineCore(hello, scheduler, memory)
    driver = DeviceDriver(loaded.runner.run, loaded.runner.seconds)
    return Stage(core, driver, 0.1, ((scheduler, "plan"),))


class Progress:
    """A progress bar for loading weights, on stderr; silent where nobody looks at a terminal."""

    def __init__(self, name: str) -> None:
        from tqdm import tqdm

        self._bar = tqdm(
            desc=f"{name} weights", unit="B", unit_scale=True, leave=False,
            disable=not sys.stderr.isatty(),
        )  # fmt: skip

    def show(self, done: int, total: int) -> None:
        self._bar.total = total
        self._bar.update(done - self._bar.n)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
