"""Compares what a replay gave with what was recorded: the first difference, which fields are not
compared, and how a message, a difference and the history of its request read as lines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from pipeinfer.core import Send
from pipeinfer.replay.rebuild import Subjects
from pipeinfer.replay.recording import LoadedTrace, TraceEntry, TraceExchange
from pipeinfer.trace.notes import Unencoded
from pipeinfer.wire import unpack

IGNORED_FIELDS: dict[str, frozenset[str]] = {
    # Today's code; which graphs pay, and what steps take, as measured anew.
    "Hello": frozenset({"version", "graph_sizes", "step_cost"}),
    "Ready": frozenset({"steps"}),  # since the process started; a replay may begin later
    # Slow masks are counted earlier, and whoever first needs a state of a lexer pays for it.
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


ID_BYTES = 4
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
    """Where `replayed` first differs from `recorded`, in the order of the fields, or None.

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
        return unpack(value).tolist() if len(value) % ID_BYTES == 0 else value.hex()
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
    elif isinstance(a, bytes) and len(a) % ID_BYTES == 0 and len(b) % ID_BYTES == 0:
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
        """What `--json` prints."""
        names = ("seq", "channel", "field", "recorded", "replayed")
        return {name: getattr(self, name) for name in names}


def first_difference(
    exchange: TraceExchange, sends: list[Send], skips: Skips, tail: bool = False
) -> Difference | None:
    """Compares in order. `tail`: the recording may have ended within this exchange, so that missing
    recorded outputs mean nothing."""
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
        return None  # it could not be sent, and nobody knows what it said
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


BEFORE = 8  # messages shown
MAX_REQUESTS = 3  # named; a step may be about hundreds
MAX_HISTORY_CHARS = 300


def explain(recording: LoadedTrace, difference: Difference) -> list[str]:
    """Lines for people."""
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
    about = [(entry, subjects.of(entry.message)) for entry in entries
             if entry.seq <= max(difference.seq, difference.cause.seq)]  # fmt: skip
    named = {entry.seq: ids for entry, ids in about}
    requests = _at(difference, entries) or named.get(difference.seq) or ()
    requests = requests or named.get(difference.cause.seq, ())
    wanted = set(requests[:MAX_REQUESTS])
    earlier = deque(
        (entry for entry, ids in about
         if entry.seq <= difference.cause.seq and entry.direction != "note"
         and (not wanted or not wanted.isdisjoint(ids))),
        maxlen=BEFORE,
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
