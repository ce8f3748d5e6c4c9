"""From the bytes of a body to a checked request.

Unsupported fields are refused by name, unknown ones reported, also within messages and tools. 5.0
counts as 5 where a body needs an integer. Knows no field by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple, TypeVar

import msgspec
from msgspec import inspect

from pipeinfer.gateway.errors import ApiError, from_validation
from pipeinfer.gateway.json_prescan import (
    JsonLimitExceeded,
    prescan,
)
from pipeinfer.gateway.schema import Body
from pipeinfer.gateway.unsupported_fields import (
    ALTERNATIVES,
    FIELDS_OF_OTHER_ENDPOINTS,
    IGNORED_NESTED_FIELDS,
    is_neutral,
)
from pipeinfer.params import JsonValue

# Objects of one body that are looked at, a few ms at the worst. A client that sends more sends the
# same names with each.
MAX_OBJECTS = 2_000

_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_list = msgspec.json.Decoder(list[msgspec.Raw]).decode


class KnownFields(NamedTuple):
    """The fields of the objects that may stand in one place.

    Attributes:
    - known: names of all fields
    - inner: of fields that hold objects, or lists of objects: theirs
    """

    known: frozenset[str]
    inner: Mapping[str, KnownFields]


def unknown_within(body: Mapping[str, msgspec.Raw], kind: type[msgspec.Struct]) -> list[str]:
    """Dotted names of unknown fields within the body's fields ("messages.content.txt"), once for
    each occurrence. `body` is valid for `kind`; null counts as absent.
    """
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
            structs = list(_structs(_type_of(field)))
            if structs:
                within.setdefault(field.encode_name, []).extend(structs)
    return KnownFields(
        frozenset(known), {name: _fields(structs) for name, structs in within.items()}
    )


def _type_of(field: msgspec.structs.FieldInfo) -> inspect.Type:
    """The type of a field, without its description."""
    kind = inspect.type_info(field.type)
    return kind.type if isinstance(kind, inspect.Metadata) else kind


def _structs(kind: inspect.Type) -> Iterator[type[msgspec.Struct]]:
    """Those that a value of this type may be, or hold in a list."""
    if isinstance(kind, inspect.StructType):
        yield kind.cls
    elif isinstance(kind, inspect.ListType):
        yield from _structs(kind.item_type)
    elif isinstance(kind, inspect.UnionType):
        for item in kind.types:
            yield from _structs(item)


MAX_FIELD_BYTES = 32 * 2**10  # bytes of a field that is looked at, some ms at the worst


def with_integral_floats_as_ints(
    body: Mapping[str, msgspec.Raw], kind: type[msgspec.Struct]
) -> bytes | None:
    """The body with 5.0 written as 5 where an integer is needed; None if it has none such. Called
    for bodies that were refused. msgspec.DecodeError.
    """
    types, changed = _integer_fields(kind), dict[str, JsonValue | msgspec.Raw](body)
    for name in types.keys() & body.keys():
        if memoryview(body[name]).nbytes <= MAX_FIELD_BYTES and b"." in bytes(body[name]):
            changed[name] = _as_integers(msgspec.json.decode(body[name]), types[name])
    found = any(changed[name] is not body[name] for name in body)
    return msgspec.json.encode(changed) if found else None


@cache
def _integer_fields(kind: type[msgspec.Struct]) -> dict[str, tuple[inspect.Type, ...]]:
    """Of the fields in which there is a whole number, at any depth."""
    fields = {f.encode_name: _alternatives(_type_of(f)) for f in msgspec.structs.fields(kind)}
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
        takes_integers = any(isinstance(kind, inspect.IntType) for kind in types)
        return int(value) if takes_integers and value.is_integer() else value
    for kind in types:
        if isinstance(value, list) and isinstance(kind, inspect.ListType):
            return [_as_integers(item, _alternatives(kind.item_type)) for item in value]
        if isinstance(value, dict) and isinstance(kind, inspect.StructType):
            inner = _integer_fields(kind.cls)
            return {name: _as_integers(item, inner.get(name, ())) for name, item in value.items()}
    return value


BodyType = TypeVar("BodyType", bound=Body)


def prescanned(body: bytes | bytearray, kind: type[BodyType]) -> Iterator[None]:
    """Checks depth and size of a `body` of type `kind`, a slice each time it is asked to go on; to
    be done before decode(). ApiError 400.
    """
    try:
        yield from prescan(body, kind.json_limits)
    except JsonLimitExceeded as error:
        raise ApiError(400, str(error), code="invalid_value") from None


def decode(
    body: bytes, kind: type[BodyType], on_unknown_fields: Callable[[Sequence[str]], object]
) -> BodyType:
    """The typed request in a pre-scanned `body`. ApiError 400 says which field is wrong and why.

    `on_unknown_fields`: called with the names of unknown fields, if any: of the body, then within
    its fields.
    """
    if not body.strip():
        raise ApiError(400, "the body is empty; it must be a JSON object", code="invalid_json")
    try:
        fields, known = _object(body), kind.__struct_fields__
        other_fields = {name: fields[name] for name in fields if name not in known}
        if other_fields:
            _check_unsupported(other_fields, kind, on_unknown_fields)
        decoded = _typed(body, fields, kind)
        if unknown := unknown_within(fields, kind):
            on_unknown_fields(unknown)
        return decoded
    except msgspec.ValidationError as error:
        raise from_validation(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None


def _typed(body: bytes, fields: Mapping[str, msgspec.Raw], kind: type[BodyType]) -> BodyType:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError:
        with_ints = with_integral_floats_as_ints(fields, kind)
        if with_ints is None:
            raise
        return msgspec.json.decode(with_ints, type=kind)


def _check_unsupported(
    fields: Mapping[str, msgspec.Raw],
    kind: type[Body],
    on_unknown_fields: Callable[[Sequence[str]], object],
) -> None:
    refused, unknown = kind.unsupported_fields, list[str]()
    for name, value in fields.items():
        if name in kind.ignored_fields:
            continue
        if name not in refused:
            unknown.append(name)
        elif not is_neutral(value, refused[name]):
            scope = "endpoint" if name in FIELDS_OF_OTHER_ENDPOINTS else "server"
            message = f"{name} is not supported by this {scope}"
            instead = [
                alternative
                for alternative in ALTERNATIVES.get(name, ())
                if alternative in kind.__struct_fields__
            ]
            if instead:
                message += f"; ask for {instead[0]}"
            raise ApiError(400, message, name, "unsupported_parameter")
    if unknown:
        on_unknown_fields(unknown)
