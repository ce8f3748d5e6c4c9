"""Properties of a grammar that are known before it is compiled, also for the gateway, which has no
compiler.

- `check`: bounds on a grammar's size, by its text. The compiler may still refuse a grammar that
  passes.
- `GrammarError`: why a grammar is refused.
- demands of a JSON schema on values, as far as they are easily seen. Changes no schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import cast
from urllib.parse import unquote

import msgspec

from pipeinfer.params import JsonObject, JsonValue, StructuredOutputs

# Chains of references recurse in the compiler, which has no limit for them. A text of this length
# has room for chains of about 5,900, for which COMPILE_STACK_BYTES in compiling.py suffices.
MAX_GRAMMAR_BYTES = 64 * 1024
# Levels of nested brackets; brackets in strings count except in a JSON schema. The compiler refuses
# objects that are nested 62 deep, and each level of objects takes two levels of brackets.
MAX_GRAMMAR_DEPTH = 128
# Characters. Translating so much GBNF takes 0.4 s, and the time grows with the square.
MAX_GBNF_CHARS = 16 * 1024
# The error if an engine has no memory for a grammar now; a later request may succeed.
NO_GRAMMAR_MEMORY = "the grammars in use leave no memory for another one; try again later"
# Prefix of a compiler's error about a client's grammar, which may quote parts of the grammar.
GRAMMAR_ERROR = "structured_outputs: "
# Bytes of stack for compiling in a validation; an engine's thread has twice as much (compiling.py).
VALIDATION_STACK_BYTES = 32 * 1024 * 1024
FORMS = ("json", "regex", "choice", "grammar")
# A mask of at least so many units (MaskCost in compiling.py) is costly: engines report it, and
# schedulers count it. In ambiguous rules so many units take 0.05 to 0.3 ms, in a lexer that is
# being built about 10 ms.
COSTLY_MASK_UNITS = 1_000

# The key of compiler options in a JSON schema; they could allow endless white space. Lark and GBNF
# grammars must not have it; in a grammar that is a JSON schema it is overwritten.
COMPILER_OPTIONS = "x-guidance"
_ESCAPES = re.compile(r"\\u([0-9a-fA-F]{4})")

_OPEN, _CLOSE = "[{(", "]})"


class VocabularySetup(msgspec.Struct, frozen=True, array_like=True):
    """The arguments of a GrammarVocabulary.

    Attributes:
    - tokenizer: tokenizer.json as text
    - width: of the logits
    - end_ids: ids that end a request
    - known_ids: ids that the tokenizer has
    - stack: bytes of stack to compile with in a validation
    """

    tokenizer: str
    width: int
    end_ids: tuple[int, ...]
    known_ids: tuple[int, ...]
    stack: int = VALIDATION_STACK_BYTES


class GrammarError(ValueError):
    """A grammar is not served. The message is the reason, for the client."""


def form_of(spec: StructuredOutputs) -> str:
    """Returns the member of FORMS that `spec` has. Raises GrammarError unless it has exactly
    one.
    """
    given = [form for form in FORMS if getattr(spec, form) is not None]
    if len(given) != 1:
        said = " and ".join(given) or "none"
        raise GrammarError(f"exactly one of {', '.join(FORMS)} must be given, not {said}")
    return given[0]


def check(spec: StructuredOutputs) -> str:
    """The form of a grammar. Raises GrammarError if the grammar is too large or nested too
    deeply.
    """
    form = form_of(spec)
    if form == "choice":
        return _check_choice(spec.choice or ())
    text = getattr(spec, form)
    _check_bytes(form, len(text.encode()))
    if form == "grammar":
        if "::=" in text and len(text) > MAX_GBNF_CHARS:
            raise GrammarError(f"a GBNF grammar may have at most {MAX_GBNF_CHARS} characters")
        if COMPILER_OPTIONS in _ESCAPES.sub(_unescaped, text):
            raise GrammarError(f"{COMPILER_OPTIONS} is the server's: a grammar must not have it")
    depth = _depth(text, strings=form == "json")
    if depth > MAX_GRAMMAR_DEPTH:
        raise GrammarError(f"{form} is nested deeper than {MAX_GRAMMAR_DEPTH} levels")
    return form


def schema_of(text: str) -> JsonObject | bool:
    """The JSON schema in `text`. Raises GrammarError unless it is a JSON object or boolean."""
    try:
        schema: JsonValue = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise GrammarError(f"the schema is not valid JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise GrammarError("a schema must be an object")
    return schema


def _check_choice(choice: tuple[str, ...]) -> str:
    if not choice or not all(choice):
        raise GrammarError("choice must have at least one text, and none of them empty")
    _check_bytes("choice", sum(len(text.encode()) for text in choice))
    return "choice"


def _unescaped(found: re.Match[str]) -> str:
    return chr(int(found.group(1), 16))


def _check_bytes(form: str, size: int) -> None:
    if size > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"{form} has {size} bytes, at most {MAX_GRAMMAR_BYTES} are served")


def _depth(text: str, strings: bool) -> int:
    """The deepest level of brackets in `text`. strings: whether brackets between quotes are
    ignored.
    """
    level = deepest = 0
    inside = escaping = False
    for letter in text:
        if inside:
            inside = escaping or letter != '"'
            escaping = letter == "\\" and not escaping
        elif letter == '"' and strings:
            inside = True
        elif letter in _OPEN:
            level += 1
            deepest = max(deepest, level)
        elif letter in _CLOSE:
            level = max(0, level - 1)
    return deepest


# Keywords that demand nothing of a value.
REMARKS = frozenset(
    ("title", "description", "default", "examples", "$comment", "deprecated", "readOnly",
     "writeOnly")
)  # fmt: skip
VALUES = REMARKS | {"const", "enum", "type"}
DEFINITIONS = ("$defs", "definitions")
ALTERNATIVES = ("anyOf", "oneOf")
MAX_REFERENCE_STEPS = 16  # the longest chain of references, and the deepest nesting of allOf
MAX_SCHEMAS_VISITED = 20_000  # for one root; each visit takes 3 microseconds

Schema = JsonValue


def list_at(schema: JsonObject, key: str) -> list[JsonValue]:
    """The list at `key`; [] if there is none."""
    found = schema.get(key)
    return found if isinstance(found, list) else []


def named(schema: JsonObject, key: str) -> JsonObject:
    """The object at `key`; {} if there is none."""
    found = schema.get(key)
    return found if isinstance(found, dict) else {}


def type_of(value: JsonValue) -> str:
    """The type of `value` in JSON Schema; a whole number is an "integer", also if it is written as
    1.0.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def fits(value: JsonValue, types: set[str]) -> bool:
    """Whether `value` is of one of `types`."""
    kind = type_of(value)
    return kind in types or (kind == "integer" and "number" in types)


