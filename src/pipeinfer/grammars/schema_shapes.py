"""Which keywords of a JSON schema have values that JSON Schema does not give them, as schemas that
are written by hand do: `required: true` within a property, `type: "float"`, `properties: []`.

Knows the keywords that the compiler of grammars knows, which refuses such a schema as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from pipeinfer.json_values import JsonObject, JsonValue

TYPES = frozenset(("null", "boolean", "object", "array", "number", "string", "integer"))
ValueTest = Callable[[JsonValue], bool]


def _schema(value: JsonValue) -> bool:
    return isinstance(value, dict | bool)


def _schemas(value: JsonValue) -> bool:
    return isinstance(value, list) and bool(value)


def _named(value: JsonValue) -> bool:
    return isinstance(value, dict)


def _number(value: JsonValue) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _count(value: JsonValue) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 == value % 1
    )


def _text(value: JsonValue) -> bool:
    return isinstance(value, str)


def _texts(value: JsonValue) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _type(value: JsonValue) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(each, str) and each in TYPES for each in value)
    return isinstance(value, str) and value in TYPES


_SHAPES: dict[str, ValueTest] = {
    "type": _type,
    "enum": lambda value: isinstance(value, list),
    "required": _texts,
    "items": lambda value: isinstance(value, dict | bool | list),
    # Draft 4 says true and false, of minimum and maximum.
    "exclusiveMinimum": lambda value: isinstance(value, bool) or _number(value),
    "exclusiveMaximum": lambda value: isinstance(value, bool) or _number(value),
    "multipleOf": lambda value: _number(value) and isinstance(value, int | float) and value > 0,
    **dict.fromkeys(
        ("properties", "patternProperties", "$defs", "definitions", "dependentRequired",
         "dependentSchemas", "dependencies"), _named
    ),
    **dict.fromkeys(
        ("additionalItems", "additionalProperties", "not", "if", "then", "else", "contains",
         "propertyNames", "unevaluatedItems", "unevaluatedProperties"), _schema
    ),
    **dict.fromkeys(("prefixItems", "anyOf", "oneOf", "allOf"), _schemas),
    **dict.fromkeys(("minimum", "maximum"), _number),
    **dict.fromkeys(
        ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties",
         "minContains", "maxContains"), _count
    ),
    **dict.fromkeys(("pattern", "format", "$ref", "$anchor", "$id", "id", "$schema"), _text),
}  # fmt: skip
_WHOLE = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_DRAFT = re.compile(r"https?://json-schema\.org/draft(?:-0[3467]|/2019-09|/2020-12)/schema#?")


def malformed(schema: JsonObject) -> list[str]:
    """Keywords of it whose values are none of theirs."""
    return [key for key, shape in _SHAPES.items() if key in schema and not shape(schema[key])]


def normalized(schema: JsonObject) -> JsonObject:
    """A copy that says the same in the way that the compiler reads: counts as integers, and no name
    of a dialect that it does not have."""
    made = dict(schema)
    for key in _WHOLE:
        if isinstance(count := made.get(key), float):
            made[key] = int(count)
    draft = made.pop("$schema", None)
    if isinstance(draft, str) and _DRAFT.fullmatch(draft):
        made["$schema"] = (
            ("https" if "/20" in draft else "http") + "://" + draft.partition("://")[2]
        )
    return made
