"""Schemas and regular expressions in the compiler's words: what comes fits the schema sent,
or the keyword that it may not fit is named. Also for schemas as pydantic, zod, TypeBox and valibot
write them."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from random import Random

import jsonschema
import pydantic_models
import pytest
import wild_schemas
from hypothesis import given
from hypothesis import strategies as st
from jsonschema.validators import validator_for
from llguidance import LLMatcher
from vocabulary import ENDS, TOKENIZER, allowed, ids_of, source

from pipeinfer.grammars.bounds import GrammarError
from pipeinfer.grammars.rewriting import (
    LEAST_COMPILABLE,
    compilable_schema,
    with_plain_digits,
    without_lookaround,
)

DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"  # pydantic's
KINDS = {
    "Cat": {
        "type": "object",
        "properties": {"kind": {"const": "cat", "default": "cat"}, "lives": {"type": "integer"}},
        "required": ["lives"],
    },
    "Dog": {
        "type": "object",
        "properties": {"kind": {"const": "dog", "default": "dog"}, "good": {"type": "boolean"}},
        "required": ["good"],
    },
}
BASE = {"A": {"type": "object", "properties": {"a": {"type": "integer"}}}}
IF = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}, "b": {"type": "integer"}},
    "required": ["a"],
    "if": {"properties": {"a": {"const": 1}}},
    "then": {"required": ["b"]},
}


def compiled(schema, **options):
    return source(json=json.dumps(compilable_schema(schema, **options).schema))


def allows(schema, text, **options):
    """Whether the grammar of `schema` allows an answer that is the text."""
    row = compiled(schema, **options)
    if row.feed(ids_of(text)):
        return False
    ends = set(allowed(row)) & set(ENDS)
    assert row.error == ""
    return bool(ends)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (
            {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True},
            ["[]", '["b", "a"]', '["a", "b", "c"]'],
            ['["a", "a"]'],
        ),
        (
            {"type": "array", "items": {"enum": list(range(8))}, "uniqueItems": True},
            ["[0, 3, 7]"],
            ["[3, 3]"],
        ),
        (
            {"type": "object", "propertyNames": {"enum": ["a", "b"]},
             "additionalProperties": {"type": "integer"}},
            ["{}", '{"a": 1}', '{"a": 1, "b": 2}'],
            ['{"c": 1}', '{"a": "x"}'],
        ),
        ({"type": "object", "propertyNames": {"pattern": "^x"}}, ['{"x1": 2}'], ['{"y": 2}']),
        ({"type": "string", "format": "of-nobody"}, ['"x"'], ["1"]),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, ["1", '"a"'], ["true"]),
        (
            {"oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}], "$defs": KINDS},
            ['{"kind": "cat", "lives": 1}', '{"kind": "dog", "good": true}'],
            ['{"kind": "cat", "good": true}'],
        ),
        ({"enum": [1, True, "x"], "not": {"const": 1}}, ["true", '"x"'], ["1"]),
        ({"type": ["string", "null"], "not": {"type": "null"}}, ['"a"'], ["null"]),
        (IF, ['{"a": 1, "b": 3}', '{"a": 2}'], ['{"a": 1}', '{"a": 3}']),
        (
            {"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
            ["{}", '{"b": 1}', '{"a": 1, "b": 1}'],
            ['{"a": 1}'],
        ),
        ({"type": "string", "pattern": DECIMAL}, ['"1.5"', '"-.5"', '"12"'], ['"-"', '"."', '""']),
        (
            {"type": "string", "pattern": r"^(?=.*[a-z])(?=.*\d).{3,}$"},
            ['"ab1"'],
            ['"abc"', '"a1"', '"123"'],
        ),
        (
            {"type": "array", "items": {"type": ["integer", "string"]},
             "contains": {"type": "integer"}},
            ["[1]", '[1, "a"]'],
            ["[]", '["a"]'],
        ),
        (
            {"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False},
            ["{}", '{"a": 1}'],
            ['{"b": 1}'],
        ),
        (
            {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1},
            ['{"a": 1}', '{"b": 1}'],
            ["{}"],
        ),
        (
            {"type": "integer", "minimum": 0, "maximum": 2**63 - 1},
            ["0", str(2**63 - 1)],
            [str(2**63), "-1"],
        ),
    ],
)  # fmt: skip
def test_words_that_the_compiler_lacks_are_said_in_others(schema, right, wrong):
    """Not every right answer is allowed, such as a set in another order: only right ones are."""
    assert not compilable_schema(schema).unsupported
    validator = jsonschema.Draft202012Validator(schema)
    assert [text for text in right if not validator.is_valid(json.loads(text))] == []
    assert [text for text in wrong if validator.is_valid(json.loads(text))] == []
    assert [text for text in right if not allows(schema, text)] == []
    assert [text for text in wrong if allows(schema, text)] == []


@pytest.mark.parametrize(
    ("schema", "left_out"),
    [
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "uniqueItems"),
        ({"properties": {"a": {"const": 2**53 + 1}}}, "const at properties.a"),
        ({"enum": [[2**60 + 1], "x"]}, "enum"),
        ({"type": "integer", "maximum": 2**53 + 1}, "maximum"),
        ({"type": "integer", "maximum": 2**64 - 1}, "maximum"),
        ({"type": "integer", "minimum": -(2**63)}, "minimum"),
        ({"type": "number", "minimum": -1e30}, "minimum"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "string", "not": {"pattern": "a"}}, "not"),
        ({"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}}, "if"),
        ({"type": "array", "contains": {"const": 1}, "prefixItems": [{}]}, "contains"),
        ({"type": "object", "propertyNames": {"format": "date"}}, "propertyNames"),
        ({"type": "string", "pattern": "a(?=b)b"}, "pattern"),
        ({"$dynamicRef": "#node"}, "$dynamicRef"),
    ],
)
def test_what_cannot_be_said_is_left_out_and_named_with_its_place(schema, left_out):
    given = json.loads(json.dumps(schema))
    found = compilable_schema(schema)
    assert schema == given
    assert found.unsupported == (left_out,)
    source(json=json.dumps(found.schema))  # compiles


def test_whole_numbers_are_exact_or_left_out():
    """The compiler has float64, where 2**53 + 1 is 2**53."""
    for number in (2**53, 2**62, -(2**60)):
        schema = {"const": number}
        assert not compilable_schema(schema).unsupported
        assert allows(schema, str(number)) and not allows(schema, str(number + 1))
    assert allows({"const": 2**53 + 1}, str(2**53 + 1))


def test_the_least_of_int64_is_left_out_or_its_last_1024_numbers_are():
    schema = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
    assert allows(schema, str(-(2**63))) and not allows(schema, str(2**63))
    assert not compilable_schema(schema, narrow=True).unsupported
    assert allows(schema, str(LEAST_COMPILABLE), narrow=True)
    assert not allows(schema, str(-(2**63) - 1), narrow=True)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"properties": {"a": {"type": "integer"}}}, ['{"a": 1}'], ['{"b": 1}']),
        ({"type": "object", "properties": {"a": {"properties": {"x": {}}}}},
         ['{"a": {"x": 1}}'], ['{"a": {"y": 1}}']),
        ({"allOf": [{"$ref": "#/$defs/A"}], "properties": {"b": {}}, "$defs": BASE},
         ['{"a": 1, "b": 2}'], ['{"c": 1}', '{"a": "x"}']),
        ({"properties": {"a": {}}, "anyOf": [{"required": ["a"]}, {"properties": {"b": {}},
                                                                   "required": ["b"]}]},
         ['{"a": 1}', '{"b": 1}', '{"a": 1, "b": 1}'], ['{"c": 1, "b": 1}']),
        ({"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}], "$defs": BASE},
         ["null", '{"a": 1}'], ['{"a": 1, "b": 1}']),
    ],
)  # fmt: skip
def test_objects_have_only_the_properties_that_are_named_unless_that_is_said(schema, right, wrong):
    schema = {"type": "object", **schema} if "anyOf" not in schema else schema
    assert [text for text in right if not allows(schema, text)] == []
    assert [text for text in wrong if allows(schema, text)] == []
    opened = json.loads(
        json.dumps(schema).replace('"properties"', '"additionalProperties": true, "properties"')
    )
    assert allows(opened, '{"a": 1, "zz": 1}')
    assert allows(schema, '{"a": 1, "zz": 1}', closed=False)
    assert allows({"type": "object"}, '{"zz": 1}')


def walk(row, random, most=150):
    """A text that the grammar allows; None if it does not come to an end."""
    ids = []
    while len(ids) < most:
        next_ones = allowed(row)
        assert row.error == ""
        ends = [token for token in next_ones if token in ENDS]
        token = random.choice(ends if ends and random.random() < 0.5 else next_ones)
        if token in ENDS:
            return TOKENIZER.decode(ids)
        row.feed([token])
        ids.append(token)
    return None


@pytest.mark.parametrize("part", range(4))
def test_what_comes_of_schemas_at_random_fits_them(part):
    texts = 0
    for seed in range(25 * part, 25 * part + 25):
        random = Random(seed)
        schema = wild_schemas.whole(random)
        found = compilable_schema(
            schema, closed=random.random() < 0.7, narrow=random.random() < 0.5
        )
        try:
            row = source(json=json.dumps(found.schema))
        except GrammarError as error:
            assert "nsatisfiable" in str(error)  # there are such ones
            continue
        text = walk(row, random)
        if text is not None and not found.unsupported:
            texts += 1
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    assert texts > 5


def written_by_tools():
    """Of zod, TypeBox and valibot, made by javascript_schemas.mjs; of pydantic; of twenty other
    tools for Python, TypeScript, Go and Protocol Buffers, as tool_schemas.py says."""
    for name in ("javascript_schemas", "tool_schemas"):
        packed = (Path(__file__).parent / f"{name}.json.gz").read_bytes()
        yield from json.loads(gzip.decompress(packed))
    yield from pydantic_models.schemas(100)


NEVER = r'"unevaluatedProperties"|"not": \{\}|"prefixItems": \[false|"type": \[\]'


def test_schemas_that_tools_write_are_served():
    """Each is one to the compiler, of some a text is looked at. TypeBox's closed objects within an
    intersection allow no value at all, nor does zod's and Joi's `never` where it is required."""
    every = list(written_by_tools())
    assert len(set(map(json.dumps, every))) > 2_000
    for i, schema in enumerate(every):
        found = compilable_schema(schema)
        assert bool(found.malformed) == ('"type": []' in json.dumps(schema)), found.malformed
        said = LLMatcher.validate_grammar(
            LLMatcher.grammar_from_json_schema(json.dumps(found.schema))
        )
        if said:
            assert "nsatisfiable" in said and re.search(NEVER, json.dumps(schema))
        if said or found.unsupported or i % 40:
            continue
        text = walk(source(json=json.dumps(found.schema)), Random(i))
        if text is not None and "\\p{" not in json.dumps(schema):  # which re does not know
            kind = validator_for(schema, jsonschema.Draft202012Validator)
            kind(schema).validate(json.loads(text))


@pytest.mark.parametrize(
    "pattern",
    [
        *wild_schemas.PATTERNS,
        DECIMAL,
        r"^(?!\d)(?=[^-]*-?[^-]*$)[\da-]{2,}$",
        r"^(?!.*\s)x?",
        "^a$",
    ],
)
@given(text=st.text(alphabet="ab1.-+ x", max_size=7))
def test_patterns_that_look_ahead_match_what_several_without_match(pattern, text):
    patterns, whole = without_lookaround(pattern)
    assert not any("(?=" in one or "(?!" in one for one in patterns)
    said = all(re.search(one, text) for one in patterns)
    meant = bool(re.search(pattern, text))
    assert said == meant if whole else said or not meant


def test_what_looks_behind_or_within_is_left_out():
    for pattern in (r"a(?=b)", r"(?<!a)b", r"^(a(?!b))+$", r"^(?!ab|c)x", r"^(?=a(?!b))a"):
        patterns, whole = without_lookaround(pattern)
        assert not whole and all(re.compile(one) for one in patterns)


JUNK = (None, True, "any", [], {}, -1, 2.5, [1], {"$ref": "x"}, "#/none", "http://x/y", 3.0)


def places(part):
    """(container, key) of all that stands within."""
    keys = part if isinstance(part, dict) else range(len(part)) if isinstance(part, list) else ()
    for key in keys:
        yield part, key
        yield from places(part[key])


def test_what_is_no_json_schema_is_left_out_and_named():
    """At any place of a schema. What is left is one to the compiler."""
    named = set()
    for seed in range(300):
        random = Random(seed)
        schema = json.loads(json.dumps(wild_schemas.whole(random)))
        for _ in range(2):
            part, key = random.choice(list(places(schema)))
            part[key] = json.loads(json.dumps(random.choice(JUNK)))
        found = compilable_schema(schema, closed=random.random() < 0.5)
        named |= {place.partition(" ")[0] for place in found.malformed}
        assert set(found.malformed) <= set(found.unsupported)
        text = LLMatcher.grammar_from_json_schema(json.dumps(found.schema))
        said = LLMatcher.validate_grammar(text)
        assert not said or "nsatisfiable" in said
    assert {"schema", "type", "enum", "properties", "required", "items", "$ref"} <= named


@pytest.mark.parametrize(
    ("schema", "left_out"),
    [
        ({"properties": {"a": {"type": "float"}}}, "type at properties.a"),
        ({"properties": {"a": {"type": "string", "required": True}}}, "required at properties.a"),
        ({"type": "object", "properties": []}, "properties"),
        ({"properties": {"a": "a text"}}, "schema at properties.a"),
        ({"items": {"$ref": "#/definitions/Gone"}}, "$ref at items"),
    ],
)
def test_what_is_written_by_hand_and_is_no_json_schema_is_named(schema, left_out):
    found = compilable_schema(schema)
    assert found.malformed == found.unsupported == (left_out,)
    source(json=json.dumps(found.schema))  # compiles


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (
            {"$ref": "#/components/schemas/A", "components": {"schemas": {
                "A": {"type": "array", "items": {"$ref": "#/components/schemas/B~1b%20c"}},
                "B/b c": {"type": "integer"}}}},
            ["[1]"], ['["a"]'],
        ),
        (
            {"type": "object", "properties": {
                "a": {"oneOf": [{"type": "integer"}, {"type": "null"}]},
                "b": {"$ref": "#/properties/a/oneOf/1"}}},
            ['{"b": null}', '{"a": 1}'], ['{"b": 1}'],
        ),
        (
            {"allOf": [{"$ref": "#/components/A"}], "properties": {"b": {}},
             "components": {"A": {"type": "object", "properties": {"a": {"type": "integer"}}}}},
            ['{"a": 1, "b": 2}'], ['{"a": "x"}', '{"c": 1}'],
        ),
        ({"$schema": "http://json-schema.org/draft/2020-12/schema", "type": "null"}, ["null"], []),
        ({"$schema": "https://nobody.knows/it", "type": "string", "maxLength": 1.0},
         ['"a"'], ['"ab"']),
        ({"type": "integer", "minimum": 5, "exclusiveMinimum": True}, ["6"], ["5"]),
    ],
)  # fmt: skip
def test_schemas_are_read_as_tools_write_them(schema, right, wrong):
    """References into all of a document, dialects by any name, draft 4's limits."""
    assert not compilable_schema(schema).unsupported
    assert [text for text in right if not allows(schema, text)] == []
    assert [text for text in wrong if allows(schema, text)] == []


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (r"^[^[\]]+$", "ab", "a[b"),
        (r"^[a&&b]$", "&", "c"),
        (r"^[\w-.]+$", "a-b.c", "a b"),
        (r"^{\w+}$", "{a}", "a"),
        (r"^\p{Lu}\/\0?$", "A/", "a/"),
        (r"^(?:a|^b)$", "b", "c"),
    ],
)
def test_patterns_are_those_of_json_schema_and_not_of_the_compiler(pattern, right, wrong):
    schema = {"type": "string", "pattern": pattern}
    assert not compilable_schema(schema).unsupported
    assert allows(schema, json.dumps(right)) and not allows(schema, json.dumps(wrong))


