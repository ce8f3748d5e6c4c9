"""Fields within bodies (of messages, their parts, tools and the like) that nobody knows.

Goes over the JSON of a body beside the types of its fields; free-form objects, such as schemas and
calls, are left alone. Knows no field by name but those that cannot change an answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import NamedTuple

import msgspec
from msgspec import inspect

from pipeinfer.gateway.unsupported_fields import IGNORED_NESTED_FIELDS

# Objects of one body that are looked at, a few ms at the worst. A client that sends more sends the
# same names with each.
MAX_OBJECTS = 2_000

_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_list = msgspec.json.Decoder(list[msgspec.Raw]).decode


class KnownFields(NamedTuple):
    """Of the objects that may stand in one place. `known`: all their fields. `inner`: those in
    which there are objects with fields in turn, or lists of such."""

    known: frozenset[str]
    inner: Mapping[str, KnownFields]


def unknown_within(body: Mapping[str, msgspec.Raw], kind: type[msgspec.Struct]) -> list[str]:
    """Names of fields, behind those of the fields that they stand in ("messages.content.txt"), once
    for each time that one is there. `body` is known to be right for `kind`. A field of null is as
    none."""
    inner = fields_of(kind).inner
    pending = [(name, body[name], inner[name]) for name in inner if name in body]
    found: list[str] = []
    scanned = 0
    while pending and scanned < MAX_OBJECTS:
        where, raw, fields = pending.pop()
        first = bytes(memoryview(raw)[:1])
        if first == b"[":
            pending += [(where, item, fields) for item in reversed(_list(raw)[:MAX_OBJECTS])]
        elif first == b"{":
            scanned += 1
            for name, value in _object(raw).items():
                if name in fields.inner:
                    pending.append((f"{where}.{name}", value, fields.inner[name]))
                elif name not in fields.known and name not in IGNORED_NESTED_FIELDS:
                    found += [f"{where}.{name}"] if bytes(memoryview(value)[:5]) != b"null" else []
    return found


@cache
def fields_of(kind: type[msgspec.Struct]) -> KnownFields:
    """Of a body."""
    return _fields([kind])


def _fields(kinds: list[type[msgspec.Struct]]) -> KnownFields:
    known: set[str] = set()
    within: dict[str, list[type[msgspec.Struct]]] = {}
    for kind in kinds:
        for field in msgspec.structs.fields(kind):
            known.add(field.encode_name)
            structs = list(_structs(inspect.type_info(field.type)))
            if structs:
                within.setdefault(field.encode_name, []).extend(structs)
    return KnownFields(
        frozenset(known), {name: _fields(structs) for name, structs in within.items()}
    )


def _structs(kind: inspect.Type) -> Iterator[type[msgspec.Struct]]:
    """Those that a value of this type may be, or hold in a list."""
    if isinstance(kind, inspect.StructType):
        yield kind.cls
    elif isinstance(kind, inspect.ListType):
        yield from _structs(kind.item_type)
    elif isinstance(kind, inspect.UnionType):
        for item in kind.types:
            yield from _structs(item)
