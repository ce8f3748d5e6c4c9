"""Traces as replays read them: exchanges of inputs and the outputs that they gave, several files of
a stage as one, and the clocks of several hosts brought together.

Also the exit codes of `pipeinfer replay`, and CannotReplay, which carries one. Knows no core.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pipeinfer.command_line import counted
from pipeinfer.core import ANY_PLAN, PlanFilter
from pipeinfer.messages import Begin, Plan
from pipeinfer.topology import Identity
from pipeinfer.trace.format import End, OtherProtocol, Trace, TraceHeader, UnreadableTrace

EQUAL = 0
DIFFERENT = 1
USAGE = 2
UNREADABLE = 3  # no trace, or its header cannot be read
OTHER_PROTOCOL = 4
CRASHED = 5  # the stage raised


class CannotReplay(Exception):
    """One line for the user, and the exit code that goes with it."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


Direction = Literal["in", "out", "note"]


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One line of a trace.

    time: seconds of the stage's monotonic clock; of an input the `now` that its core was given.
    peer: the sender of an input, the receiver of an output ("" for everyone, and for local ones).
    sent: seconds of the sender's clock, inputs from the bus only, else 0. size: bytes of the body.
    counts: False for a plan that had been published before, or that came behind a missing one.
    """

    seq: int
    time: float
    direction: Direction
    channel: str
    peer: str
    number: int
    sent: float
    message: Any
    size: int
    counts: bool = True

    @property
    def kind(self) -> str:
        """The message's type, by name."""
        return type(self.message).__name__


@dataclass(slots=True)
class TraceExchange:
    """One input of a core, and what came of it: recorded outputs and notes, in their order.

    is_last: the recording broke off here, perhaps before all of its outputs.
    """

    input: TraceEntry
    outputs: list[TraceEntry] = field(default_factory=list)
    notes: list[TraceEntry] = field(default_factory=list)
    is_last: bool = False

    @property
    def last_seq(self) -> int:
        return max([self.input.seq, *(e.seq for e in self.outputs), *(e.seq for e in self.notes)])


@dataclass
class LoadedTrace:
    """A trace file as it was read. `truncated`: where it breaks off, "" for a whole file. `offset`:
    seconds that were subtracted from its clock to merge it with others."""

    path: Path
    header: TraceHeader
    entries: list[TraceEntry]
    truncated: str = ""
    offset: float = 0.0

    @property
    def stage(self) -> str:
        return self.header.stage

    @property
    def identity(self) -> Identity:
        header = self.header
        return Identity(header.name, header.group, header.rank, header.index)

    @property
    def begin(self) -> float:
        return self.entries[0].time if self.entries else 0.0

    @property
    def seconds(self) -> float:
        """How long it lasted."""
        return self.entries[-1].time - self.begin if self.entries else 0.0

    @property
    def title(self) -> str:
        """One line: what was recorded, of which version, and how much of it there is."""
        header = self.header
        what = {"record": "recording", "flight": "flight recording"}[header.reason]
        extras = [" from mid-life"] if header.snapshot is not None else []
        extras += [" without its beginning"] if header.broken else []
        extras += [", redacted"] if header.redacted else []
        extras += [f", ended by {header.error}"] if header.error else []
        return (
            f"{self.path.name}: {what} of {header.stage}{''.join(extras)}, pipeinfer "
            f"{header.version}, {counted(len(self.entries), 'record')} in {self.seconds:.3f} s"
        )

    def exchanges(self) -> Iterator[TraceExchange]:
        """Each input with what followed it; what stands before the first input is left out."""
        exchange: TraceExchange | None = None
        for entry in self.entries:
            if entry.direction == "in":
                if exchange is not None:
                    yield exchange
                exchange = TraceExchange(entry)
            elif exchange is not None:
                (exchange.outputs if entry.direction == "out" else exchange.notes).append(entry)
        if exchange is not None:
            exchange.is_last = self.end is None or self.end.lost > 0
            yield exchange

    @property
    def end(self) -> End | None:
        """How it ended, if it did so in order."""
        last = self.entries[-1].message if self.entries else None
        return last if isinstance(last, End) else None


def load(path: Path) -> LoadedTrace:
    """Reads a whole trace. CannotReplay with the exit code for what cannot be read."""
    try:
        trace = Trace(path)
        entries: list[TraceEntry] = []
        plans = PlanFilter(ANY_PLAN)
        for r in trace:
            # The remark that ends a recording has no time of its own.
            at = r.time or (entries[-1].time if entries else 0.0)
            message, counts = trace.message(r), True
            if isinstance(message, Begin):
                plans = PlanFilter()
            elif isinstance(message, Plan):
                counts = plans.take(message.number) == "next"
            entries.append(
                TraceEntry(
                    r.seq, at, r.direction, r.channel, r.peer, r.number, r.sent,
                    message, len(r.body), counts,
                )
            )  # fmt: skip
    except OtherProtocol as error:
        raise CannotReplay(OTHER_PROTOCOL, str(error)) from None
    except UnreadableTrace as error:
        raise CannotReplay(UNREADABLE, str(error)) from None
    return LoadedTrace(path, trace.header, entries, trace.truncated)


