"""The parts of a stage: a core, perhaps a driver for I/O beside the bus, and a tick; its heartbeat;
and the incarnation of its process.

An incarnation is a number, and the later process of a stage has the greater: the time when it was
given, in Unix nanoseconds, or, if the clock was set back since the last one, the last number and a
little more. The parent of a process gives it. Messages of a dead process may still lie in sockets
when its successor has recovered its state; read late, they would contradict that: IncarnationFilter
keeps them out.

Knows no particular stage; builders are found by name and imported only when asked for. No I/O.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipeinfer.bus.frames import FrameHeader
from pipeinfer.command_line import none_of
from pipeinfer.control import Prefix
from pipeinfer.core import Core
from pipeinfer.messages import (
    Abort,
    AdapterChanges,
    Adopt,
    Delivered,
    Fenced,
    HandOver,
    Heartbeat,
    Message,
    RankStatus,
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

# Messages of these channels that no core of the stage takes, because they are for other stages.
NOT_FOR_CORE: dict[str, tuple[type[Message], ...]] = {
    "gateway": (Delivered,),
    "tokenizer": (HandOver, Fenced, Adopt, AdapterChanges, Abort),
    "scheduler": (Fenced, Adopt, AdapterChanges, Abort),
    "detokenizer": (HandOver, Delivered, Adopt, AdapterChanges, Abort),
}

LEAVE_TIMEOUT = 10.0  # seconds that a leaving stage has to hand on its work


@dataclass(frozen=True)
class StageContext:
    """The arguments of a stage's builder.

    Attributes:
    - settings, topology, identity, incarnation: of the stage
    - report_status: `report(state, reason)` publishes progress before there is a core
    - listen_fds: sockets for HTTP that the parent process opened; empty: the stage opens its own
    - promotion: of a standby (runtime/child.py): waits until it is to serve, and returns the
      context of the stage that it is then; None: the process serves from its start
    """

    settings: Settings
    topology: Topology
    identity: Identity
    incarnation: int
    report_status: Callable[[State, str], None]
    listen_fds: tuple[int, ...] = ()
    promotion: Callable[[], StageContext] | None = None

    def promoted(self) -> StageContext:
        """The context to serve with; waits for it in a standby. To be called after all work that
        needs nothing of the serving process."""
        return self if self.promotion is None else self.promotion()

    def log_progress(self, text: str) -> None:
        """Reports a long task before the stage knows whether it can start: as a line of the log,
        and as the reason in the heartbeat."""
        log.info("%s", text)
        self.report_status("starting", text)


class Driver(Protocol):
    """A stage's I/O beside the bus: the HTTP side of a gateway, the device of an engine."""

    async def start(self, feed: Callable[[Message], None]) -> None:
        """Begins; `feed(event)` hands a local event to the core, on the shell's loop."""
        ...

    def deliver(self, message: Message) -> None:
        """Takes a message that the core sent on channel `local`."""
        ...

    async def stop(self) -> None:
        """Ends; nothing is fed afterwards."""
        ...

    def stats(self) -> dict[str, float]:
        """Statistics for the heartbeat, beside the core's."""
        ...


class ControlHook(Protocol):
    """A gateway's requests to other stages, for its page and to answer for all gateways."""

    def open(self, ask: Callable[[str, Message], None]) -> None:
        """Begins. `ask(stage id, message)` sends a message of control.py to a stage, on the shell's
        loop; the gateway's own id is one of them."""
        ...

    def on_message(self, message: Message) -> None:
        """Takes one of control.FOR_GATEWAYS, which may be an answer to another gateway."""
        ...

    def close(self) -> None:
        """Ends with the stage."""
        ...


@dataclass
class Stage:
    """A built stage.

    Attributes:
    - core: its logic, without I/O
    - driver: its I/O beside the bus; None: it has none
    - tick: seconds between Tick events
    - listens: subscriptions, each (stage id, channel, ...)
    - facts: values that the builder detected beyond the settings, for the header of recordings
    - before_leave: awaited before the core gets Leave
    - reload: reads files again after SIGHUP, on the shell's loop; None ignores the signal
    - control: a gateway's requests to other stages
    - prefixes: `prefixes(most, ids)` of an engine: see PrefixCache.largest
    """

    core: Core
    driver: Driver | None = None
    tick: float = 0.5
    listens: tuple[tuple[str, ...], ...] = ()
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    before_leave: Callable[[], Awaitable[None]] | None = None
    reload: Callable[[], None] | None = None
    control: ControlHook | None = None
    prefixes: Callable[[int, int], tuple[Prefix, ...]] | None = None


