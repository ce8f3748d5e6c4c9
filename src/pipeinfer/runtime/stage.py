"""What a stage is made of: a core, perhaps a driver for I/O beside the bus, and a tick; and the
heartbeat that says how it is.

Knows no particular stage; builders are found by name and imported only when asked for.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipeinfer.close_names import none_of
from pipeinfer.control import Observed, Prefix, Prefixes
from pipeinfer.core import Core
from pipeinfer.messages import (
    Delivered,
    Fenced,
    HandOver,
    Heartbeat,
    Message,
    RankStatus,
    Recovered,
    State,
)
from pipeinfer.settings import ConfigurationError, Settings
from pipeinfer.topology import SUPERVISOR, Identity, Topology

log = logging.getLogger(__name__)

BUILDERS = {
    "gateway": "pipeinfer.gateway.stage:build",
    "tokenizer": "pipeinfer.tokenizer.stage:build",
    "scheduler": "pipeinfer.scheduler.stage:build",
    "engine": "pipeinfer.engine.stage:build",
    "detokenizer": "pipeinfer.detokenizer.stage:build",
}

# Channels whose messages reach the core of each stage.
CORE_CHANNELS = {
    "gateway": ("text", "telemetry", "recovery"),
    "tokenizer": ("group", "requests", "recovery"),
    "scheduler": ("work", "result", "stops", "recovery", "group"),
    "engine": ("plan",),
    "detokenizer": ("tokens", "recovery"),
}

# Messages of these channels that no core of the stage takes: they are for others.
NOT_FOR_CORE: dict[str, tuple[type[Message], ...]] = {
    "gateway": (Recovered, Delivered),
    "tokenizer": (HandOver, Fenced),
    "scheduler": (Fenced,),
    "detokenizer": (HandOver, Delivered),
}

LEAVE_TIMEOUT = 10.0  # seconds that a stage has to hand on what is in hand


@dataclass(frozen=True)
class StageContext:
    """What a builder gets.

    settings, topology, identity, incarnation: of the stage.
    report_status: `report(state, reason)` shows progress before there is a core.
    listen_fds: sockets for HTTP that the parent process opened; none: open your own.
    """

    settings: Settings
    topology: Topology
    identity: Identity
    incarnation: int
    report_status: Callable[[State, str], None]
    listen_fds: tuple[int, ...] = ()

    def log_progress(self, text: str) -> None:
        """Says what takes long before the stage knows whether it can start: as a line of the log,
        and as the reason in the heartbeat."""
        log.info("%s", text)
        self.report_status("starting", text)


class Driver(Protocol):
    """A stage's I/O beside the bus: the HTTP side of a gateway, the device of an engine."""

    async def start(self, feed: Callable[[Message], None]) -> None:
        """Begins; `feed(event)` hands a local event to the core, on the shell's loop."""
        ...

    def deliver(self, message: Message) -> None:
        """Takes what the core sent on channel `local`."""
        ...

    async def stop(self) -> None:
        """Ends; nothing is fed afterwards."""
        ...

    def stats(self) -> dict[str, float]:
        """Statistics for the heartbeat, beside the core's."""
        ...


class MonitorHook(Protocol):
    """A gateway's view of the pipeline, for its page: asks stages, and takes their answers."""

    def open(self, ask: Callable[[str, Message], None]) -> None:
        """Begins. `ask(stage id, message)` puts a question of control.py to a stage, on the shell's
        loop; the gateway's own id is one of them."""
        ...

    def on_message(self, message: Observed | Prefixes) -> None:
        """Takes an answer of a stage, to this gateway or another."""
        ...

    def close(self) -> None:
        """The stage ends."""
        ...


@dataclass
class Stage:
    """A built stage.

    core: its logic, without I/O.
    driver: its I/O beside the bus, if it has any.
    tick: seconds between Tick events.
    listens: subscriptions, each (stage id, channel, ...).
    facts: what the builder found out beyond the settings, for the header of recordings.
    before_leave: awaited before the core gets Leave.
    reload: reads files again after SIGHUP, on the shell's loop; None ignores the signal.
    monitor: a gateway's view of the pipeline.
    prefixes: `prefixes(most, ids)` of an engine: see PrefixCache.largest.
    """

    core: Core
    driver: Driver | None = None
    tick: float = 0.5
    listens: tuple[tuple[str, ...], ...] = ()
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    before_leave: Callable[[], Awaitable[None]] | None = None
    reload: Callable[[], None] | None = None
    monitor: MonitorHook | None = None
    prefixes: Callable[[int, int], tuple[Prefix, ...]] | None = None


def death_subscriptions(topology: Topology, channel: str = "group") -> tuple[tuple[str, str], ...]:
    """Subscriptions that tell of the ends of processes: to the supervisor, where there is one."""
    return ((SUPERVISOR, channel),) if topology.supervisor else ()


def builder(name: str) -> Callable[[StageContext], Stage]:
    """The function that builds stage `name`; ConfigurationError for an unknown one."""
    if name not in BUILDERS:
        raise ConfigurationError(f"stage: {none_of(name, BUILDERS)}")
    module, _, function = BUILDERS[name].partition(":")
    return getattr(importlib.import_module(module), function)


def heartbeat(
    identity: Identity,
    incarnation: int,
    state: State,
    reason: str = "",
    *,
    pid: int,
    stats: Mapping[str, float] | None = None,
) -> Heartbeat:
    """The heartbeat of process `pid`, which is stage `identity`; see Heartbeat for the rest."""
    return Heartbeat(
        stage=identity.id,
        name=identity.name,
        group=identity.group,
        rank=identity.rank,
        index=identity.index,
        pid=pid,
        incarnation=incarnation,
        state=state,
        reason=reason,
        stats=dict(stats or {}),
    )


def rank_status(identity: Identity, incarnation: int, state: State) -> RankStatus:
    """The state of an engine's rank, for its scheduler and the other ranks."""
    return RankStatus(
        group=identity.group, rank=identity.rank, incarnation=incarnation, state=state
    )
