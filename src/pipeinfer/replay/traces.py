"""Traces as replays read and compare them: exchanges of inputs and the outputs that they gave,
several files of a stage as one, and the clocks of several hosts brought together.

    load, load_merged  the exchanges of one file, or of several
    first_difference   of an exchange; `ignored_fields` says what is not compared
    explain, line      a difference, its request's history and a message as lines
    rewritten          a message with its ids and numbers replaced, so that two runs compare
    Subjects           which requests a message is about: which request sits in which slot
    `diff A B`         where two traces first differ, and what each has more of

Request ids, epochs and incarnations of `diff` are numbered in the order in which they appear, so
that two runs of the same requests can be compared.

Also the exit codes of `pipeinfer replay`, and CannotReplay, which carries one. Knows no core.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from pipeinfer.command_line import counted
from pipeinfer.core import ANY_PLAN, PlanFilter, Send, StepDone
from pipeinfer.messages import TOKEN_BYTES, Admit, Admitted, BeginEpoch, Plan, Result
from pipeinfer.topology import Identity
from pipeinfer.trace.format import (
    End,
    OtherProtocol,
    Trace,
    TraceHeader,
    Unencoded,
    UnreadableTrace,
)
from pipeinfer.wire import unpack

EQUAL = 0
DIFFERENT = 1
USAGE = 2
UNREADABLE = 3  # no trace, or its header cannot be read
OTHER_PROTOCOL = 4
CRASHED = 5  # the stage raised


class CannotReplay(Exception):
    """An error of the user's input: a line of text, and the exit code that goes with it."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


Direction = Literal["in", "out", "note"]


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """A line of a trace.

    Attributes:
    - time: seconds of the stage's monotonic clock; of an input the `now` that its core was given
    - peer: the sender of an input, the receiver of an output ("" for everyone, and for local ones)
    - sent: seconds of the sender's clock, inputs from the bus only, else 0
    - size: bytes of the body
    - counts: False for a plan that had been published before, or that came behind a missing one
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
    """An input of a core and its consequences: recorded outputs and notes, in their order.

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
        """A line that says what was recorded, of which version, and how much."""
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
            if isinstance(message, BeginEpoch):
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
    """Loads a trace, which must be of the stage called `stage`. Raises CannotReplay."""
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
    """Clock offsets of each recording against the first. Zero wherever that is possible: the stages
    of one host share a monotonic clock, and two hosts that were not started together never come so
    close."""
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


REMEMBERED = 64  # plans whose rows are kept: far more than are ever in flight


class Subjects:
    """`of(entry)` names the requests of each message, in the order of the trace."""

    def __init__(self) -> None:
        self._slots: dict[int, str] = {}
        self._plans: OrderedDict[tuple[int, int], dict[int, str]] = OrderedDict()

    def of(self, entry: TraceEntry) -> tuple[str, ...]:
        """Ids of the requests, without repeats; empty where a message is about none."""
        message = entry.message
        match message:
            case BeginEpoch():
                self._slots.clear()
                return ()
            case Plan() if entry.counts:
                return self._plan(message)
            case Plan() | StepDone():
                return tuple(dict.fromkeys(self.rows(message.epoch, message.number).values()))
            case Admitted():
                return self._named(message.epoch, message.number, message.slots)
            case Result():
                return self._named(message.epoch, message.number, message.slots)
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


IGNORED_FIELDS: dict[str, frozenset[str]] = {
    # Today's code; which graphs pay, and what steps take, as measured anew.
    "Hello": frozenset({"version", "graph_sizes", "step_cost"}),
    "Ready": frozenset({"steps"}),  # since the process started; a replay may begin later
    # Slow masks are counted earlier, and the first use of a lexer's state is the slow one.
    "StepDone": frozenset({"seconds", "mask_units"}),
}

# An engine of another kind than the recorded one describes itself otherwise, and is right to.
DEVICE_IGNORED_FIELDS: dict[str, frozenset[str]] = {
    "Hello": frozenset({"attention", "step_tokens"}),
}

# Made by the shell and not by the core: telemetry, all of it.
SHELL_MESSAGES = frozenset({"Heartbeat"})