@pytest.mark.parametrize("pattern", [r"\bfoo\b", r"(a)\1", r"(?<n>a)\k<n>", "a^b", "a$b", "(?>a)"])
def test_patterns_that_the_compiler_has_no_words_for_are_left_out(pattern):
    for schema in ({"pattern": pattern}, {"patternProperties": {pattern: {}}}):
        found = compilable_schema({"type": ["string", "object"], **schema})
        assert found.unsupported == tuple(schema)
        source(json=json.dumps(found.schema))


def test_a_schema_that_grows_when_it_is_written_out_is_refused():
    """Each definition holds the one before twice."""
    definitions = {"d0": {"type": "object", "properties": {"x": {}}}}
    for i in range(1, 40):
        definitions[f"d{i}"] = {"allOf": [{"$ref": f"#/$defs/d{i - 1}"}] * 2}
    with pytest.raises(GrammarError, match="too many parts"):
        compilable_schema(
            {"allOf": [{"$ref": "#/$defs/d39"}], "properties": {"y": {}}, "$defs": definitions}
        )


def test_references_in_a_circle_come_to_an_end():
    for schema in (
        {"$ref": "#"},
        {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}},
        {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
         "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    ):  # fmt: skip
        compilable_schema(schema)


@pytest.mark.parametrize(
    ("pattern", "plain"),
    [
        (r"\d{3}", "[0-9]{3}"),
        (r"[\d.]-\d", "[0-9.]-[0-9]"),
        (r"[]\d]\d", "[]0-9][0-9]"),
        (r"[\]\d]", r"[\]0-9]"),
        (r"[a[\d]]\d", "[a[0-9]][0-9]"),
        (r"[^\d]\D[\D]", r"[^\d]\D[\D]"),
        (r"[^a[\d]]\d", r"[^a[\d]][0-9]"),
        (r"\\d\\\d", r"\\d\\[0-9]"),
        (r"\w\s]\d", r"\w\s][0-9]"),
        ("a\\", "a\\"),
        ("", ""),
    ],
)
def test_digits_are_plain_where_they_match(pattern, plain):
    assert with_plain_digits(pattern) == plain