def load_stage(path: Path, stage: str) -> LoadedTrace:
    """The same, for a trace of the stage called `stage`."""
    recording = load(path)
    if recording.header.name != stage:
        raise CannotReplay(USAGE, f"{path} is a trace of {recording.stage}, not of a {stage}")
    return recording


def warn_of_tail(recording: LoadedTrace, say: Callable[[str], None] | None = None) -> None:
    """Says on stderr that the file breaks off, if it does, or that records were lost at its end."""
    say = say or (lambda text: print(text, file=sys.stderr))
    if recording.truncated:
        say(f"warning: {recording.path} is truncated: {recording.truncated}")
    elif recording.end is not None and recording.end.lost:
        say(f"warning: {recording.path} ended early: {recording.end.reason}")


def before(entries: Iterable[TraceEntry], seq: int) -> Iterator[TraceEntry]:
    """The entries that stand before `seq`."""
    return (entry for entry in entries if entry.seq < seq)


def load_merged(paths: Sequence[Path]) -> list[LoadedTrace]:
    """All of them, in the order of the paths. CannotReplay for two traces of one process at once,
    and for what cannot be read."""
    return merged([load(path) for path in paths])


def merged(recordings: Sequence[LoadedTrace]) -> list[LoadedTrace]:
    """The recordings with their entries' times on the first one's clock."""
    stages = [recording.stage for recording in recordings]
    twice = sorted({stage for stage in stages if stages.count(stage) > 1})
    if twice:
        files = [str(one.path) for one in recordings if one.stage in twice]
        raise CannotReplay(
            USAGE,
            f"{', '.join(twice)} was started again meanwhile, and each process has a file of its "
            f"own: give one of {', '.join(files)}",
        )
    found = zip(recordings, offsets(recordings), strict=True)
    return [_moved(recording, offset) for recording, offset in found]


def _moved(recording: LoadedTrace, offset: Offset) -> LoadedTrace:
    if not offset.seconds:
        return recording
    entries = [replace(entry, time=entry.time - offset.seconds) for entry in recording.entries]
    return replace(recording, entries=entries, offset=offset.seconds)


FAR = float("inf")


class Offset(NamedTuple):
    """Seconds to subtract from a recording's times; right to within `error` seconds, which is
    infinite where the two have only the wall clocks of their hosts in common."""

    seconds: float
    error: float


def offsets(recordings: Sequence[LoadedTrace]) -> list[Offset]:
    """Of each recording against the first. Zero wherever that is possible: the stages of one host
    share a monotonic clock, and two hosts that were not started together never come so close."""
    if not recordings:
        return []
    bounds = _bounds(recordings)
    found = []
    for at, recording in enumerate(recordings):
        most, least = bounds[0][at], -bounds[at][0]
        if least <= 0.0 <= most and max(most, -least) < FAR:
            found.append(Offset(0.0, 0.0))
        elif most < FAR and least > -FAR:
            found.append(Offset((most + least) / 2, (most - least) / 2))
        else:
            found.append(Offset(_by_wall_clock(recordings[0], recording), FAR))
    return found


def _bounds(recordings: Sequence[LoadedTrace]) -> list[list[float]]:
    """[i][j]: clock j is ahead of clock i by at most so many seconds (Floyd and Warshall)."""
    number = {recording.stage: at for at, recording in enumerate(recordings)}
    count = len(recordings)
    bounds = [[0.0 if i == j else FAR for j in range(count)] for i in range(count)]
    for at, recording in enumerate(recordings):
        for entry in recording.entries:
            sender = number.get(entry.peer)
            if entry.direction == "in" and entry.sent and sender is not None:
                bounds[sender][at] = min(bounds[sender][at], entry.time - entry.sent)
    for k in range(count):
        for i in range(count):
            for j in range(count):
                bounds[i][j] = min(bounds[i][j], bounds[i][k] + bounds[k][j])
    return bounds


def _by_wall_clock(first: LoadedTrace, other: LoadedTrace) -> float:
    """Monotonic clocks against wall clocks, which are taken to be synchronized."""
    a, b = first.header, other.header
    return (b.monotonic - b.wall) - (a.monotonic - a.wall)