def death_subscriptions(topology: Topology, channel: str = "group") -> tuple[tuple[str, str], ...]:
    """Subscriptions to reports of ended processes: to the supervisor, if there is one."""
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


# Least difference, in nanoseconds, of the incarnations of two processes of one stage. Epoch numbers
# and a supervisor's report of a process's end count on from its incarnation.
MIN_GAP_NS = 1_000_000_000
INCARNATION_VARIABLE = "PIPEINFER_INCARNATION"  # in the environment of a stage: its number


def own_incarnation(environ: MutableMapping[str, str]) -> int:
    """The incarnation of this process, taken out of `environ`; the time if it has none."""
    number = environ.pop(INCARNATION_VARIABLE, "")
    return int(number) if number.isdecimal() and len(number) < 20 else time.time_ns()


def incarnation_after(last: int, now: int) -> int:
    """The incarnation of the process that comes after process `last`, at the time `now` (Unix, in
    ns)."""
    return max(now, last + MIN_GAP_NS)


class IncarnationNumbers:
    """Gives incarnations, each greater than all before it."""

    def __init__(self, clock: Callable[[], int] = time.time_ns) -> None:
        self._clock = clock
        self._last = 0

    def next(self, last: int) -> int:
        """An incarnation for the process that comes after process `last`, 0 for none."""
        self._last = max(incarnation_after(last, self._clock()), self._last + 1)
        return self._last

    def now(self) -> int:
        """A number below all that will be given, and not below those that were."""
        self._last = max(self._clock(), self._last)
        return self._last


NOTICE_INTERVAL = 1.0  # seconds between two Fenced messages to one process


class FencedOut(Exception):
    """Another process of this stage has a greater incarnation, so that other stages drop this
    process's frames.

    Attributes:
    - newest: that incarnation
    - superseded: the other process was started later, and has taken this one's place. Otherwise it
      was there before, and its number is greater because the clock was set back: this process takes
      a greater one
    """

    def __init__(self, fenced: Fenced, by: str, age: float) -> None:
        """Takes the message `fenced` of the stage `by` to a process that is `age` seconds old."""
        self.newest = fenced.newest
        self.superseded = fenced.since < age
        why = "has taken over" if self.superseded else "was there before: the clock was set back"
        super().__init__(
            f"{fenced.stage}: process {fenced.incarnation} is fenced out: {by} has heard process "
            f"{fenced.newest}, which {why}"
        )


class IncarnationFilter:
    """Accepts frames of the newest process of each sender.

    Attributes:
    - dropped: frames of older processes
    """

    def __init__(self) -> None:
        self.dropped = 0
        self._newest: dict[str, int] = {}
        self._since: dict[str, float] = {}  # when the first frame of the newest came, in seconds
        self._notified: dict[
            str, tuple[int, float]
        ] = {}  # the older process notified last, and when

    def accepts(self, header: FrameHeader, now: float) -> bool:
        """False if a frame of a newer process of the same stage came before. `now`: seconds,
        monotonic."""
        newest = self._newest.get(header.sender, -1)
        if header.incarnation < newest:
            self.dropped += 1
            return False
        if header.incarnation > newest:
            self._newest[header.sender] = header.incarnation
            self._since[header.sender] = now
        return True

    def notice(self, header: FrameHeader, now: float) -> Fenced | None:
        """The message to the sender of a frame that was not accepted; None if it got one within
        NOTICE_INTERVAL."""
        stage, number = header.sender, header.incarnation
        before, at = self._notified.get(stage, (-1, 0.0))
        if before == number and now - at < NOTICE_INTERVAL:
            return None
        self._notified[stage] = number, now
        newest = self._newest[stage]
        if before != number:
            log.warning("%s: process %d is not heard, process %d was", stage, number, newest)
        since = now - self._since[stage]
        return Fenced(stage=stage, incarnation=number, newest=newest, since=since)