def ignored_fields(kind: str, other_device: bool = False) -> frozenset[str]:
    """The fields of message type `kind` that are not compared."""
    fields = IGNORED_FIELDS.get(kind, frozenset())
    return fields | DEVICE_IGNORED_FIELDS.get(kind, frozenset()) if other_device else fields


MISSING = "(missing)"

Skips = Callable[[str], frozenset[str]]


class Mismatch(NamedTuple):
    """`field` is a path such as `rows[2].ids[0]`; the values are plain: numbers, text, lists."""

    field: str
    recorded: object
    replayed: object


def first_mismatch(
    recorded: object, replayed: object, skips: Skips = ignored_fields
) -> Mismatch | None:
    """The first difference between `recorded` and `replayed`, in the order of the fields, or None.

    `skips(type name)`: fields of such a struct that are left out. Floats are equal or not: what a
    core computes from the same numbers is the same to the last bit.
    """
    return next(_differences("", recorded, replayed, skips), None)


def plain(value: object) -> object:
    """`value` as JSON could hold it: structs as lists with their type's name, packed ids as
    integers."""
    if isinstance(value, msgspec.Struct):
        fields = value.__struct_fields__
        return {type(value).__name__: {name: plain(getattr(value, name)) for name in fields}}
    if isinstance(value, bytes):
        return unpack(value).tolist() if len(value) % TOKEN_BYTES == 0 else value.hex()
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    return value


def _differences(path: str, a: Any, b: Any, skips: Skips) -> Iterator[Mismatch]:
    if type(a) is not type(b):
        named = isinstance(a, msgspec.Struct) and isinstance(b, msgspec.Struct)
        if named:
            yield Mismatch(_join(path, "type"), type(a).__name__, type(b).__name__)
        elif a != b or isinstance(a, bool) or isinstance(b, bool):
            yield Mismatch(path, plain(a), plain(b))
    elif isinstance(a, msgspec.Struct):
        skipped = skips(type(a).__name__)
        for name in a.__struct_fields__:
            if name not in skipped:
                yield from _differences(
                    _join(path, name), getattr(a, name), getattr(b, name), skips
                )
    elif a == b:
        return
    elif isinstance(a, bytes) and len(a) % TOKEN_BYTES == 0 and len(b) % TOKEN_BYTES == 0:
        yield from _in_sequence(path, unpack(a).tolist(), unpack(b).tolist(), skips)
    elif isinstance(a, (list, tuple)):
        yield from _in_sequence(path, a, b, skips)
    elif isinstance(a, dict):
        for key in [*a, *(key for key in b if key not in a)]:
            at = f"{path}[{key!r}]"
            yield from _differences(at, a.get(key, MISSING), b.get(key, MISSING), skips)
    else:
        yield Mismatch(path, plain(a), plain(b))


def _in_sequence(path: str, a: Sequence[Any], b: Sequence[Any], skips: Skips) -> Iterator[Mismatch]:
    for at, (one, other) in enumerate(zip(a, b, strict=False)):
        yield from _differences(f"{path}[{at}]", one, other, skips)
    if len(a) != len(b):
        at = min(len(a), len(b))
        yield Mismatch(
            f"{path}[{at}]",
            plain(a[at]) if at < len(a) else MISSING,
            plain(b[at]) if at < len(b) else MISSING,
        )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


# Names whose values are one process's or one run's own.
LOCAL_NAMES = ("request_id", "request_ids", "epoch", "incarnation", "incarnations")

Value = TypeVar("Value")
Change = Callable[[Any], Any]


def rewritten(value: Value, changes: Mapping[str, Change]) -> Value:
    """`value` with `changes[name]` applied to every field of that name; tuples of such values
    (`request_ids`) element by element. Returns `value` itself where nothing changes."""
    return _rewritten(value, changes)


def _rewritten(value: Any, changes: Mapping[str, Change]) -> Any:
    if isinstance(value, msgspec.Struct):
        changed = {}
        for name in value.__struct_fields__:
            old = getattr(value, name)
            new = _changed(old, changes[name]) if name in changes else _rewritten(old, changes)
            if new is not old:
                changed[name] = new
        return msgspec.structs.replace(value, **changed) if changed else value
    if isinstance(value, tuple) and any(isinstance(one, msgspec.Struct) for one in value):
        new = tuple(_rewritten(one, changes) for one in value)
        return new if any(a is not b for a, b in zip(new, value, strict=True)) else value
    return value


