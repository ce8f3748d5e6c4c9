"""One trace in memory: its header, and its entries with their messages decoded.

Every other module of the tool sees traces as this; only here is the file format's reader called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pipeinfer.replay.codes import OTHER_PROTOCOL, UNREADABLE, USAGE, CannotReplay
from pipeinfer.topology.topology import Identity
from pipeinfer.trace.notes import End
from pipeinfer.trace.reader import OtherProtocol, Trace, TraceHeader, UnreadableTrace

Direction = Literal["in", "out", "note"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a trace.

    time: seconds of the stage's monotonic clock; of an input the `now` that its core was given.
    peer: the sender of an input, the receiver of an output ("" for everyone, and for local ones).
    sent: seconds of the sender's clock, inputs from the bus only, else 0. size: bytes of the body.
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

    @property
    def kind(self) -> str:
        """The message's type, by name."""
        return type(self.message).__name__


@dataclass(slots=True)
class Exchange:
    """One input of a core, and what came of it: recorded outputs and notes, in their order.

    is_last: the recording broke off here, perhaps before all of its outputs.
    """

    input: Entry
    outputs: list[Entry] = field(default_factory=list)
    notes: list[Entry] = field(default_factory=list)
    is_last: bool = False

    @property
    def last_seq(self) -> int:
        return max([self.input.seq, *(e.seq for e in self.outputs), *(e.seq for e in self.notes)])


@dataclass
class Recording:
    """A trace file as it was read. `truncated`: where it breaks off, "" for a whole file. `offset`:
    seconds that were subtracted from its clock to merge it with others."""

    path: Path
    header: TraceHeader
    entries: list[Entry]
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
            f"{header.version}, {len(self.entries)} records in {self.seconds:.3f} s"
        )

    def exchanges(self) -> Iterator[Exchange]:
        """Each input with what followed it; what stands before the first input is left out."""
        exchange: Exchange | None = None
        for entry in self.entries:
            if entry.direction == "in":
                if exchange is not None:
                    yield exchange
                exchange = Exchange(entry)
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


def load(path: Path) -> Recording:
    """Reads a whole trace. CannotReplay with the exit code for what cannot be read."""
    try:
        trace = Trace(path)
        entries: list[Entry] = []
        for r in trace:
            # The remark that ends a recording has no time of its own.
            at = r.time or (entries[-1].time if entries else 0.0)
            entries.append(
                Entry(
                    r.seq, at, r.direction, r.channel, r.peer, r.number, r.sent,
                    trace.message(r), len(r.body),
                )
            )  # fmt: skip
    except OtherProtocol as error:
        raise CannotReplay(OTHER_PROTOCOL, str(error)) from None
    except UnreadableTrace as error:
        raise CannotReplay(UNREADABLE, str(error)) from None
    return Recording(path, trace.header, entries, trace.truncated)


def load_stage(path: Path, stage: str) -> Recording:
    """The same, for a trace of the stage called `stage`."""
    recording = load(path)
    if recording.header.name != stage:
        raise CannotReplay(USAGE, f"{path} is a trace of {recording.stage}, not of a {stage}")
    return recording


def warn_of_tail(recording: Recording, say: Callable[[str], None] | None = None) -> None:
    """Says on stderr that the file breaks off, if it does, or that records were lost at its end."""
    say = say or (lambda text: print(text, file=sys.stderr))
    if recording.truncated:
        say(f"warning: {recording.path} is truncated: {recording.truncated}")
    elif recording.end is not None and recording.end.lost:
        say(f"warning: {recording.path} ended early: {recording.end.reason}")


def before(entries: Iterable[Entry], seq: int) -> Iterator[Entry]:
    """The entries that stand before `seq`."""
    return (entry for entry in entries if entry.seq < seq)
