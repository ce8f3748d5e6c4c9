"""An engine stage that answers every step at once with pseudo-random ids: no model, no torch.

A program with the engine's command line; page bookkeeping and messages are the real ones. It makes
the cost of everything but the model visible.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import uvloop
import zmq

from pipeinfer import topology as topologies
from pipeinfer.core import StepDone
from pipeinfer.engine.core import Compute, EngineCore
from pipeinfer.engine.executor import step_done
from pipeinfer.memory.manager import MemoryManager
from pipeinfer.messages import PROTOCOL, Hello, Message
from pipeinfer.runtime.entry import run_shell, stage_settings
from pipeinfer.runtime.logs import set_up_logging
from pipeinfer.runtime.shell import Shell
from pipeinfer.runtime.stage import Stage, StageContext
from pipeinfer.step import Sampled
from pipeinfer.topology import Identity
from pipeinfer.version import __version__

PAGE_SIZE, PAGES, MAX_MODEL_LEN = 16, 16_384, 16_384
STEP_VARIABLE = "BENCH_STEP_SECONDS"
HIGHEST_ID_VARIABLE = "BENCH_HIGHEST_ID"


class InstantDevice:
    """The driver in place of a device: an answer after `seconds`, 0 is at once.

    Ids are drawn from 0..highest_id.
    """

    def __init__(self, seconds: float, highest_id: int) -> None:
        self._seconds = seconds
        self._ids = np.random.default_rng(0)
        self._highest = highest_id
        self._feed: Callable[[Message], None] | None = None
        self._free_at = 0.0
        self._steps: deque[StepDone] = deque()  # that run, oldest first

    async def start(self, feed: Callable[[Message], None]) -> None:
        self._feed, self._loop = feed, asyncio.get_running_loop()

    def deliver(self, message: Any) -> None:
        feed = self._feed
        assert feed is not None
        assert isinstance(message, Compute)
        step = message.step
        ids = self._ids.integers(0, self._highest + 1, int(step.samples.sum()), np.int32)
        done = step_done(step, Sampled.one_each(ids), self._seconds)
        if self._seconds == 0:
            self._loop.call_soon(feed, done)
            return
        # Steps follow one another, as on a device. Timers of a busy loop may change places.
        self._free_at = max(self._free_at, self._loop.time()) + self._seconds
        self._steps.append(done)
        self._loop.call_at(self._free_at, lambda: feed(self._steps.popleft()))

    async def stop(self) -> None:
        """Nothing runs that could be waited for."""

    def stats(self) -> dict[str, float]:
        return {}


def build(context: StageContext) -> Stage:
    """The engine stage; settings that concern a model are ignored."""
    settings, identity = context.settings, context.identity
    context.report_status("loading", "")
    slots = settings.max_running
    memory = MemoryManager(1 + PAGES, PAGE_SIZE, slots, MAX_MODEL_LEN, settings.cache)
    hello = Hello(
        protocol=PROTOCOL,
        version=__version__,
        rank=identity.rank,
        tp=settings.tp,
        incarnation=context.incarnation,
        model=settings.model_name,
        page_size=PAGE_SIZE,
        pages=PAGES,
        max_slots=slots,
        max_model_len=MAX_MODEL_LEN,
        attention="none",
    )
    scheduler = f"scheduler-{identity.group}"
    device = InstantDevice(
        float(os.environ.get(STEP_VARIABLE, "0")), int(os.environ.get(HIGHEST_ID_VARIABLE, "200"))
    )
    return Stage(EngineCore(hello, scheduler, memory), device, 0.1, ((scheduler, "plan"),))


async def _run(shell: Shell) -> int:
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, shell.drain)
    return await run_shell(shell)


def main() -> int:
    """The exit code, as of any stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", required=True)
    parser.add_argument("--group", type=int, default=0)
    options = parser.parse_args()
    topology = topologies.load(options.topology)
    settings = stage_settings(topology, {}, os.environ)
    identity = Identity("engine", options.group)
    set_up_logging(settings, identity.id)
    return uvloop.run(_run(Shell(settings, topology, identity, zmq.Context.instance(), build)))


if __name__ == "__main__":
    sys.exit(main())