def _changed(value: Any, change: Change) -> Any:
    if isinstance(value, tuple):
        return tuple(change(one) for one in value)
    return value if value is None else change(value)


class NumberedIds:
    """Names for values in the order in which they first appear: r0, r1, ..."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._names: dict[Hashable, str] = {}

    def __call__(self, value: Hashable) -> str:
        return self._names.setdefault(value, f"{self._prefix}{len(self._names)}")


class CountedIds:
    """Small numbers for large ones, in the order in which they first appear; 0 stays 0."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {0: 0}

    def __call__(self, value: int) -> int:
        return self._numbers.setdefault(value, len(self._numbers))


def canonical_changes() -> dict[str, Change]:
    """Changes under which two runs of the same requests become comparable."""
    requests, epochs, lives = NumberedIds("r"), CountedIds(), CountedIds()
    return {
        "request_id": requests,
        "request_ids": requests,
        "epoch": epochs,
        "incarnation": lives,
        "incarnations": lives,
    }


@dataclass(frozen=True)
class Difference:
    """seq: of the recorded output that differs, or of the input that gave one too many or too few.

    `cause` is the input; `field` is "" where a whole message is missing or too much.
    """

    seq: int
    channel: str
    field: str
    recorded: object
    replayed: object
    cause: TraceEntry

    def as_json(self) -> dict[str, object]:
        """The object that `--json` prints."""
        names = ("seq", "channel", "field", "recorded", "replayed")
        return {name: getattr(self, name) for name in names}


def first_difference(
    exchange: TraceExchange, sends: list[Send], skips: Skips, tail: bool = False
) -> Difference | None:
    """The first difference of an exchange; compares in order. `tail`: the recording may have ended
    within this exchange, so that missing recorded outputs mean nothing."""
    for entry, send in zip(exchange.outputs, sends, strict=False):
        mismatch = _of_one(entry, send, skips)
        if mismatch is not None:
            return Difference(entry.seq, entry.channel, *mismatch, exchange.input)
    if len(sends) > len(exchange.outputs) and not tail:
        extra = sends[len(exchange.outputs)]
        return Difference(
            exchange.input.seq, extra.channel, "", MISSING, plain(extra.message), exchange.input
        )
    if len(exchange.outputs) > len(sends):
        lost = exchange.outputs[len(sends)]
        return Difference(lost.seq, lost.channel, "", plain(lost.message), MISSING, exchange.input)
    return None


def _of_one(entry: TraceEntry, send: Send, skips: Skips) -> Mismatch | None:
    if entry.channel == send.channel and entry.peer == send.to and entry.message == send.message:
        return None  # by far the most, and one comparison in C
    kind, replayed = entry.kind, type(send.message).__name__
    unencoded = isinstance(entry.message, Unencoded)
    if unencoded:
        kind = entry.message.kind
    if kind != replayed:
        return Mismatch("type", kind, replayed)
    for name, one, other in (
        ("channel", entry.channel, send.channel),
        ("to", entry.peer, send.to),
    ):
        if one != other:
            return Mismatch(name, one, other)
    if unencoded:
        return None  # it could not be encoded, so that its fields are not known
    return first_mismatch(entry.message, send.message, skips)


MAX_IDS = 6
MAX_VALUE_CHARS = 40
HIDDEN = frozenset({"request_id", "attempt", "params", "trace", "gateway", "detokenizer", "group"})


def line(message: object, width: int = 110) -> str:
    """The fields that are not at their defaults, without the request's id; at most `width`
    characters."""
    shown = ", ".join(_fields(message))
    return shown if len(shown) <= width else shown[: width - 1] + "…"


def arrow(entry: TraceEntry) -> str:
    """Direction and peer: `<- scheduler-0`, `-> everyone`, `-- note`."""
    if entry.direction == "note":
        return "-- note"
    if entry.channel == "local":
        peer = "itself" if entry.direction == "in" else "driver"
    else:
        peer = entry.peer or "everyone"
    return f"{'<-' if entry.direction == 'in' else '->'} {peer}"


