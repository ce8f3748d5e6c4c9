"""Builds the stage of a trace again: settings, topology and core, with the recorded state; and
follows which request sits in which slot.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from pipeinfer import settings as config
from pipeinfer.core import StepDone
from pipeinfer.messages import Admit, Admitted, Begin, Plan, Result, State
from pipeinfer.replay.traces import USAGE, CannotReplay, LoadedTrace
from pipeinfer.runtime.stage import Stage, StageContext, builder
from pipeinfer.settings import ConfigurationError, Settings
from pipeinfer.step_cost import StepCost
from pipeinfer.topology import NAMES, StageEntry, Topology
from pipeinfer.wire import unpack

REMEMBERED = 64  # plans whose rows are kept: far more than are ever in flight


class Subjects:
    """`of(message)` names the requests of each message, in the order of the trace."""

    def __init__(self) -> None:
        self._slots: dict[int, str] = {}
        self._plans: OrderedDict[tuple[int, int], dict[int, str]] = OrderedDict()

    def of(self, message: object) -> tuple[str, ...]:
        """Ids of the requests, without repeats; empty where a message is about none."""
        match message:
            case Begin():
                self._slots.clear()
                return ()
            case Plan():
                return self._plan(message)
            case Admitted():
                return self._named(message.epoch, message.number, message.slots)
            case Result():
                return self._named(message.epoch, message.number, message.slots)
            case StepDone():
                return tuple(dict.fromkeys(self.rows(message.epoch, message.number).values()))
        request_id = getattr(message, "request_id", None)
        if request_id is not None:
            return (request_id,)
        ids = getattr(message, "request_ids", None)
        if ids is not None:
            return tuple(ids)
        rows = getattr(message, "rows", None)
        if isinstance(rows, tuple):
            return tuple(dict.fromkeys(row.request_id for row in rows))
        return ()

    def rows(self, epoch: int, number: int) -> dict[int, str]:
        """{slot: request id} of the rows of a plan that `of` has seen; empty for others."""
        return self._plans.get((epoch, number), {})

    def _plan(self, plan: Plan) -> tuple[str, ...]:
        touched = [self._slots.pop(release.slot, None) for release in plan.releases]
        admitted: list[Admit] = list(plan.admits)
        for admit in admitted:
            self._slots[admit.slot] = admit.request_id
        slots = [*(admit.slot for admit in admitted), *unpack(plan.slots).tolist()]
        rows = {slot: self._slots[slot] for slot in slots if slot in self._slots}
        self._plans[plan.epoch, plan.number] = rows
        if len(self._plans) > REMEMBERED:
            self._plans.popitem(last=False)
        ids = [*rows.values(), *(name for name in touched if name is not None)]
        return tuple(dict.fromkeys(ids))

    def _named(self, epoch: int, number: int, slots: bytes) -> tuple[str, ...]:
        rows = self.rows(epoch, number)
        return tuple(dict.fromkeys(rows[s] for s in unpack(slots).tolist() if s in rows))


# What the engine's builder found out for itself, as the settings that say it outright.
FACTS = {
    "page_size": "page_size",
    "max_slots": "max_running",
    "max_model_len": "max_model_len",
    "dtype": "dtype",
    "step_tokens": "max_step_tokens",
}
# Only what this process is for; a replay records nothing and listens nowhere.
OURS = {"record": "", "topology": "", "in_process": False, "port": 0}


@dataclass
class Rebuilt:
    """`other_device`: the engine runs on another kind of device than the recorded one did."""

    stage: Stage
    other_device: bool = False
    warnings: list[str] = field(default_factory=list)


def rebuild(
    recording: LoadedTrace, model: str, overrides: Mapping[str, object], core_only: bool = False
) -> Rebuilt:
    """The stage of the recording, from its own checkpoint or the folder `model`; `overrides` are
    settings that win over the recorded ones. CannotReplay for what cannot be built here."""
    settings, warnings = settings_of(recording, model, overrides)
    if core_only:
        return Rebuilt(_engine_core(recording, settings), warnings=warnings)
    _check_model(settings)
    _check_ranks(recording, settings)
    context = StageContext(
        settings, topology_of(recording.header.stages), recording.identity,
        recording.header.incarnation, _quiet,
    )  # fmt: skip
    try:
        stage = builder(recording.header.name)(context)
    except ConfigurationError as error:
        raise CannotReplay(USAGE, f"cannot build {recording.stage}: {error}") from None
    rebuilt = Rebuilt(stage, warnings=warnings)
    if recording.header.name == "engine":
        _compare_device(recording, rebuilt)
        _track_pages(recording, rebuilt)
    return rebuilt


def settings_of(
    recording: LoadedTrace, model: str, overrides: Mapping[str, object]
) -> tuple[Settings, list[str]]:
    """(settings, warnings). Overrides win over facts, facts over recorded settings."""
    header = recording.header
    known = set(Settings.__struct_fields__)
    unknown = sorted(set(header.settings) - known)
    warnings = [f"today's code has no setting {name!r}; it was left out" for name in unknown]
    values = {name: value for name, value in header.settings.items() if name in known}
    if header.name == "engine":
        facts = header.facts
        values |= {FACTS[name]: facts[name] for name in FACTS if facts.get(name)}
        if facts.get("pages"):
            values["kv_pages"] = facts["pages"] - 1  # without the dummy
        values["device"] = "auto"  # whatever is there
        # What was captured before a recording that begins in mid-life is not known; mostly, all.
        whole = header.snapshot is None and not header.broken
        values["all_graphs_first"] = not whole or values.get("all_graphs_first", True)
    values |= OURS | ({"model": model} if model else {}) | dict(overrides)
    try:
        return config.build(values), warnings
    except ConfigurationError as error:
        raise CannotReplay(USAGE, f"the recorded settings: {error}") from None


def topology_of(stages: Sequence[str]) -> Topology:
    """A topology with these stage ids, at addresses that are never opened."""
    return Topology(tuple(_entry(stage) for stage in stages))


def _engine_core(recording: LoadedTrace, settings: Settings) -> Stage:
    """The engine's core without weights and device, as it described itself."""
    from pipeinfer.engine.core import EngineCore
    from pipeinfer.memory.manager import MemoryManager
    from pipeinfer.memory.page_directory import ChainTracker
    from pipeinfer.messages import PROTOCOL, Hello
    from pipeinfer.version import __version__

    facts, header = recording.header.facts, recording.header
    try:
        sizes = facts["pages"], facts["page_size"], facts["max_slots"]
        chains = ChainTracker(*sizes) if facts.get("keeps_pages") else None
        memory = MemoryManager(*sizes, facts["max_model_len"], settings.cache, chains)
        hello = Hello(
            protocol=PROTOCOL,
            version=__version__,
            rank=header.rank,
            tp=settings.tp,
            incarnation=header.incarnation,
            model=settings.model_name,
            page_size=facts["page_size"],
            pages=facts["pages"] - 1,
            max_slots=facts["max_slots"],
            max_model_len=facts["max_model_len"],
            attention=facts["attention"],
            graph_sizes=tuple(facts["graph_sizes"]),
            step_tokens=facts["step_tokens"],
            step_cost=msgspec.convert(facts["step_cost"], StepCost | None),
            kv_dtype=facts.get("kv_dtype", "auto"),  # older recordings know no other
        )
    except KeyError as error:
        raise CannotReplay(USAGE, f"the header does not say the engine's {error}") from None
    return Stage(EngineCore(hello, f"scheduler-{header.group}", memory))


