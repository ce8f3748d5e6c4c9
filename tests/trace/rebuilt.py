"""Fresh cores for recorded stages, and feeding them what was recorded."""

from __future__ import annotations

from typing import Any

import msgspec

from pipeinfer.core import LOCAL, Core
from pipeinfer.engine.core import EngineCore
from pipeinfer.memory.manager import MemoryManager
from pipeinfer.memory.page_directory import ChainTracker
from pipeinfer.messages import Hello, Message
from pipeinfer.runtime.stage import StageContext, builder
from pipeinfer.settings import Settings
from pipeinfer.topology import NAMES, Identity, StageEntry, Topology
from pipeinfer.trace.format import Trace

Event = tuple[float, Message]


def events(trace: Trace) -> list[tuple[Event, list[Message]]]:
    """(input, recorded outputs) in order, without notes."""
    found: list[tuple[Event, list[Message]]] = []
    for record in trace:
        if record.direction == "in":
            found.append(((record.time, trace.message(record)), []))
        elif record.direction == "out":
            found[-1][1].append(trace.message(record))
    return found


def fresh(trace: Trace) -> Core:
    """The core of the recorded stage as it was before its first event."""
    header = trace.header
    settings = msgspec.convert(header.settings, Settings)
    if header.name == "engine":
        return _engine(trace, settings)
    topology = Topology(tuple(StageEntry(name, f"inproc://{name}") for name in NAMES))
    who = Identity(header.name, header.group, header.rank, header.index)
    context = StageContext(settings, topology, who, header.incarnation, lambda *_: None)
    return builder(header.name)(context).core


def _engine(trace: Trace, settings: Settings) -> EngineCore:
    """Without a model: its steps' results are in the trace."""
    facts: dict[str, Any] = trace.header.facts
    hello = next(m for _, out in events(trace) for m in out if isinstance(m, Hello))
    sizes = facts["pages"], facts["page_size"], facts["max_slots"]
    chains = ChainTracker(*sizes) if facts["keeps_pages"] else None
    memory = MemoryManager(*sizes, facts["max_model_len"], settings.cache, chains)
    return EngineCore(hello, "scheduler-0", memory)


def outputs(core: Core, event: Event) -> list[Message]:
    """What the core says to it, without steps for a device."""
    now, message = event
    sends = core.handle(message, now)
    return [s.message for s in sends if s.channel != LOCAL or not hasattr(s.message, "note")]