def _fields(message: Any) -> list[str]:
    if not isinstance(message, msgspec.Struct):
        return [_value(message)]
    required = len(message.__struct_fields__) - len(message.__struct_defaults__)
    parts = []
    for at, name in enumerate(message.__struct_fields__):
        value = getattr(message, name)
        default = (
            message.__struct_defaults__[at - required] if at >= required else msgspec.NODEFAULT
        )
        if name in HIDDEN or value is default or value == default or value in ("", b"", ()):
            continue
        parts.append(f"{name}={_value(value)}")
    return parts


def _value(value: Any, named: bool = True) -> str:
    if isinstance(value, bytes):
        return _ids(value)
    if isinstance(value, str):
        return repr(value if len(value) <= MAX_VALUE_CHARS else value[: MAX_VALUE_CHARS - 1] + "…")
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, msgspec.Struct):
        name = getattr(value, "request_id", "") if named else ""
        return "(" + ", ".join([*([name] if name else []), *_fields(value)]) + ")"
    if isinstance(value, (list, tuple)):
        # A message with one row is named after that row's request already.
        return "[" + ", ".join(_value(one, len(value) > 1) for one in value) + "]"
    return str(value)


def _ids(raw: bytes) -> str:
    if len(raw) % 4:
        return f"{len(raw)} bytes"
    ids = unpack(raw)
    if len(ids) <= MAX_IDS:
        return "[" + " ".join(map(str, ids.tolist())) + "]"
    first = " ".join(map(str, ids[: MAX_IDS - 2].tolist()))
    return f"[{first} … {ids[-1]}]x{len(ids)}"


MAX_HISTORY = 8  # messages shown
MAX_REQUESTS = 3  # named; a step may be about hundreds
MAX_HISTORY_CHARS = 300


def explain(recording: LoadedTrace, difference: Difference) -> list[str]:
    """Lines that explain a difference to people."""
    cause = difference.cause
    requests, earlier = history(recording.entries, difference)
    lines = [
        f"first difference: message {difference.seq}, {_place(difference)}",
        f"  recorded  {_shown(difference.recorded)}",
        f"  replayed  {_shown(difference.replayed)}",
        f"  came of   message {cause.seq}: {cause.kind} {arrow(cause)}, "
        f"{cause.time - recording.begin:.4f} s into the recording",
    ]
    if requests:
        more = f" and {len(requests) - MAX_REQUESTS} more" * (len(requests) > MAX_REQUESTS)
        lines.append(f"  about     {', '.join(requests[:MAX_REQUESTS])}{more}; before it:")
    else:
        lines.append("  before it:")
    begin = recording.begin
    lines += [
        f"    {entry.seq:>6} {entry.time - begin:>9.4f}  {arrow(entry):<17} {entry.channel:<8} "
        f"{entry.kind:<10} {line(entry.message, 90)}"
        for entry in earlier
    ]
    return lines


def history(
    entries: Sequence[TraceEntry], difference: Difference
) -> tuple[tuple[str, ...], list[TraceEntry]]:
    """(the requests that the difference is about, the last messages about them up to its cause)."""
    subjects = Subjects()
    about = [(entry, subjects.of(entry)) for entry in entries
             if entry.seq <= max(difference.seq, difference.cause.seq)]  # fmt: skip
    named = {entry.seq: ids for entry, ids in about}
    requests = _at(difference, entries) or named.get(difference.seq) or ()
    requests = requests or named.get(difference.cause.seq, ())
    wanted = set(requests[:MAX_REQUESTS])
    earlier = deque(
        (entry for entry, ids in about
         if entry.seq <= difference.cause.seq and entry.direction != "note"
         and (not wanted or not wanted.isdisjoint(ids))),
        maxlen=MAX_HISTORY,
    )  # fmt: skip
    return requests, list(earlier)


def _at(difference: Difference, entries: Sequence[TraceEntry]) -> tuple[str, ...]:
    """The request of the very row that differs, where the field names one: `rows[3].ids[0]`."""
    entry = next((e for e in entries if e.seq == difference.seq), None)
    head, _, rest = difference.field.partition("[")
    rows = getattr(entry.message, head, None) if entry is not None else None
    number = rest.partition("]")[0]
    if not isinstance(rows, tuple) or not number.isdigit() or int(number) >= len(rows):
        return ()
    name = getattr(rows[int(number)], "request_id", None)
    return (name,) if isinstance(name, str) else ()


