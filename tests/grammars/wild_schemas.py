"""JSON schemas drawn at random of all that JSON Schema 2020-12 has, as strangers' tools write them:
also what the compiler of grammars has no word for. Import it as `import wild_schemas`."""

from __future__ import annotations

from random import Random
from typing import Any

Schema = dict[str, Any]

FORMATS = ("date", "no-such", "int64")
NAMES = ("a", "b", "kind", "größe")
WORDS = ("red", "green", "ä", "1")
PATTERNS = (
    r"^(?!^[-+.]*$)[+-]?0*\d{0,3}\.?\d{0,2}$",
    r"^(?=.*[a-z])(?=.*\d).{2,6}$",
    r"^(?!\.)(?!.*\.\.)[a-z.]{0,5}$",
    r"^(?!\s*$).{1,4}$",
    r"^[a-z]{1,3}$",
    r"a(?=b)b?",
)


def drawn(random: Random, depth: int = 3) -> Schema:
    """One schema, nested up to `depth` deep."""
    kinds = [_scalar, _scalar, _listed]
    if depth:
        kinds += [_object, _object, _object, _array, _array, _choice, _reference, _all_of]
    return random.choice(kinds)(random, depth)


def whole(random: Random) -> Schema:
    """One with definitions that it may name."""
    schema = drawn(random)
    schema["$defs"] = {
        "scalar": _scalar(random, 0),
        "point": {
            "type": "object",
            "properties": {
                "x": {"type": "integer", "minimum": 0, "maximum": 9},
                "kind": {"const": "p"},
            },
            "required": ["x"],
        },
        "tree": {
            "type": "object",
            "properties": {"leaf": {"type": "boolean"}, "next": {"$ref": "#/$defs/tree"}},
            "required": ["leaf"],
        },
    }
    return schema


def _scalar(random: Random, _depth: int) -> Schema:
    return random.choice(
        [
            {"type": "string", "maxLength": 3},
            {"type": "string", "pattern": random.choice(PATTERNS)},
            {"type": "string", "format": random.choice(FORMATS), "maxLength": 12},
            {"type": "integer", "minimum": random.choice([0, -(2**63)]), "maximum": 2**63 - 1},
            {"type": "integer", "minimum": 3, "maximum": random.choice([2**53 + 1, 2**64, 50])},
            {"type": "number", "minimum": 0.5, "exclusiveMaximum": 2},
            {"type": random.sample(["string", "integer", "boolean", "null"], 2), "maxLength": 2},
            {"type": ["boolean", "null"], "not": {"type": random.choice(["null", "string"])}},
            {"type": "boolean"},
            {"type": "null", "x-vendor": 1, "nullable": True},
        ]
    )  # fmt: skip


def _listed(random: Random, _depth: int) -> Schema:
    some = random.sample([*WORDS, 1, 2.5, True, None, 2**53 + 1], random.randint(1, 5))
    schema: Schema = {"enum": some} if random.random() < 0.7 else {"const": some[0]}
    if random.random() < 0.4:
        schema["not"] = random.choice(
            [
                {"enum": ["red", 1]},
                {"const": None},
                {"type": "string"},
                {"type": ["null", "number"]},
            ]
        )
    return schema


def _object(random: Random, depth: int) -> Schema:
    names = random.sample(NAMES, random.randint(1, 3))
    schema: Schema = {
        "type": "object",
        "properties": {name: drawn(random, depth - 1) for name in names},
        "required": random.sample(names, random.randint(0, len(names))),
    }
    chance = random.random()
    if chance < 0.1:
        schema = {
            "type": "object",
            "propertyNames": random.choice(
                [{"enum": ["a", "b"]}, {"pattern": "^[ab]$"}, {"maxLength": 2}, {"type": "string"}]
            ),
            "additionalProperties": drawn(random, 0),
            "maxProperties": 2,
        }
    elif chance < 0.3:
        schema["dependentRequired"] = {random.choice(names): [random.choice(names)]}
    elif chance < 0.5:
        name = random.choice(names)
        schema["properties"][name] = {"enum": ["red", "green", 1]}
        schema["if"] = {"properties": {name: {"const": "red"}}}
        if random.random() < 0.5:
            schema["if"]["required"] = [name]
        schema["then"] = {"required": [random.choice(names)]}
        if random.random() < 0.5:
            schema["else"] = {"properties": {"b": {"type": "boolean"}}}
    elif chance < 0.6:
        schema[random.choice(["additionalProperties", "unevaluatedProperties"])] = False
    elif chance < 0.7:
        schema["not"] = {"required": [random.choice(NAMES)]}
    elif chance < 0.8:
        schema["anyOf"] = [{"required": [name]} for name in names]
    elif chance < 0.85:
        schema["dependentSchemas"] = {names[0]: {"properties": {"b": {"type": "null"}}}}
    return schema


def _array(random: Random, depth: int) -> Schema:
    schema: Schema = {
        "type": "array",
        "items": drawn(random, depth - 1),
        "maxItems": random.randint(0, 3),
    }
    chance = random.random()
    if chance < 0.4:
        schema["uniqueItems"] = True
        if random.random() < 0.7:
            schema["items"] = {"enum": random.sample([*WORDS, 1, True], random.randint(1, 4))}
    elif chance < 0.6:
        schema["contains"] = {"type": random.choice(["integer", "string", "boolean"])}
        if random.random() < 0.3:
            schema["minContains"] = random.randint(0, 2)
    return schema


def _choice(random: Random, depth: int) -> Schema:
    key = random.choice(["anyOf", "oneOf", "oneOf"])
    if random.random() < 0.5:
        return {key: [_tagged(random, depth, word) for word in ("red", "green")]}
    return {key: [drawn(random, depth - 1) for _ in range(random.randint(2, 3))]}


def _tagged(random: Random, depth: int, word: str) -> Schema:
    schema: Schema = {
        "type": "object",
        "properties": {"kind": {"const": word}, "a": drawn(random, depth - 1)},
    }
    if random.random() < 0.5:
        schema["required"] = ["kind"]
    return schema


def _all_of(random: Random, depth: int) -> Schema:
    one: Schema = {"type": "object", "properties": {"a": drawn(random, depth - 1)}}
    other = random.choice(
        [{"$ref": "#/$defs/point"}, {"type": "object", "properties": {"b": drawn(random, 0)}}]
    )
    schema: Schema = {"allOf": [one, other]}
    if random.random() < 0.3:
        schema["properties"] = {"größe": {"type": "boolean"}}
    if random.random() < 0.3:
        schema["unevaluatedProperties"] = False
    return schema


def _reference(random: Random, _depth: int) -> Schema:
    return {"$ref": f"#/$defs/{random.choice(['scalar', 'point', 'tree'])}"}