def _track_pages(recording: LoadedTrace, rebuilt: Rebuilt) -> None:
    """No memory outlives a replay's process, but the recording says which pages were found."""
    from pipeinfer.memory.page_directory import ChainTracker

    facts = recording.header.facts
    if facts.get("keeps_pages"):
        sizes = facts["pages"], facts["page_size"], facts["max_slots"]
        rebuilt.stage.core.memory.chains = ChainTracker(*sizes)  # type: ignore[attr-defined]


def _compare_device(recording: LoadedTrace, rebuilt: Rebuilt) -> None:
    """Other kernels than the recorded ones are said: tokens may then differ."""
    hello = rebuilt.stage.core.hello  # type: ignore[attr-defined]
    recorded = recording.header.facts.get("attention", hello.attention)
    if hello.attention != recorded:
        rebuilt.other_device = True
        rebuilt.warnings.append(
            f"recorded with attention {recorded}, replayed with {hello.attention}: rounding may "
            "differ, and tokens at near ties with it"
        )
    sizes = tuple(recording.header.facts.get("graph_sizes", hello.graph_sizes))
    if hello.graph_sizes != sizes and not rebuilt.other_device:
        only = sorted(set(sizes) ^ set(hello.graph_sizes))
        rebuilt.warnings.append(f"CUDA graphs of sizes {only} were measured to pay only once")


def _check_model(settings: Settings) -> None:
    if "/" in settings.model and not Path(settings.model).is_dir():
        raise CannotReplay(
            USAGE, f"the recorded model {settings.model} is not here; name a copy with --model"
        )


def _check_ranks(recording: LoadedTrace, settings: Settings) -> None:
    if recording.header.name == "engine" and settings.tp > 1:
        raise CannotReplay(
            USAGE, f"{recording.stage} is one of {settings.tp} ranks, which compute together; "
            "--core-only replays what it decided, without a device",
        )  # fmt: skip


def _quiet(_state: State, _reason: str) -> None:
    """Progress is for heartbeats, and there are none."""


def _entry(stage: str) -> StageEntry:
    name, *numbers = stage.split("-")
    if name not in NAMES or not numbers or not all(number.isdigit() for number in numbers):
        raise CannotReplay(USAGE, f"the trace names a stage {stage!r}, which does not exist today")
    first, second = int(numbers[0]), int(numbers[1]) if len(numbers) > 1 else 0
    entry = StageEntry(name, f"inproc://replay-{stage}")
    if name == "engine":
        return msgspec.structs.replace(entry, group=first, rank=second)
    if name == "scheduler":
        return msgspec.structs.replace(entry, group=first)
    return msgspec.structs.replace(entry, index=first)