def types(schema: Schema) -> set[str]:
    """The types that `schema` names, or those of the values that it lists; empty: it names none."""
    if not isinstance(schema, dict):
        return set()
    given = schema.get("type")
    found = {one for one in (given if isinstance(given, list) else [given]) if isinstance(one, str)}
    return found or {type_of(value) for value in values(schema) or ()}


def values(schema: Schema) -> list[JsonValue] | None:
    """The values that `schema` lists, by enum, const, or the types boolean and null; None: it lists
    none.
    """
    if not isinstance(schema, dict):
        return None
    options = schema.get("enum")
    if isinstance(options, list):
        return options
    if "const" in schema:
        return [schema["const"]]
    by_type: dict[JsonValue, list[JsonValue]] = {"boolean": [True, False], "null": [None]}
    kind = schema.get("type")
    return by_type.get(kind) if isinstance(kind, str) else None


def exactly(schema: Schema) -> list[JsonValue] | None:
    """The values that `schema` allows, if it demands nothing but to be one of them;
    otherwise None.
    """
    for key in ALTERNATIVES:
        if isinstance(schema, dict) and key in schema and set(schema) <= REMARKS | {key}:
            each = [exactly(part) for part in list_at(schema, key)]
            return None if None in each else [value for some in each for value in some or ()]
    some = values(schema)
    if some is None or not isinstance(schema, dict) or not set(schema) <= VALUES:
        return None
    kinds = types(schema)
    return [value for value in some if fits(value, kinds)]


def split(
    values: list[JsonValue], others: list[JsonValue]
) -> tuple[list[JsonValue], list[JsonValue]]:
    """Returns (values of `values` that are in `others`, the rest), by JSON's equality: true is not
    1, 1.0 is.
    """
    texts = set(map(_text, others))
    inside: list[JsonValue] = []
    outside: list[JsonValue] = []
    for value in values:
        (inside if _text(value) in texts else outside).append(value)
    return inside, outside


def different(values: list[JsonValue]) -> list[JsonValue]:
    """The distinct values of `values`, by JSON's equality."""
    return list({_text(value): value for value in values}.values())


def _text(value: JsonValue) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    if isinstance(value, dict):
        pairs = (f"{json.dumps(key)}:{_text(value[key])}" for key in sorted(value))
        return f"{{{','.join(pairs)}}}"
    return json.dumps(value)


