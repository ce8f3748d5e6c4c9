"""`run STAGE FILE`: a fresh stage gets the recorded inputs, and must give the recorded outputs.

    rebuild          the stage of a trace: settings, topology and core, with the recorded state
    ReplayRun        plays a rebuilt stage, and prints the verdict
    CorePlayer       plays exchanges into a core, and compares what it gives
    DevicePlayback   plays an engine with its driver
    ReplayCounts     what differed: inputs, tokens, requests

A device that rounds differently goes its own way from the first near tie on, for that request
alone: so how many requests are concerned says more than how many tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import dropwhile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pipeinfer import settings as config
from pipeinfer.command_line import counted
from pipeinfer.core import LOCAL, Core, GraphDue, Send, StepDone, stage_id
from pipeinfer.engine.core import (
    AdapterRead,
    Compute,
    FillPages,
    FoundPages,
    InvalidatePages,
    StepFailed,
)
from pipeinfer.memory.page_directory import PageChains
from pipeinfer.messages import Hello, LoadAdapter, Message, Result, State
from pipeinfer.replay.traces import (
    CRASHED,
    DIFFERENT,
    EQUAL,
    USAGE,
    CannotReplay,
    Difference,
    LoadedTrace,
    Skips,
    Subjects,
    TraceEntry,
    TraceExchange,
    explain,
    first_difference,
    first_mismatch,
    ignored_fields,
    load_stage,
    warn_of_tail,
)
from pipeinfer.runtime.stage import Driver, Stage, StageContext, builder
from pipeinfer.settings import ConfigurationError, Settings
from pipeinfer.step_cost import StepCost
from pipeinfer.topology import NAMES, StageEntry, Topology
from pipeinfer.trace.snapshot import restore
from pipeinfer.wire import unpack

# Facts that the engine's builder found out, and the settings that give the same.
FACTS = {
    "page_size": "page_size",
    "max_slots": "max_running",
    "max_model_len": "max_model_len",
    "dtype": "dtype",
    "step_tokens": "max_step_tokens",
}
# Only what this process is for; a replay records nothing and listens nowhere.
OURS = {"record": "", "topology": "", "in_process": False, "standby": False, "port": 0}


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
    """(settings, warnings) with which a recording is replayed. Overrides win over facts, facts over
    recorded settings."""
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
        # Graphs captured before a recording that begins in mid-life are not known; mostly all were.
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
            # Older recordings know no other dtype, and no drafts.
            kv_dtype=facts.get("kv_dtype", "auto"),
            max_drafts=facts.get("max_drafts", 0),
            max_draft_rows=facts.get("max_draft_rows", 0),
            draft_model=facts.get("draft_model", False),
        )
    except KeyError as error:
        raise CannotReplay(USAGE, f"the header does not say the engine's {error}") from None
    return Stage(EngineCore(hello, stage_id("scheduler", header.group), memory))


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


class ReplayCounts:
    """Differences of a replay from its recording, counted.

    Attributes:
    - keep_going: `over` stays false
    - first: the first difference
    - tokens: ids that a device sampled
    - wrong: of these, ids that are not the recorded ones
    - requests: requests that got wrong ids
    """

    def __init__(self, keep_going: bool = False) -> None:
        self._keep_going = keep_going
        self._subjects = Subjects()
        self._seen: set[str] = set()
        self.first: Difference | None = None
        self.messages: Counter[str] = Counter()
        self.tokens = self.wrong = 0
        self.requests: set[str] = set()

    @property
    def over(self) -> bool:
        """Whether there is nothing more to find out."""
        return self.first is not None and not self._keep_going

    def add(self, difference: Difference | None) -> None:
        """Counts the difference of one input; None is none."""
        if difference is not None:
            self.first = self.first or difference
            self.messages[difference.cause.kind] += 1

    def follow(self, exchange: TraceExchange) -> None:
        """Every exchange that is played, in order: who sits in which slot."""
        if exchange.input.channel == "plan":
            self._seen.update(self._subjects.of(exchange.input))

    def step(self, exchange: TraceExchange, report: StepDone) -> None:
        """A step of the device, and the exchange that has what was recorded of it."""
        recorded: StepDone = exchange.input.message
        recorded_ids, ids = unpack(recorded.token_ids), unpack(report.token_ids)
        self.tokens += len(recorded_ids)
        if len(recorded_ids) != len(ids):
            self.wrong += max(len(recorded_ids), len(ids))
            return
        wrong = np.flatnonzero(recorded_ids != ids)
        self.wrong += len(wrong)
        result = next((o.message for o in exchange.outputs if isinstance(o.message, Result)), None)
        if not len(wrong) or result is None:
            return
        slots = np.repeat(unpack(result.slots), unpack(result.produced))
        names = self._subjects.rows(recorded.epoch, recorded.number)
        self.requests |= {names[s] for s in slots[wrong[wrong < len(slots)]].tolist()}

    def summary_lines(self) -> list[str]:
        """The sums, for people."""
        counts = ", ".join(f"{count} {kind}" for kind, count in self.messages.most_common())
        lines = [f"inputs with a difference: {counts or 'none'}"]
        if self.tokens:
            lines.append(
                f"tokens: {self.wrong} of {self.tokens} differ, in {len(self.requests)} of "
                f"{counted(len(self._seen), 'request')}"
            )
        return lines


class ReplayPace:
    """`wait(t)` returns seconds to wait before what was recorded at `t` is due; 0 if not in real
    time, or late."""

    def __init__(
        self, realtime: bool, first: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._realtime, self._first, self._clock = realtime, first, clock
        self._begun = clock()

    def wait(self, recorded: float) -> float:
        if not self._realtime:
            return 0.0
        return max(0.0, recorded - self._first - (self._clock() - self._begun))


Deliver = Callable[[Any], None]
# Messages for a device whose steps are played.
DEVICE = ("Compute", "Capture", "InvalidatePages", "FillPages", "LoadAdapter")


class CorePlayer:
    """Plays exchanges on `core`. `until`: the sequence number to stop before; `halt(core, entry)`
    is called there, once. `deliver` gets what the core sends to its device.

    current: the exchange that is being played, also after its input raised.
    """

    def __init__(
        self,
        core: Core,
        skips: Skips,
        deliver: Deliver | None = None,
        until: int | None = None,
        halt: Callable[[Core, TraceEntry], None] | None = None,
    ) -> None:
        self._core, self._skips, self._deliver = core, skips, deliver
        self._until, self._halt = until, halt
        self.current: TraceExchange | None = None
        self.inputs = self.outputs = 0

    def reached(self, exchange: TraceExchange) -> bool:
        """True from the exchange on that holds message `until`."""
        return self._until is not None and exchange.last_seq >= self._until

    def feed(self, exchange: TraceExchange) -> Difference | None:
        """Plays one exchange; raises what the core raises."""
        self.current = exchange
        entry = exchange.input
        if self._halt is not None and self.reached(exchange):
            halt, self._halt = self._halt, None
            halt(self._core, entry)
        sends = self._core.handle(entry.message, entry.time)
        self.inputs += 1
        outputs = [send for send in sends if not self._for_the_device(send)]
        self.outputs += len(outputs)
        return first_difference(exchange, outputs, self._skips, tail=exchange.is_last)

    def _for_the_device(self, send: Send) -> bool:
        """Gives a local message for the device to the device, if there is one. Returns whether the
        recording notes the message; arrays for a device are not in the recording."""
        if send.channel != LOCAL:
            return False
        if self._deliver is not None and type(send.message).__name__ in DEVICE:
            self._deliver(send.message)
        return hasattr(send.message, "note")  # whether the recording has a note that it was given


STEP_SECONDS = 600.0  # a device that is silent for so long has hung


class DeviceHung(RuntimeError):
    """The device did not report a step."""


def play_core(
    player: CorePlayer, exchanges: Iterable[TraceExchange], pace: ReplayPace, counts: ReplayCounts
) -> None:
    """Core only: everything comes from the recording."""
    for exchange in exchanges:
        if (seconds := pace.wait(exchange.input.time)) > 0:
            time.sleep(seconds)
        counts.add(player.feed(exchange))
        if counts.over or player.reached(exchange):
            return


class DevicePlayback:
    """Plays an engine with its driver. `player` must have been given `deliver` of this object."""

    def __init__(self, driver: Driver, counts: ReplayCounts, hello: Hello) -> None:
        """hello: of the engine's core."""
        self._driver, self._counts, self._hello = driver, counts, hello
        self._reports: asyncio.Queue[Message] = asyncio.Queue()
        self._loads: asyncio.Queue[AdapterRead] = asyncio.Queue()
        self._asked: set[tuple[int, int]] = set()  # adapters that this device loads
        self._submitted: set[tuple[int, int]] = set()
        self._digests: dict[int, bytes] = {}  # by page, the digest of what this device has there
        self.steps = 0

    def deliver(self, message: Message) -> None:
        """A step for the device, a graph to capture, or what becomes of pages: a replay keeps no
        directory of them, but remembers which ones its device has filled."""
        match message:
            case InvalidatePages():
                for page in message.pages.tolist():
                    self._digests.pop(page, None)
            case FillPages():
                self._hold(message.chains)
            case Compute():
                self._submitted.add((message.step.epoch, message.step.number))
                self._driver.deliver(message)
            case LoadAdapter():
                self._asked.add((message.epoch, message.number))
                self._driver.deliver(message)
            case _:
                self._driver.deliver(message)

    def _hold(self, chains: PageChains) -> None:
        digests = (digest.tobytes() for digest in chains.digests)
        self._digests |= dict(zip(chains.pages.tolist(), digests, strict=True))

    async def _fill(self, found: FoundPages) -> None:
        """Computes the pages that the recorded engine found, unless this device has filled them."""
        from pipeinfer.engine.calibrate import page_step

        size = self._hello.page_size
        chains = found.chains(size)
        digests = [digest.tobytes() for digest in chains.digests]
        missing = {
            page
            for page, digest in zip(chains.pages.tolist(), digests, strict=True)
            if self._digests.get(page) != digest
        }
        for _, ids, pages in chains.sequences():
            first = next((at for at, page in enumerate(pages.tolist()) if page in missing), None)
            if first is None:
                continue
            chunk = max(self._hello.step_tokens // size, 1)
            for begin in range(first, len(pages), chunk):
                end = min(begin + chunk, len(pages))
                part = ids[begin * size : end * size]
                self._driver.deliver(Compute(page_step(part, pages[:end], begin * size)))
                await asyncio.wait_for(self._reports.get(), STEP_SECONDS)
            missing -= set(pages.tolist())
        self._hold(chains)

    def _on_event(self, message: Message) -> None:
        """When graphs are captured is recorded, too."""
        match message:
            case GraphDue():
                pass
            case AdapterRead():
                self._loads.put_nowait(message)
            case _:
                self._reports.put_nowait(message)

    async def play(
        self, player: CorePlayer, exchanges: Iterable[TraceExchange], pace: ReplayPace
    ) -> None:
        """Raises what the core raises, and DeviceHung."""
        await self._driver.start(self._on_event)
        try:
            for exchange in exchanges:
                if (seconds := pace.wait(exchange.input.time)) > 0:
                    await asyncio.sleep(seconds)
                self._counts.follow(exchange)
                if isinstance(exchange.input.message, FoundPages):
                    await self._fill(exchange.input.message)
                difference = await self._await_device(exchange)
                self._counts.add(difference)
                if not self._counts.over:
                    self._counts.add(player.feed(exchange))
                if self._counts.over or player.reached(exchange):
                    return
        finally:
            await self._driver.stop()

    async def _await_device(self, exchange: TraceExchange) -> Difference | None:
        """For the end of a step, or an adapter, that the device has as well: what it says, against
        the record."""
        entry = exchange.input
        if isinstance(entry.message, AdapterRead):
            return await self._await_adapter(exchange, entry.message)
        if not isinstance(entry.message, (StepDone, StepFailed)):
            return None
        step = (entry.message.epoch, entry.message.number)
        if step not in self._submitted:
            return None  # of an epoch that began before the recording
        self._submitted.remove(step)
        try:
            report = await asyncio.wait_for(self._reports.get(), STEP_SECONDS)
        except TimeoutError:
            raise DeviceHung(f"no report of step {step[1]} in {STEP_SECONDS:g} s") from None
        self.steps += 1
        if isinstance(report, StepFailed) and isinstance(entry.message, StepFailed):
            return None  # the reason's text may hold addresses; the core raises in a moment
        if isinstance(report, StepDone) and isinstance(entry.message, StepDone):
            self._counts.step(exchange, report)
        mismatch = first_mismatch(entry.message, report, ignored_fields)
        if mismatch is None:
            return None
        return Difference(entry.seq, entry.channel, *mismatch, entry)

    async def _await_adapter(self, exchange: TraceExchange, read: AdapterRead) -> Difference | None:
        """Steps behind it in the recording have the adapter; whether it could be had must be the
        same here."""
        if (read.epoch, read.number) not in self._asked:
            return None
        self._asked.remove((read.epoch, read.number))
        while True:  # those that were asked for again meanwhile are not in the recording
            report = await asyncio.wait_for(self._loads.get(), STEP_SECONDS)
            if (report.epoch, report.number) == (read.epoch, read.number):
                break
        if bool(report.error) == bool(read.error):
            return None
        entry = exchange.input
        return Difference(entry.seq, entry.channel, "error", read.error, report.error, entry)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("stage", choices=NAMES)
    add("file", type=Path, metavar="FILE")
    add("--model", default="", metavar="FOLDER", help="the checkpoint, if it lies elsewhere here")
    add("--core-only", action="store_true", help="an engine without device and weights")
    add("--realtime", action="store_true", help="at the recorded pace")
    add("--until", type=int, metavar="SEQ", help="stop after this message")
    add("--break", dest="halt", action="store_true", help="a debugger just before it is handled")
    add("--all", action="store_true", help="go on after the first difference, and count them")
    add("--json", action="store_true", help="the difference as JSON; the rest on stderr")


def replay_run(options: argparse.Namespace, overrides: Mapping[str, object]) -> int:
    """Replays a trace; returns the exit code. Raises CannotReplay before anything is played."""
    if options.halt and options.until is None:
        raise CannotReplay(USAGE, "--break needs --until SEQ")
    if options.core_only and options.stage != "engine":
        raise CannotReplay(USAGE, "--core-only is for engines; other stages have no device")
    if "model" in overrides:
        raise CannotReplay(USAGE, f"one FILE, not also {overrides['model']!r}")
    recording = load_stage(options.file, options.stage)
    if recording.header.redacted and options.stage != "scheduler":
        raise CannotReplay(
            USAGE,
            f"{options.file} is redacted: its token ids are not the model's and its text is gone, "
            "so that only a scheduler's can be replayed",
        )
    say = partial(print, file=sys.stderr) if options.json else print
    say(recording.title)
    warn_of_tail(recording)
    rebuilt = rebuild(recording, options.model, overrides, options.core_only)
    for warning in rebuilt.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return ReplayRun(recording, rebuilt, options, say).run()


class ReplayRun:
    """A replay, from the first exchange to the verdict.

    `counts` and `seconds` are its numbers.
    """

    def __init__(
        self,
        recording: LoadedTrace,
        rebuilt: Rebuilt,
        options: argparse.Namespace,
        say: Callable[[str], object],
    ) -> None:
        self._recording, self._rebuilt, self._options, self._say = recording, rebuilt, options, say
        driver = rebuilt.stage.driver
        self.counts, self.seconds = ReplayCounts(keep_going=options.all), 0.0
        self._device = None
        if recording.header.name == "engine" and driver is not None:
            hello = rebuilt.stage.core.hello  # type: ignore[attr-defined]
            self._device = DevicePlayback(driver, self.counts, hello)
        self._player = CorePlayer(
            rebuilt.stage.core,
            partial(ignored_fields, other_device=rebuilt.other_device),
            self._device.deliver if self._device is not None else None,
            options.until,
            debugger if options.halt else None,
        )

    def run(self) -> int:
        """Plays and prints; the exit code."""
        exchanges = self._exchanges()
        pace = ReplayPace(self._options.realtime, exchanges[0].input.time if exchanges else 0.0)
        begun = time.perf_counter()
        try:
            if self._device is not None:
                asyncio.run(self._device.play(self._player, exchanges, pace))
            else:
                play_core(self._player, exchanges, pace, self.counts)
        except Exception as error:  # whatever a stage under test raises is the result
            return self._crashed(error)
        self.seconds = time.perf_counter() - begun
        return self._verdict(exchanges)

    def _exchanges(self) -> list[TraceExchange]:
        """The exchanges to play: all of them; for a device, those from which its memory is known to
        be empty."""
        exchanges, header = list(self._recording.exchanges()), self._recording.header
        if self._device is None and header.snapshot is not None:
            restore(self._rebuilt.stage.core, header.snapshot)
            return exchanges
        if header.snapshot is None and not header.broken:
            return exchanges
        incarnation = header.incarnation
        fresh = list(dropwhile(lambda exchange: not _is_begin(exchange, incarnation), exchanges))
        if not fresh and header.broken:
            raise CannotReplay(
                USAGE, "the recording's beginning did not fit into the flight recorder's memory, "
                "and it has no BeginEpoch: it can be read, but not replayed",
            )  # fmt: skip
        if not fresh:
            raise CannotReplay(
                USAGE, "the recording begins in mid-life and has no BeginEpoch, so the device's "
                "keys and values are not known; --core-only replays it without a device",
            )  # fmt: skip
        self._say(f"mid-life: begins with the BeginEpoch at message {fresh[0].input.seq}")
        return fresh

    def _verdict(self, exchanges: list[TraceExchange]) -> int:
        player, header, found = self._player, self._recording.header, self.counts.first
        stopped = self._options.until is not None
        if found is None and header.error and not stopped:
            found = Difference(
                exchanges[-1].input.seq,
                "local",
                "",
                header.error,
                "no exception",
                exchanges[-1].input,
            )
        if found is not None:
            self._show(found)
        else:
            where = f"up to message {self._options.until}" if stopped else "to the end"
            counts = f"{player.inputs} inputs, {player.outputs} outputs"
            self._say(f"equal {where}: {counts}, 0 differences")
        if self._options.all:
            for line in self.counts.summary_lines():
                self._say(line)
        if found is None or self._options.all:
            self._say_how_fast(exchanges)
        return EQUAL if found is None else DIFFERENT

    def _say_how_fast(self, exchanges: list[TraceExchange]) -> None:
        played = exchanges[-1].input.time - exchanges[0].input.time if exchanges else 0.0
        if self._device is not None and self.seconds > 0:
            steps = self._device.steps
            self._say(
                f"the device computed {counted(steps, 'step')}, {steps / self.seconds:.1f} a second"
            )
        self._say(f"replay took {self.seconds:.3f} s, the recording {played:.3f} s")

    def _show(self, found: Difference) -> None:
        for line in explain(self._recording, found):
            self._say(line)
        if self._options.json:
            print(json.dumps(found.as_json()))

    def _crashed(self, error: Exception) -> int:
        traceback.print_exception(error)
        exchange = self._player.current
        at = "before the first message"
        if exchange is not None:
            at = f"on message {exchange.input.seq}: {exchange.input.kind}"
        self._say(f"the stage crashed {at}: {type(error).__name__}: {error}")
        recorded = self._recording.header.error
        if recorded:
            same = recorded == f"{type(error).__name__}: {error}"
            self._say(
                "reproduced: same exception" if same else f"the recorded one died of {recorded}"
            )
        if self._options.json and exchange is not None:
            found = Difference(
                exchange.input.seq, exchange.input.channel, "", recorded or "no exception",
                f"{type(error).__name__}: {error}", exchange.input,
            )  # fmt: skip
            print(json.dumps(found.as_json()))
        return CRASHED


def debugger(core: Core, entry: TraceEntry) -> None:
    """Here is `core`, just before `core.handle(message, now)`; the next frame up is the player."""
    message, now = entry.message, entry.time
    print(f"message {entry.seq}: {type(message).__name__} at {now:.6f}, before it is handled")
    breakpoint()


def _is_begin(exchange: TraceExchange, incarnation: int) -> bool:
    """True for the BeginEpoch of an epoch that this engine takes part in."""
    incarnations = getattr(exchange.input.message, "incarnations", ())
    return exchange.input.kind == "BeginEpoch" and incarnation in incarnations