def _place(difference: Difference) -> str:
    if not difference.field:
        return f"channel {difference.channel}: a whole message"
    return f"channel {difference.channel}, field {difference.field}"


def _shown(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= MAX_HISTORY_CHARS else text[: MAX_HISTORY_CHARS - 1] + "…"


CLOCKED = frozenset({"Tick"})  # how many there are is the timer's business
SHARED_LINES = 3


def add_diff_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", type=Path, metavar="A")
    parser.add_argument("b", type=Path, metavar="B")
    parser.add_argument("--outputs", action="store_true", help="compare only what was sent")


def replay_diff(options: argparse.Namespace) -> int:
    """Compares two traces; returns EQUAL or DIFFERENT."""
    a, b = load(options.a), load(options.b)
    if a.header.name != b.header.name:
        raise CannotReplay(USAGE, f"traces of two stages: {a.stage} and {b.stage}")
    for recording in (a, b):
        print(recording.title)
        warn_of_tail(recording)
    ours, theirs = ([*comparable(r, options.outputs)] for r in (a, b))
    print_count_changes(ours, theirs)
    if not print_first_difference(ours, theirs, a, b):
        print(f"no difference in {counted(len(ours), 'message')}")
        return EQUAL
    return DIFFERENT


def comparable(recording: LoadedTrace, outputs_only: bool) -> Iterator[TraceEntry]:
    """Inputs and outputs of the core, without what a timer or the shell adds, under plain names."""
    changes = canonical_changes()
    for entry in recording.entries:
        if entry.direction == "note" or entry.kind in SHELL_MESSAGES | CLOCKED:
            continue
        message = rewritten(entry.message, changes)
        if entry.direction == "out" or not outputs_only:
            yield TraceEntry(
                entry.seq, entry.time, entry.direction, entry.channel, entry.peer, entry.number,
                entry.sent, message, entry.size,
            )  # fmt: skip


def print_count_changes(a: list[TraceEntry], b: list[TraceEntry]) -> None:
    """Prints the kinds of messages whose counts differ between the two traces."""
    ours, theirs = (Counter((e.direction, e.channel, e.kind) for e in side) for side in (a, b))
    for key in sorted(ours.keys() | theirs.keys()):
        if ours[key] != theirs[key]:
            direction, channel, kind = key
            print(f"  {direction:<4} {channel:<9} {kind:<12} {ours[key]:>8} {theirs[key]:>8}")


def print_first_difference(
    a: list[TraceEntry], b: list[TraceEntry], left: LoadedTrace, right: LoadedTrace
) -> bool:
    """Prints the first difference; False if there is none."""
    for at, (one, other) in enumerate(zip_longest(a, b)):
        found = _difference(one, other)
        if found is None:
            continue
        print(f"first difference: {found}")
        for entry in a[max(0, at - SHARED_LINES) : at]:
            print(f"    both {_row(entry, left)}")
        for name, entry, side in (("A", one, left), ("B", other, right)):
            print(f"       {name} {_row(entry, side) if entry is not None else '(ended)'}")
        return True
    return False


def _difference(a: TraceEntry | None, b: TraceEntry | None) -> str | None:
    if a is None or b is None:
        return f"{'A' if a is None else 'B'} ended before"
    for name in ("direction", "channel", "peer", "kind"):
        if getattr(a, name) != getattr(b, name):
            return f"{name}: {getattr(a, name)!r} and {getattr(b, name)!r}"
    mismatch = first_mismatch(a.message, b.message)
    if mismatch is None:
        return None
    return f"{a.kind}.{mismatch.field}: {mismatch.recorded!r} and {mismatch.replayed!r}"


def _row(entry: TraceEntry, recording: LoadedTrace) -> str:
    seconds = entry.time - recording.begin
    return (
        f"{entry.seq:>6} {seconds:>9.4f} {arrow(entry):<17} {entry.kind:<9} {line(entry.message)}"
    )