class SchemaFacts:
    """Facts about the subschemas of one schema.

    Attributes:
    - root: the schema, in which references are looked up
    """

    def __init__(self, root: JsonObject) -> None:
        self._root = root
        self._looks = 0

    def count_visit(self) -> None:
        """Counts the visit of a subschema. Raises GrammarError if there are more than
        MAX_SCHEMAS_VISITED.
        """
        self._looks += 1
        if self._looks > MAX_SCHEMAS_VISITED:
            raise GrammarError("the schema has too many parts that are about the same values")

    def resolved(self, schema: Schema) -> Schema:
        """The target of a reference, if nothing that matters stands beside it; otherwise `schema`
        itself.
        """
        for _ in range(MAX_REFERENCE_STEPS):
            self.count_visit()
            if not isinstance(schema, dict) or not isinstance(to := schema.get("$ref"), str):
                break
            if not to.startswith("#") or set(schema) - {"$ref"} - REMARKS:
                break
            found = self.at(to)
            if found is None:
                break
            schema = found
        return schema

    def at(self, to: str) -> JsonValue:
        """The value at the JSON pointer `to` in the root; None: there is none."""
        found: JsonValue = self._root
        for step in unquote(to).split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list):
                found = dict(zip(map(str, range(len(found))), found, strict=True))
            found = found.get(key) if isinstance(found, dict) else None
        return found

    def has_reference(self, to: str) -> bool:
        """Whether the compiler finds the target of reference `to`. Subschemas with an $id or
        $anchor are not looked at: if there are any, the target is assumed to be found.
        """
        if to == "#" or (to.startswith("#/") and isinstance(self.at(to), dict | bool)):
            return True
        return self._addressed

    @cached_property
    def _addressed(self) -> bool:
        """Whether any subschema has an $id, id, $anchor or $dynamicAnchor."""
        parts: list[JsonValue] = [self._root]
        while parts:
            part = parts.pop()
            if isinstance(part, dict):
                if any(isinstance(part.get(key), str) for key in _ADDRESSES):
                    return True
                parts += part.values()
            elif isinstance(part, list):
                parts += part
        return False

    def all_of(self, schema: Schema, level: int = 0) -> Iterator[JsonObject]:
        """`schema` and the schemas that a value must fit besides, by allOf and references."""
        schema = self.resolved(schema)
        if isinstance(schema, dict) and level < MAX_REFERENCE_STEPS:
            yield schema
            for part in list_at(schema, "allOf"):
                yield from self.all_of(part, level + 1)
            if "$ref" in schema:
                yield from self.all_of({"$ref": schema["$ref"]}, level + 1)

    def properties(self, schema: Schema) -> dict[str, list[JsonValue]]:
        """The schemas that the value of each property must fit, by the property's name."""
        found: dict[str, list[JsonValue]] = {}
        for part in self.all_of(schema):
            for name, one in named(part, "properties").items():
                found.setdefault(name, []).append(one)
        return found

    def values_of(self, schemas: list[JsonValue]) -> list[JsonValue] | None:
        """The values that one of `schemas` lists; None: none of them lists any."""
        for one in schemas:
            found = values(self.resolved(one))
            if found is not None:
                return found
        return None

    def required(self, schema: Schema) -> set[str]:
        """The names of required properties."""
        each = (name for part in self.all_of(schema) for name in list_at(part, "required"))
        return {name for name in each if isinstance(name, str)}

    def types(self, schema: Schema) -> set[str]:
        """The types of which a value must have one; empty: nothing is known."""
        found: set[str] = set()
        for part in self.all_of(schema):
            more = types(part)
            if more:
                found = (_wide(found) & _wide(more)) if found else more
        return found

    def are_disjoint(self, one: Schema, other: Schema, closed: bool) -> bool:
        """Whether certainly no value fits both schemas.

        - closed: whether objects have no properties but the named ones, unless a keyword opens them
        """
        one, other = self.resolved(one), self.resolved(other)
        if one is False or other is False:
            return True
        if not isinstance(one, dict) or not isinstance(other, dict):
            return False
        mine, theirs = values(one), values(other)
        if mine is not None and theirs is not None:
            return not split(mine, theirs)[0]
        kinds, others = self.types(one), self.types(other)
        if kinds and others and not _wide(kinds) & _wide(others):
            return True
        return kinds == others == {"object"} and self._objects_disjoint(one, other, closed)

    def _objects_disjoint(self, one: JsonObject, other: JsonObject, closed: bool) -> bool:
        first, second = self.properties(one), self.properties(other)
        needs, wants = self.required(one), self.required(other)
        for name in (needs | wants) & set(first) & set(second):
            pairs = ((a, b) for a in first[name] for b in second[name])
            if any(self.are_disjoint(a, b, closed) for a, b in pairs):
                return True
        lacking, missing = bool(needs - set(second)), bool(wants - set(first))
        if lacking and other.get("additionalProperties") is False:
            return True
        if missing and one.get("additionalProperties") is False:
            return True
        shut = closed and None not in (self.names(one), self.names(other))
        return shut and lacking and missing

    def discriminator(self, branches: list[JsonValue]) -> str:
        """A property whose values tell all branches apart; "": there is none."""
        each = [self.properties(branch) for branch in branches]
        for name in each[0] if each else ():
            some = [self.values_of(one.get(name, [])) for one in each]
            flat = [_text(value) for one in some for value in one or ()]
            if None not in some and len(flat) == len(set(flat)):
                return name
        return ""

    def names(self, schema: Schema) -> list[str] | None:
        """Returns the names of the properties that an object may have, if `schema` closes the
        object or does not open it; None if a keyword opens it, or if the schema is not about an
        object.
        """
        found = list(self._names(schema, 0))
        if not found or None in found:
            return None
        return list(dict.fromkeys(cast(list[str], found)))

    def _names(self, schema: Schema, level: int) -> Iterator[str | None]:
        schema = self.resolved(schema) if level else schema
        if not isinstance(schema, dict):
            return
        opening = any(key in schema for key in _OPENING)
        opening = opening or schema.get("additionalProperties", False) is not False
        if opening or level > MAX_REFERENCE_STEPS or (level and "unevaluatedProperties" in schema):
            yield None
            return
        own = named(schema, "properties")
        yield from own
        beside = bool(own) or "allOf" in schema
        for key in ("allOf", *ALTERNATIVES) if level or beside else ():
            for part in list_at(schema, key):
                yield from self._names(part, level + 1)
        if "$ref" in schema and (level or beside):
            yield from self._names({"$ref": schema["$ref"]}, level + 1)
        for part in (schema.get("then"), schema.get("else")):
            yield from self._names(part, level + 1)
        for key in ("dependentSchemas", "dependencies"):
            for part in named(schema, key).values():
                yield from self._names(part, level + 1)


