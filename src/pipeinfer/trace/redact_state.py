"""Rewrites a scheduler's snapshot so that it has no text and no token ids.

Messages in it are rewritten like those of a trace; where ids lie outside of messages is named here.
What looks like ids elsewhere is refused: better no trace than one that tells. Knows no file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from pipeinfer.trace.permutation import Permutation
from pipeinfer.trace.restore import known_class

Place = tuple[str, str]  # a class and an attribute of it
Rewrite = Callable[[msgspec.Struct], msgspec.Struct]

_REQUEST = "pipeinfer.scheduler.request:Request"
IDS: frozenset[Place] = frozenset((_REQUEST, name) for name in ("outputs", "stops"))
NUMBERS: frozenset[Place] = frozenset(
    (
        (_REQUEST, "counts_in_flight"),
        ("pipeinfer.scheduler.flights:Flight", "slots"),
        ("pipeinfer.scheduler.slots:Slots", "_free"),
        ("pipeinfer.scheduler.credits:Credits", "_planned"),
        ("pipeinfer.scheduler.epochs:Epochs", "_steps"),
        ("pipeinfer.scheduler.epochs:Epochs", "_condemned"),
        ("pipeinfer.scheduler.agreement:_Rank", "first"),
        ("pipeinfer.scheduler.agreement:_Rank", "own"),
    )
)
_SEQUENCES = ("list", "tuple", "set", "frozenset", "deque")
_MAPPINGS = ("dict", "ordered", "counter")
_encode = msgspec.msgpack.Encoder().encode


def redact_state(state: bytes, message: Rewrite, names: Permutation) -> bytes:
    """The snapshot with `message` applied to every message and the ids renamed by `names`.

    Raises ValueError for a part of the state that may hold ids and is not known to.
    """
    try:
        version, nodes = msgspec.msgpack.decode(state, type=tuple[int, list[list[Any]]])
        places = _places(nodes)
        rewritten = [_node(n, places[i], message, names) for i, n in enumerate(nodes)]
        return _encode([version, rewritten])
    except (LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"the state is none: {type(error).__name__}: {error}") from None


def _places(nodes: list[list[Any]]) -> list[Place]:
    """For each node the attribute that it hangs from; what is inside a container hangs with it."""
    places: list[Place | None] = [None] * len(nodes)
    places[0] = ("", "")
    waiting = [0]
    while waiting:
        number = waiting.pop()
        node, place = nodes[number], places[number]
        for inner, value in _parts(node, place or ("", "")):
            if type(value) is list and places[value[0]] is None:
                places[value[0]] = inner
                waiting.append(value[0])
    return [place or ("", "") for place in places]


def _parts(node: list[Any], place: Place) -> list[tuple[Place, Any]]:
    if node[0] == "object":
        flat = node[2]
        return [((node[1], name), raw) for name, raw in zip(flat[::2], flat[1::2], strict=True)]
    if node[0] in (*_SEQUENCES, *_MAPPINGS):
        return [(place, raw) for raw in node[1]]
    return [(place, raw) for raw in node[2]] if node[0] == "named" else []


def _node(
    node: list[Any],
    place: Place,
    message: Rewrite,
    names: Permutation,
) -> list[Any]:
    kind = node[0]
    if kind == "struct":
        decoded = msgspec.msgpack.decode(node[2], type=known_class(node[1]))
        return [kind, node[1], _encode(message(decoded))]
    if place in IDS and kind == "ints":
        return [kind, names.ids(node[1])]
    if place in IDS:
        if kind not in _SEQUENCES or not all(type(token) is int for token in node[1]):
            raise ValueError(f"{'.'.join(place)} was expected to hold token ids")
        ids = names.array(np.array(node[1], dtype="<i4")).tolist()
        return [kind, ids, *node[2:]]
    for inner, raw in _parts(node, place):
        if type(raw) is bytes:
            raise ValueError(f"{'.'.join(inner)} may hold token ids: it cannot be redacted")
    numbers = kind in (*_SEQUENCES, *_MAPPINGS) and node[1] and all(type(v) is int for v in node[1])
    if (numbers or kind in ("array", "bytearray", "ints")) and place not in NUMBERS:
        raise ValueError(f"{'.'.join(place)} may hold token ids: it cannot be redacted")
    return node
