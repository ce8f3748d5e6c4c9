"""What a model's calls look like as a grammar, in llguidance's Lark: one function for each form.

What such a grammar allows, the form's reader reads, and arguments fit their schemas. Knows no
request; compiles nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import msgspec

from pipeinfer.gateway.reading.schema_types import types
from pipeinfer.grammars.bounds import schema_of
from pipeinfer.json_values import JsonObject, JsonValue
from pipeinfer.params import StructuredOutputs
from pipeinfer.text.added import Added

NO_PARAMETERS: JsonObject = {"type": "object", "properties": {}, "additionalProperties": False}
ANY_TEXT = "/(?s:.*)/"
INSTEAD = "tool_choice none offers no tools"
# What says nothing about the value.
_REMARKS = {"title", "description", "default", "examples", "$comment", "deprecated"}
_OF_OBJECT = _REMARKS | {
    "type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema",
    "x-guidance",
}  # fmt: skip
# Of a schema that stands within another one only definitions move along.
_ELSEWHERE = re.compile(r'"\$(ref|dynamicRef|recursiveRef)":"#(?!/(\$defs|definitions)/)')
_DEFINITIONS = ("$defs", "definitions")
_KEY = re.compile(r"[^<>\s]{1,200}")


class Inexpressible(ValueError):
    """Parameters that the form cannot be held to; the text says which, for the client."""


@dataclass(frozen=True)
class Wanted:
    """`schemas`: of the parameters of each function that may be called; None: any object.
    `many`: several calls may follow each other. `free`: content may stand around or in place of
    calls. `tokens`: of the model, by their text. `thinks`: white space may come first. `form`: of
    an answer that has no calls; None if it must have some, or is free."""

    schemas: Mapping[str, JsonObject | None]
    many: bool
    free: bool = False
    tokens: Mapping[str, Added] | None = None
    thinks: bool = False
    form: StructuredOutputs | None = None

    def tag(self, text: str) -> str:
        """As the special token that the model has for it, or as text."""
        found = (self.tokens or {}).get(text)
        return f"<[{found.id}]>" if found is not None and found.special else _text(text)

    def special(self, text: str) -> bool:
        """Whether it is a special token, which no text can spell."""
        return self.tag(text).startswith("<")


def hermes(wanted: Wanted) -> str:
    """<tool_call> and </tool_call> around objects."""
    closing = wanted.tag("</tool_call>")
    bodies = [
        f'"\\n" {_call(name, "arguments", schema)} "\\n" {closing}'
        for name, schema in wanted.schemas.items()
    ]
    return _tagged(wanted, "<tool_call>", bodies, "", '"\\n"')


def qwen3_coder(wanted: Wanted) -> str:
    """Parameters as elements, in the order of the schema."""
    closing, rules, bodies = wanted.tag("</tool_call>"), list[str](), list[str]()
    for i, (name, schema) in enumerate(wanted.schemas.items()):
        parts = _elements(name, f"p{i}", schema, rules)
        opening = _text(f"\n<function={name}>\n")
        bodies.append(f"{opening} {parts} {_text('</function>' + chr(10))} {closing}")
    grammar = _tagged(wanted, "<tool_call>", bodies, "<function=", '"\\n"')
    rules.append('value[suffix="\\n</parameter>\\n"]: VALUE')
    rules.append(f"VALUE: {ANY_TEXT} & ~/(?s:.*)\\n<(parameter=|\\/function>)(?s:.*)/")
    return "\n".join((grammar, *rules))


def llama3(wanted: Wanted) -> str:
    """Objects with semicolons between, and nothing else."""
    calls = _repeated(wanted, "call", '"; "')
    # Where an answer may be another object, what opens a call must be lexed as that object is.
    call = _call if wanted.form is None else _object
    rules = [_rule("call", [call(n, "parameters", s) for n, s in wanted.schemas.items()])]
    if wanted.free:
        calls = f"{calls} | text"
        rules += ["text: TEXT", f"TEXT: {ANY_TEXT} & ~/\\s*(<\\|python_tag\\|>\\s*)?\\{{(?s:.*)/"]
    return "\n".join((_start(wanted, f"({calls})"), *rules))


def mistral(wanted: Wanted) -> str:
    """A list of objects; where the model has a token for it, names and [ARGS]."""
    if "[ARGS]" in (wanted.tokens or {}):
        args = wanted.tag("[ARGS]")
        bodies = [f"{_text(n)} {args} {_json(s)}" for n, s in wanted.schemas.items()]
        return _tagged(wanted, "[TOOL_CALLS]", bodies, "", "")
    objects = [_call(name, "arguments", schema) for name, schema in wanted.schemas.items()]
    listed = f'"[" {_repeated(wanted, "object", _text(", "))} "]"'
    once = replace(wanted, many=False)
    return "\n".join((_tagged(once, "[TOOL_CALLS]", [listed], "", ""), _rule("object", objects)))


def json_list(wanted: Wanted) -> str:
    """A list of objects and nothing else, for models that have no form of their own."""
    listed = f'"[" {_repeated(wanted, "call", _text(", "))} "]"'
    calls = [_call(name, "parameters", schema) for name, schema in wanted.schemas.items()]
    return "\n".join((_start(wanted, listed), _rule("call", calls)))


CallGrammar = Callable[[Wanted], str]


def _tagged(wanted: Wanted, opening: str, bodies: list[str], never: str, between: str) -> str:
    """Calls that each begin with the tag `opening`. `never`: a text that content must not have."""
    tag, body = wanted.tag(opening), _rule("body", bodies)
    if not wanted.free:
        call = f"call: {tag} body"
        start = _start(wanted, _repeated(wanted, "call", between), opening)
        return "\n".join((start, call, body))
    sign = "*" if wanted.many else "?"
    if wanted.special(opening):
        text = f"text: {_without(never)}"
        return "\n".join((f"start: text ({tag} body text){sign}", text, body))
    # Content may not begin with a newline there: the lexer would not know which is meant.
    before = f"before[suffix={tag}]: {_without(never)}"
    rest = f"REST: {_without(opening, never)}"
    return "\n".join((f"start: (before body){sign} rest", before, "rest: REST", rest, body))


def _without(*texts: str) -> str:
    """A regular expression of texts that have none of them."""
    escaped = "|".join(re.escape(text).replace("/", "\\/") for text in texts if text)
    return f"{ANY_TEXT} & ~/(?s:.*)({escaped})(?s:.*)/" if escaped else ANY_TEXT


def _start(wanted: Wanted, calls: str, opening: str = "") -> str:
    """Calls, or the wanted form in their place. Behind thoughts models begin a paragraph."""
    space = "/\\n\\n?/? " if wanted.thinks else ""
    if wanted.form is None:
        return f"start: {space}{calls}"
    return f"start: {space}({calls} | form)\n{_instead(wanted.form, opening)}"


def _instead(form: StructuredOutputs, opening: str) -> str:
    """The rule of an answer that has a form. `opening`: of calls, which such an answer lacks."""
    if form.json is not None:
        return f"form: %json {form_schema(form.json)}"
    if form.choice is not None:
        return _rule("form", [_text(text) for text in form.choice])
    if form.regex is None:
        raise Inexpressible(f"a grammar cannot stand beside that of calls; {INSTEAD}")
    if not opening:
        said = "beside this model's calls, a form must be a schema or a choice"
        raise Inexpressible(f"{said}; {INSTEAD}")
    never = re.escape(opening).replace("/", "\\/")
    return f"form: FORM\nFORM: /{slashed(form.regex)}/ & ~/{never}(?s:.*)/"


def slashed(regex: str) -> str:
    """As it stands between slashes."""
    closed = re.sub(r"(\\.)|/", lambda found: found[1] or "\\/", regex, flags=re.DOTALL)
    return closed.replace("\n", "\\n")


def form_schema(text: str) -> str:
    """The JSON schema that a form is, for %json. Raises Inexpressible, and GrammarError."""
    schema = schema_of(text)
    if schema is False:
        raise Inexpressible("the form's schema must be an object")
    schema = {} if schema is True else schema
    return msgspec.json.encode(without_guidance(schema)).decode()


def without_guidance(schema: JsonObject) -> JsonObject:
    """Without what it would tell the compiler."""
    return {key: value for key, value in schema.items() if key != "x-guidance"}


def _repeated(wanted: Wanted, rule: str, between: str) -> str:
    return f"{rule} ({between} {rule})*" if wanted.many else rule


def _rule(name: str, alternatives: list[str]) -> str:
    return f"{name}: " + "\n  | ".join(alternatives)


def _call(name: str, key: str, schema: JsonObject | None) -> str:
    head = f'{{"name": {_text(name)}, "{key}": '
    return f'{_text(head)} {_json(schema)} "}}"'


def _object(name: str, key: str, schema: JsonObject | None) -> str:
    """The same as _call, as one schema."""
    arguments = _arguments(schema)
    if _ELSEWHERE.search(msgspec.json.encode(arguments).decode()):
        raise Inexpressible(f"{name}: beside a form, a $ref may only name a definition")
    call: JsonObject = {
        "type": "object",
        "properties": {"name": {"const": name}, key: arguments},
        "required": ["name", key],
        "additionalProperties": False,
        **{each: arguments[each] for each in _DEFINITIONS if each in arguments},
    }
    return f"%json {msgspec.json.encode(call).decode()}"


def _json(schema: JsonObject | None) -> str:
    return f"%json {msgspec.json.encode(_arguments(schema)).decode()}"


def _arguments(schema: JsonObject | None) -> JsonObject:
    """`schema` is that of an object."""
    return {**without_guidance({} if schema is None else schema or NO_PARAMETERS), "type": "object"}


def _text(text: str) -> str:
    return msgspec.json.encode(text).decode()


# ----------------------------------------------------------------------------------------- elements


def _elements(name: str, prefix: str, given: JsonObject | None, rules: list[str]) -> str:
    """What stands within <function=name>; adds the rules that it needs. Raises Inexpressible."""
    if given is None:
        rules.append(f'{prefix}: "<parameter=" /[^<>\\s]{{1,200}}/ ">\\n" value')
        return f"{prefix}*"
    schema = given or NO_PARAMETERS
    properties, required = schema.get("properties", {}), schema.get("required", [])
    strange = sorted(set(schema) - _OF_OBJECT)
    if strange or not isinstance(properties, dict) or not isinstance(required, list):
        said = strange[0] if strange else "properties"
        raise Inexpressible(f"{name}: calls of this model cannot be held to {said[:100]!r}")
    missing = [key for key in required if key not in properties]
    if missing:
        raise Inexpressible(f"{name}: {str(missing[0])[:100]!r} is required and has no schema")
    shared = {key: schema[key] for key in _DEFINITIONS if key in schema}
    parts: list[str] = []
    for i, (key, value) in enumerate(properties.items()):
        if not _KEY.fullmatch(key):
            raise Inexpressible(f"{name}: {key[:100]!r} cannot be the name of a parameter")
        rules.append(
            f"{prefix}_{i}: {_text(f'<parameter={key}>' + chr(10))} {_value(name, value, shared)}"
        )
        parts.append(f"{prefix}_{i}" + "?" * (key not in required))
    return " ".join(parts)


def _value(name: str, schema: JsonValue, shared: JsonObject) -> str:
    """A text stands for itself, all else is JSON."""
    closing = _text("\n</parameter>\n")
    if types(schema) != frozenset(("string",)) or not isinstance(schema, dict):
        own = schema if isinstance(schema, dict) else {}
        return f"%json {msgspec.json.encode({**own, **shared}).decode()} {closing}"
    if set(schema) <= _REMARKS | {"type"}:
        return "value"
    options = schema.get("enum", [schema["const"]] if "const" in schema else [])
    plain = set(schema) <= _REMARKS | {"type", "enum", "const"} and isinstance(options, list)
    texts = [text for text in options if isinstance(text, str)] if isinstance(options, list) else []
    if not plain or not texts or any("\n" in text or "<" in text for text in texts):
        raise Inexpressible(
            f"{name}: calls of this model cannot be held to the patterns, lengths and formats of "
            "texts"
        )
    return f"({' | '.join(map(_text, texts))}) {closing}"