_ADDRESSES = ("$id", "id", "$anchor", "$dynamicAnchor")
_OPENING = ("patternProperties", "propertyNames")


def _wide(kinds: set[str]) -> set[str]:
    """`kinds` with "integer" added if "number" is there: a whole number is a number."""
    return kinds | {"integer"} if "number" in kinds else kinds


TYPES = frozenset(("null", "boolean", "object", "array", "number", "string", "integer"))
ValueTest = Callable[[JsonValue], bool]


def _is_schema(value: JsonValue) -> bool:
    return isinstance(value, dict | bool)


def _is_schema_list(value: JsonValue) -> bool:
    return isinstance(value, list) and bool(value)


def _is_object(value: JsonValue) -> bool:
    return isinstance(value, dict)


def _is_number(value: JsonValue) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: JsonValue) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 == value % 1
    )


def _is_string(value: JsonValue) -> bool:
    return isinstance(value, str)


def _is_string_list(value: JsonValue) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_type(value: JsonValue) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(each, str) and each in TYPES for each in value)
    return isinstance(value, str) and value in TYPES


_SHAPES: dict[str, ValueTest] = {
    "type": _is_type,
    "enum": lambda value: isinstance(value, list),
    "required": _is_string_list,
    "items": lambda value: isinstance(value, dict | bool | list),
    # In draft 4 these are booleans, about minimum and maximum.
    "exclusiveMinimum": lambda value: isinstance(value, bool) or _is_number(value),
    "exclusiveMaximum": lambda value: isinstance(value, bool) or _is_number(value),
    "multipleOf": lambda value: _is_number(value) and isinstance(value, int | float) and value > 0,
    **dict.fromkeys(
        ("properties", "patternProperties", "$defs", "definitions", "dependentRequired",
         "dependentSchemas", "dependencies"), _is_object
    ),
    **dict.fromkeys(
        ("additionalItems", "additionalProperties", "not", "if", "then", "else", "contains",
         "propertyNames", "unevaluatedItems", "unevaluatedProperties"), _is_schema
    ),
    **dict.fromkeys(("prefixItems", "anyOf", "oneOf", "allOf"), _is_schema_list),
    **dict.fromkeys(("minimum", "maximum"), _is_number),
    **dict.fromkeys(
        ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties",
         "minContains", "maxContains"), _is_count
    ),
    **dict.fromkeys(("pattern", "format", "$ref", "$anchor", "$id", "id", "$schema"), _is_string),
}  # fmt: skip
_WHOLE = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_DRAFT = re.compile(r"https?://json-schema\.org/draft(?:-0[3467]|/2019-09|/2020-12)/schema#?")


def malformed(schema: JsonObject) -> list[str]:
    """The keywords of `schema` whose values are not valid in JSON Schema."""
    return [key for key, shape in _SHAPES.items() if key in schema and not shape(schema[key])]


def normalized(schema: JsonObject) -> JsonObject:
    """A copy of `schema` in the form that the compiler reads: counts are integers, and $schema is
    removed unless it is a dialect that the compiler knows.
    """
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
