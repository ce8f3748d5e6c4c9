"""5.0 where a body needs a whole number, which JSON takes for 5: some clients know one kind alone.

Looks only at bodies that were refused, and changes only fields of that type.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import msgspec
from msgspec import inspect

from pipeinfer.json_values import JsonValue

MAX_FIELD_BYTES = 32 * 2**10  # bytes of a field that is looked at, some ms at the worst


def with_integral_floats_as_ints(
    body: Mapping[str, msgspec.Raw], kind: type[msgspec.Struct]
) -> bytes | None:
    """The body of `kind` with its whole numbers written as such; None where it has no others.
    msgspec.DecodeError."""
    types, changed = _integer_fields(kind), dict[str, JsonValue | msgspec.Raw](body)
    for name in types.keys() & body.keys():
        if memoryview(body[name]).nbytes <= MAX_FIELD_BYTES and b"." in bytes(body[name]):
            changed[name] = _as_integers(msgspec.json.decode(body[name]), types[name])
    found = any(changed[name] is not body[name] for name in body)
    return msgspec.json.encode(changed) if found else None


@cache
def _integer_fields(kind: type[msgspec.Struct]) -> dict[str, tuple[inspect.Type, ...]]:
    """Of the fields in which there is a whole number, at any depth."""
    fields = {
        f.encode_name: _alternatives(inspect.type_info(f.type))
        for f in msgspec.structs.fields(kind)
    }
    return {name: types for name, types in fields.items() if any(map(_has_integer, types))}


def _alternatives(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)


def _has_integer(kind: inspect.Type) -> bool:
    if isinstance(kind, inspect.ListType):
        return any(map(_has_integer, _alternatives(kind.item_type)))
    if isinstance(kind, inspect.StructType):
        return bool(_integer_fields(kind.cls))
    return isinstance(kind, inspect.IntType)


def _as_integers(value: JsonValue, types: tuple[inspect.Type, ...]) -> JsonValue:
    if isinstance(value, float):
        wanted = any(isinstance(kind, inspect.IntType) for kind in types)
        return int(value) if wanted and value.is_integer() else value
    for kind in types:
        if isinstance(value, list) and isinstance(kind, inspect.ListType):
            return [_as_integers(item, _alternatives(kind.item_type)) for item in value]
        if isinstance(value, dict) and isinstance(kind, inspect.StructType):
            inner = _integer_fields(kind.cls)
            return {name: _as_integers(item, inner.get(name, ())) for name, item in value.items()}
    return value
