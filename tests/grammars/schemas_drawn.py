"""JSON schemas drawn at random, and a few written to be hard. Import it as `import schemas_drawn`.

All of them bound what may go on without end, so that a model that knows nothing comes to an end.
"""

from __future__ import annotations

from random import Random
from typing import Any

Schema = dict[str, Any]

KEYS = ("name", "größe", "日付", "a b", 'quo"te', "x", "long_key_of_an_object", "$ref", "ключ")
WORDS = ("red", "green", "", "ä", "日本", 'a"b', "line\nbreak", "tab\t", "\\")
PATTERNS = ("^[a-z]{2,5}$", "^\\d{3}-\\d{2}$", "^(ja|nein)$", "^[^x]{1,4}$", "^a.c$")
FORMATS = ("date", "time", "uuid", "ipv4")
TREE: Schema = {
    "type": "object",
    "properties": {
        "value": {"type": "integer", "minimum": 0, "maximum": 9},
        "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1},
    },
    "required": ["value"],
    "additionalProperties": False,
}
HARD: tuple[Schema, ...] = (
    {"$ref": "#/$defs/tree", "$defs": {"tree": TREE}},
    {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 3}, {"enum": [1, 2.5, None]}]},
    {"type": ["integer", "boolean"], "minimum": -3, "maximum": 3},
    {"type": "number", "exclusiveMinimum": 0.5, "maximum": 1.5},
    {"type": "integer", "multipleOf": 7, "minimum": -50, "maximum": 50},
    {"type": "array", "prefixItems": [{"const": 1}, {"const": "b"}], "items": False, "minItems": 2},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
    {
        "type": "object",
        "patternProperties": {"^x[0-9]$": {"type": "null"}},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer", "maximum": 5}}},
            {"required": ["a"], "additionalProperties": False, "properties": {"a": {}}},
        ]
    },
    {"type": "string", "format": "date-time"},
    {"type": "object", "properties": {"ü€😀": {"const": "😀"}}, "required": ["ü€😀"],
     "additionalProperties": False},
    {"const": {"a": [1, {"b": None}]}},
)  # fmt: skip


def drawn(random: Random, depth: int = 3) -> Schema:
    """One schema, nested up to `depth` deep."""
    kinds = [_string, _integer, _number, _enum, _plain]
    if depth:
        kinds += [_object, _object, _array, _any_of]
    return random.choice(kinds)(random, depth)


def _string(random: Random, _depth: int) -> Schema:
    return random.choice(
        [
            {"type": "string", "maxLength": random.randint(0, 8)},
            {"type": "string", "minLength": 2, "maxLength": random.randint(2, 6)},
            {"type": "string", "pattern": random.choice(PATTERNS)},
            {"type": "string", "format": random.choice(FORMATS)},
        ]
    )


def _integer(random: Random, _depth: int) -> Schema:
    least = random.randint(-1000, 1000)
    return {"type": "integer", "minimum": least, "maximum": least + random.randint(0, 5000)}


def _number(random: Random, _depth: int) -> Schema:
    return {"type": "number", "minimum": -random.random(), "maximum": 9 * random.random()}


def _enum(random: Random, _depth: int) -> Schema:
    return {"enum": random.sample([*WORDS, 1, -2.5, True, None], random.randint(1, 4))}


def _plain(random: Random, _depth: int) -> Schema:
    return random.choice([{"type": "boolean"}, {"type": "null"}, {"const": random.choice(WORDS)}])


def _object(random: Random, depth: int) -> Schema:
    names = random.sample(KEYS, random.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: drawn(random, depth - 1) for name in names},
        "required": random.sample(names, random.randint(0, len(names))),
        "additionalProperties": False,
    }


def _array(random: Random, depth: int) -> Schema:
    return {"type": "array", "items": drawn(random, depth - 1), "maxItems": random.randint(0, 3)}


def _any_of(random: Random, depth: int) -> Schema:
    return {"anyOf": [drawn(random, depth - 1) for _ in range(random.randint(2, 3))]}
