"""One message as one line of text, for tables, contexts and tooltips.

Knows any struct; what a field means is its own affair. Token ids are shown, long sequences cut.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pipeinfer.packing import unpack
from pipeinfer.replay.recording import Entry

MOST_IDS = 6
MOST_TEXT = 40
HIDDEN = frozenset({"request_id", "attempt", "params", "trace", "gateway", "detokenizer", "group"})


def line(message: object, width: int = 110) -> str:
    """The fields that are not at their defaults, without the request's id; at most `width`
    characters."""
    shown = ", ".join(_fields(message))
    return shown if len(shown) <= width else shown[: width - 1] + "…"


def arrow(entry: Entry) -> str:
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
        return repr(value if len(value) <= MOST_TEXT else value[: MOST_TEXT - 1] + "…")
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
    if len(ids) <= MOST_IDS:
        return "[" + " ".join(map(str, ids.tolist())) + "]"
    first = " ".join(map(str, ids[: MOST_IDS - 2].tolist()))
    return f"[{first} … {ids[-1]}]x{len(ids)}"
