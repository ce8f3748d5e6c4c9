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

Attribute = tuple[str, str]  # a class and an attribute of it
Rewrite = Callable[[msgspec.Struct], msgspec.Struct]

_REQUEST = "pipeinfer.scheduler.request:Request"
IDS: frozenset[Attribute] = frozenset((_REQUEST, name) for name in ("outputs", "stops"))
ZEROED: frozenset[Attribute] = frozenset(
    (_REQUEST, name) for name in ("logprobs", "prompt_logprobs")
)
NUMBERS: frozenset[Attribute] = frozenset(
    (
        (_REQUEST, "counts_in_flight"),
        ("pipeinfer.scheduler.engine_state:StepInFlight", "slots"),
        ("pipeinfer.scheduler.engine_state:Slots", "_free"),
        ("pipeinfer.scheduler.engine_state:PageCredits", "_planned"),
        ("pipeinfer.scheduler.epochs:Epochs", "_steps"),
        ("pipeinfer.scheduler.epochs:FencedRanks", "_fenced"),
        ("pipeinfer.scheduler.epochs:FencedRanks", "_to_kill"),
        ("pipeinfer.scheduler.queue:GrammarQueue", "_processes"),
        ("pipeinfer.scheduler.queue:PendingGrammar", "answered"),
        ("pipeinfer.scheduler.queue:SharedPrefixes", "_blocks_led"),
        ("pipeinfer.fair_queue:_Flows", "_last"),
        ("pipeinfer.histogram:Histogram", "counts"),
        ("pipeinfer.scheduler.engine_state:_Rank", "first"),
        ("pipeinfer.scheduler.engine_state:_Rank", "own"),
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
        attributes = _attributes(nodes)
        rewritten = [_node(n, attributes[i], message, names) for i, n in enumerate(nodes)]
        return _encode([version, rewritten])
    except (LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"the state is none: {type(error).__name__}: {error}") from None


def _attributes(nodes: list[list[Any]]) -> list[Attribute]:
    """For each node the attribute that it hangs from; what is inside a container hangs with it."""
    attributes: list[Attribute | None] = [None] * len(nodes)
    attributes[0] = ("", "")
    waiting = [0]
    while waiting:
        number = waiting.pop()
        node, attribute = nodes[number], attributes[number]
        for inner, value in _inner(node, attribute or ("", "")):
            if type(value) is list and attributes[value[0]] is None:
                attributes[value[0]] = inner
                waiting.append(value[0])
    return [attribute or ("", "") for attribute in attributes]


def _inner(node: list[Any], attribute: Attribute) -> list[tuple[Attribute, Any]]:
    if node[0] == "object":
        flat = node[2]
        return [((node[1], name), raw) for name, raw in zip(flat[::2], flat[1::2], strict=True)]
    if node[0] in (*_SEQUENCES, *_MAPPINGS):
        return [(attribute, raw) for raw in node[1]]
    return [(attribute, raw) for raw in node[2]] if node[0] == "named" else []


def _node(
    node: list[Any],
    attribute: Attribute,
    message: Rewrite,
    names: Permutation,
) -> list[Any]:
    kind = node[0]
    if kind == "struct":
        decoded = msgspec.msgpack.decode(node[2], type=known_class(node[1]))
        return [kind, node[1], _encode(message(decoded))]
    if attribute in ZEROED and kind == "bytearray":
        return [kind, bytes(len(node[1]))]
    if attribute in IDS and kind == "ints":
        return [kind, names.ids(node[1])]
    if attribute in IDS:
        if kind not in _SEQUENCES or not all(type(token) is int for token in node[1]):
            raise ValueError(f"{'.'.join(attribute)} was expected to hold token ids")
        ids = names.array(np.array(node[1], dtype="<i4")).tolist()
        return [kind, ids, *node[2:]]
    for inner, raw in _inner(node, attribute):
        if type(raw) is bytes:
            raise ValueError(f"{'.'.join(inner)} may hold token ids: it cannot be redacted")
    numbers = kind in (*_SEQUENCES, *_MAPPINGS) and node[1] and all(type(v) is int for v in node[1])
    if (numbers or kind in ("array", "bytearray", "ints")) and attribute not in NUMBERS:
        raise ValueError(f"{'.'.join(attribute)} may hold token ids: it cannot be redacted")
    return node
