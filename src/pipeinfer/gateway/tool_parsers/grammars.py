"""The tool calls of a model as a grammar in llguidance's Lark: one function for each format.

What a grammar allows, the parser of the same format parses, and arguments fit their schemas.
Compiles nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import msgspec

from pipeinfer.gateway.tool_parsers.base import INPUT_PARAMETER, schema_types
from pipeinfer.gateway.tool_parsers.json_calls import HERMES, MISTRAL, JsonCallMarkers
from pipeinfer.gateway.tool_parsers.lark import (
    JSON_ESCAPED_CHARS,
    RecursiveGrammar,
    UnsupportedGrammar,
    grammar_to_regex,
    may_contain,
)
from pipeinfer.gateway.tool_parsers.pythonic import ARGUMENT_NAME, FUNCTION_NAME, PythonicFormat
from pipeinfer.gateway.tool_parsers.xml_calls import XmlTags
from pipeinfer.grammars.bounds import schema_of
from pipeinfer.grammars.rewriting import with_plain_digits
from pipeinfer.grammars.schema_facts import DEFINITIONS
from pipeinfer.params import JsonObject, JsonValue, StructuredOutputs
from pipeinfer.text import AddedId

NO_PARAMETERS: JsonObject = {"type": "object", "properties": {}, "additionalProperties": False}
ANY_TEXT = "/(?s:.*)/"
NO_TOOLS_HINT = "tool_choice none offers no tools"
# What says nothing about the value.
_ANNOTATIONS = {"title", "description", "default", "examples", "$comment", "deprecated"}
_OBJECT_KEYWORDS = _ANNOTATIONS | {
    "type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema",
    "x-guidance",
}  # fmt: skip
# Of a schema that stands within another one only definitions move along.
_NON_LOCAL_REF = re.compile(r'"\$(ref|dynamicRef|recursiveRef)":"#(?!/(\$defs|definitions)/)')
_INPUT_OPENING = f'{{"{INPUT_PARAMETER}": "'
_WORD = r"\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}"
_CLASSES = {"D": r"\P{Nd}", "w": f"[{_WORD}]", "W": f"[^{_WORD}]"}
_KEY = r"[^<>\s\"]{1,200}"
_CALL_START = r"\[\s*[\w.-]+\s*\("  # in Python's notation


class UnsupportedSchema(ValueError):
    """A schema that the format cannot enforce; the message says which, for the client."""


class UnsupportedInputGrammar(UnsupportedSchema):
    """An input grammar that no call of this format can enforce; `tool`: the custom tool's name."""

    def __init__(self, tool: str, message: str) -> None:
        super().__init__(message)
        self.tool = tool


@dataclass(frozen=True)
class GrammarRequest:
    """What a grammar of calls must enforce.

    Attributes:
    - schemas: of the parameters of each function that may be called, by name; None: any object
    - parallel: several calls may follow each other
    - allow_content: content may stand around or in place of calls
    - added_tokens: of the model, by their text
    - after_reasoning: white space may come first
    - content_constraint: of an answer without calls; None if there must be calls, or any content is
      allowed
    - input_grammars: by name of a custom tool, the constraint of its one parameter
    """

    schemas: Mapping[str, JsonObject | None]
    parallel: bool
    allow_content: bool = False
    added_tokens: Mapping[str, AddedId] | None = None
    after_reasoning: bool = False
    content_constraint: StructuredOutputs | None = None
    input_grammars: Mapping[str, StructuredOutputs] = field(
        default_factory=dict[str, StructuredOutputs]
    )

    def tag(self, text: str) -> str:
        """A rule for `text` with the special tokens that the model has for it or its parts."""
        return _sequence(
            quoted(lead) if (lead := self.text_before_special(text)) else "",
            self.from_first_special(text),
        )

    def has_special_token(self, text: str) -> bool:
        """Whether `text` is or contains a special token, which no other text can spell."""
        return bool(self.from_first_special(text))

    def text_before_special(self, text: str) -> str:
        """The text before the first special token; all of it if there is none."""
        return self._parts(text)[0]

    def from_first_special(self, text: str) -> str:
        """A rule for the special tokens and the text between and behind them; empty if there is
        none.
        """
        tokens = self.added_tokens or {}
        parts = self._parts(text)[1:]
        return _sequence(
            *(f"<[{tokens[part].id}]>" if part in tokens else quoted(part) for part in parts)
        )

    def _parts(self, text: str) -> list[str]:
        """Special tokens and the texts between them; the first part is a text, maybe empty."""
        if text not in self._parts_by_tag:
            inside = (each for each in self._special_tokens if each in text)
            longest = "|".join(re.escape(each) for each in sorted(inside, key=len, reverse=True))
            lead, *rest = re.split(f"({longest})", text) if longest else [text]
            self._parts_by_tag[text] = [lead, *filter(None, rest)]
        return self._parts_by_tag[text]

    @cached_property
    def _parts_by_tag(self) -> dict[str, list[str]]:
        """Cache of _parts: every parameter has the same tags, and there may be a thousand
        parameters.
        """
        return {}

    @cached_property
    def _special_tokens(self) -> list[str]:
        return [each for each, token in (self.added_tokens or {}).items() if token.special]


CallGrammar = Callable[[GrammarRequest], str]


def hermes_grammar(request: GrammarRequest) -> str:
    """Objects between <tool_call> and </tool_call>."""
    closing = request.tag(HERMES.closing)
    bodies = [
        f'"\\n" {_call(request, name, "arguments")} "\\n" {closing}' for name in request.schemas
    ]
    return _tagged(request, HERMES.opening, bodies, "", '"\\n"')


def xml_grammar(tags: XmlTags) -> CallGrammar:
    """Parameters as elements, in the order of the schema."""

    def grammar(request: GrammarRequest) -> str:
        elements, bodies = _XmlRules(tags, request), list[str]()
        for i, (name, schema) in enumerate(request.schemas.items()):
            bodies.append(elements.function(name, f"p{i}", schema))
        never, (opening, closing) = tags.function[0], tags.call
        if tags.shared_call_tag:
            calls = f'"\\n" {_repeated(request, "function", "")} {request.tag(closing)}'
            form = _tagged(replace(request, parallel=False), opening, [calls], never, "")
            return "\n".join((form, rule("function", bodies), *elements.rules))
        bodies = [f"{body} {request.tag(closing)}" for body in bodies]
        between = _optional_text(tags.separator)
        return "\n".join((_tagged(request, opening, bodies, never, between), *elements.rules))

    return grammar


def llama3_grammar(request: GrammarRequest) -> str:
    """Objects with semicolons between, and nothing else."""
    calls = _repeated(request, "call", '"; "')
    # Where an answer may be another object, what opens a call must be lexed as that object is.
    call = _call if request.content_constraint is None else _object
    rules = [rule("call", [call(request, name, "parameters") for name in request.schemas])]
    if request.allow_content:
        calls = f"{calls} | text"
        rules += ["text: TEXT", f"TEXT: {ANY_TEXT} & ~/\\s*(<\\|python_tag\\|>\\s*)?\\{{(?s:.*)/"]
    return "\n".join((_start(request, f"({calls})"), *rules))


def mistral_grammar(request: GrammarRequest) -> str:
    """A list of objects; names and [ARGS] if the model has that token."""
    if "[ARGS]" not in (request.added_tokens or {}):
        return marked_list_grammar(MISTRAL)(request)
    args = request.tag("[ARGS]")
    bodies = [f"{quoted(n)} {args} {json_arguments(request, n)}" for n in request.schemas]
    return _tagged(request, MISTRAL.opening, bodies, "", "")


def marked_list_grammar(markers: JsonCallMarkers) -> CallGrammar:
    """A list of objects behind a marker, or between two."""

    def grammar(request: GrammarRequest) -> str:
        objects = [_call(request, name, "arguments") for name in request.schemas]
        closing = f" {request.tag(markers.closing)}" if markers.closing else ""
        call_list = f'"[" {_repeated(request, "object", quoted(", "))} "]"{closing}'
        once = replace(request, parallel=False)
        form = _tagged(once, markers.opening, [call_list], "", "")
        return "\n".join((form, rule("object", objects)))

    return grammar


def section_grammar(
    markers: JsonCallMarkers, *head: str, foot: str = "", between: str = ""
) -> CallGrammar:
    """Calls with their name before the arguments, all in one section.

    Arguments:
    - head: tags and texts before the arguments, in which {} is the name
    - foot: text behind the arguments
    - between: text between calls
    """

    def grammar(request: GrammarRequest) -> str:
        assert markers.section is not None
        begin, end = markers.section
        calls = [
            _sequence(
                request.tag(markers.opening),
                *(request.tag(part.replace("{}", name)) for part in head),
                json_arguments(request, name),
                _optional_text(foot),
                request.tag(markers.closing),
            )
            for name in request.schemas
        ]
        call_list = f"{_repeated(request, 'object', _optional_text(between))} {request.tag(end)}"
        form = _tagged(replace(request, parallel=False), begin, [call_list], markers.opening, "")
        return "\n".join((form, rule("object", calls)))

    return grammar


def pythonic_grammar(call_format: PythonicFormat) -> CallGrammar:
    """Calls as Python writes them, with arguments in the order of the schema."""

    def grammar(request: GrammarRequest) -> str:
        python = _PythonicRules(request)
        calls = {name: python.call(name, f"p{i}") for i, name in enumerate(request.schemas)}
        whole = [f"{quoted(name + '(')} {call}" for name, call in calls.items()]
        opening, end = call_format.tags
        call_list = _repeated(request, "called", quoted(call_format.separator))
        if call_format.brackets:
            call_list = f'"[" {call_list} "]"'
        rules = ["", rule("called", whole), *python.rules]
        if opening:
            call_list = f"{call_list} {request.tag(end)}"
            form = _tagged(replace(request, parallel=False), opening, [call_list], "", "")
        elif not request.allow_content:
            form = _start(request, call_list, _CALL_START)
        else:
            form = _first_in_list(request, call_format, calls)
        return form + "\n".join(rules)

    return grammar


def _first_in_list(
    request: GrammarRequest, call_format: PythonicFormat, calls: Mapping[str, str]
) -> str:
    """Content around calls without an opening tag: it holds nothing that begins like a list of
    calls.
    """
    more = f" ({quoted(call_format.separator)} called)*" if request.parallel else ""
    rules = [
        f'start: (first{more} "]"){"*" if request.parallel else "?"} rest',
        rule("first", [f"f{i} {call}" for i, call in enumerate(calls.values())]),
        f"rest: TEXT\nTEXT: {ANY_TEXT} & ~/(?s:.*){_CALL_START}(?s:.*)/",
    ]
    for i, name in enumerate(calls):
        # Brackets are counted, in texts as well: the remark closes those of the suffix.
        rules.append(f"f{i}[suffix={quoted(f'[{name}(')}]: TEXT // )]")
    return "\n".join(rules)


def bare_list_grammar(request: GrammarRequest, key: str = "parameters") -> str:
    """A list of objects and nothing else. `key`: of the arguments."""
    call_list = f'"[" {_repeated(request, "call", quoted(", "))} "]"'
    call = _call if request.content_constraint is None else _object  # as in llama3
    rules = [rule("call", [call(request, name, key) for name in request.schemas])]
    if request.allow_content:
        call_list = f"({call_list}) | text"
        rules += ["text: TEXT", f"TEXT: {ANY_TEXT} & ~/\\s*\\[\\s*\\{{(?s:.*)/"]
    return "\n".join((_start(request, call_list), *rules))


def marked_object_grammar(markers: JsonCallMarkers) -> CallGrammar:
    """Objects, each behind a marker."""

    def grammar(request: GrammarRequest) -> str:
        bodies = [_call(request, name, "arguments") for name in request.schemas]
        return _tagged(request, markers.opening, bodies, "", "")

    return grammar


def _tagged(
    request: GrammarRequest, opening: str, bodies: list[str], never: str, between: str
) -> str:
    """Calls that each begin with the tag `opening`. `never`: text that content must not contain."""
    tag, body = request.tag(opening), rule("body", bodies)
    if not request.allow_content:
        call = f"call: {tag} body"
        start = _start(request, _repeated(request, "call", between), re.escape(opening))
        return "\n".join((start, call, body))
    sign = "*" if request.parallel else "?"
    if request.has_special_token(opening):
        text, lead = _text_without(never), request.text_before_special(opening)
        ends = f" & /(?s:.*){_escaped_in_slashes(lead)}/" if lead else ""
        rules = (f"before: BEFORE\nBEFORE: {text}{ends}", f"rest: REST\nREST: {text}", body)
        return "\n".join(
            (f"start: (before {request.from_first_special(opening)} body){sign} rest", *rules)
        )
    # Content may not begin with a newline there: the lexer would not know which is meant.
    before = f"before[suffix={tag}]: {_text_without(never)}"
    after = f"REST: {_text_without(opening, never)}"
    return "\n".join((f"start: (before body){sign} rest", before, "rest: REST", after, body))


def _text_without(*texts: str) -> str:
    """A regular expression for texts that contain none of `texts`."""
    escaped = "|".join(_escaped_in_slashes(text) for text in texts if text)
    return f"{ANY_TEXT} & ~/(?s:.*)({escaped})(?s:.*)/" if escaped else ANY_TEXT


def _escaped_in_slashes(text: str) -> str:
    """A text, escaped for a regular expression between slashes."""
    return re.escape(text).replace("/", "\\/").replace("\\\n", "\\n")


def _start(request: GrammarRequest, calls: str, never: str = "") -> str:
    """Calls, or content that fits the constraint. Behind reasoning models begin a paragraph.
    `never`: see _content_rule.
    """
    space = "/\\n\\n?/? " if request.after_reasoning else ""
    if request.content_constraint is None:
        return f"start: {space}{calls}"
    return f"start: {space}({calls} | form)\n{_content_rule(request.content_constraint, never)}"


def _content_rule(form: StructuredOutputs, never: str) -> str:
    """The rule of content that must fit `form`. `never`: a regular expression of what calls
    begin with.
    """
    if form.json is not None:
        return f"form: %json {constraint_schema(form.json)}"
    if form.choice is not None:
        return rule("form", [quoted(text) for text in form.choice])
    if form.regex is None:
        raise UnsupportedSchema(f"a grammar cannot stand beside that of calls; {NO_TOOLS_HINT}")
    if not never:
        reason = "beside this model's calls, a form must be a schema or a choice"
        raise UnsupportedSchema(f"{reason}; {NO_TOOLS_HINT}")
    return f"form: FORM\nFORM: /{slashed(form.regex)}/ & ~/{slashed(never)}(?s:.*)/"


def slashed(regex: str) -> str:
    """As it stands between slashes."""
    closed = re.sub(r"(\\.)|/", lambda found: found[1] or "\\/", regex, flags=re.DOTALL)
    return closed.replace("\n", "\\n")


def constraint_schema(text: str) -> str:
    """The JSON schema of a constraint, for %json. Raises UnsupportedSchema and GrammarError."""
    schema = schema_of(text)
    if schema is False:
        raise UnsupportedSchema("the form's schema must be an object")
    schema = {} if schema is True else schema
    return msgspec.json.encode(without_guidance(schema)).decode()


def without_guidance(schema: JsonObject) -> JsonObject:
    """Without what it would tell the compiler."""
    return {key: value for key, value in schema.items() if key != "x-guidance"}


def _repeated(request: GrammarRequest, name: str, between: str) -> str:
    return f"{name} ({between} {name})*" if request.parallel else name


def rule(name: str, alternatives: Iterable[str]) -> str:
    """One of the alternatives."""
    return f"{name}: " + "\n  | ".join(alternatives)


def _call(request: GrammarRequest, name: str, key: str) -> str:
    head = f'{{"name": {quoted(name)}, "{key}": '
    return f'{quoted(head)} {json_arguments(request, name)} "}}"'


def _object(request: GrammarRequest, name: str, key: str) -> str:
    """The same as _call, as one schema."""
    text = request.input_grammars.get(name)
    regex = None if text is None else _text_regex(name, text, None)
    arguments = _arguments(_schema(request, name, regex))
    if _NON_LOCAL_REF.search(msgspec.json.encode(arguments).decode()):
        raise UnsupportedSchema(f"{name}: beside a form, a $ref may only name a definition")
    call: JsonObject = {
        "type": "object",
        "properties": {"name": {"const": name}, key: arguments},
        "required": ["name", key],
        "additionalProperties": False,
        **{each: arguments[each] for each in DEFINITIONS if each in arguments},
    }
    return f"%json {msgspec.json.encode(call).decode()}"


def json_arguments(request: GrammarRequest, name: str) -> str:
    """A function's arguments by the schema of its parameters, or by what holds its text."""
    text = request.input_grammars.get(name)
    regex = None if text is None else _text_regex(name, text, JSON_ESCAPED_CHARS)
    if text is None or regex is not None:
        schema = _schema(request, name, regex)
        return f"%json {msgspec.json.encode(_arguments(schema)).decode()}"
    return f'{quoted(_INPUT_OPENING)} {_nested_grammar(text)} "\\"}}"'


def _schema(request: GrammarRequest, name: str, regex: str | None) -> JsonObject | None:
    """The schema to enforce; None: any object. `regex`: of a custom tool's text."""
    if regex is None:
        return request.schemas[name]
    return input_schema({"pattern": f"^(?:{_regex_in_schema(regex)})$"})


def _regex_in_schema(regex: str) -> str:
    """For a schema, in which some classes have fewer letters than in an expression by itself."""
    return re.sub(r"\\(.)", lambda found: _CLASSES.get(found[1], found[0]), regex, flags=re.DOTALL)


def input_schema(keywords: JsonObject) -> JsonObject:
    """The schema of a custom tool's parameters: one string, its input. `keywords`: keywords of that
    string.
    """
    return {
        "type": "object",
        "properties": {INPUT_PARAMETER: {"type": "string", **keywords}},
        "required": [INPUT_PARAMETER],
        "additionalProperties": False,
    }


def _text_regex(tool: str, text: StructuredOutputs, excluded: str | None) -> str | None:
    """The regular expression of a custom tool's text. Raises UnsupportedInputGrammar.

    None for a grammar without one that can be nested instead, because its texts have none of the
    letters `excluded`; with `excluded` None no grammar can be nested.
    """
    if text.grammar is None:
        return with_plain_digits(text.regex or "")
    try:
        return grammar_to_regex(text.grammar)
    except RecursiveGrammar as error:
        reason = error
    except UnsupportedGrammar as error:
        raise UnsupportedInputGrammar(tool, str(error)) from None
    try:
        if excluded is not None and not may_contain(text.grammar, excluded):
            return None
    except UnsupportedGrammar as error:
        raise UnsupportedInputGrammar(tool, str(error)) from None
    where = "beside a form" if excluded is None else "with letters that are escaped or begin a tag"
    raise UnsupportedInputGrammar(
        tool, f"{where} it cannot be held within a call of this model: {reason}"
    )


def _nested_grammar(text: StructuredOutputs) -> str:
    """A grammar with rules of its own, nested in a rule."""
    return f"%lark {{\n{text.grammar}\n}}"


def _arguments(schema: JsonObject | None) -> JsonObject:
    """`schema` is that of an object."""
    return {**without_guidance({} if schema is None else schema or NO_PARAMETERS), "type": "object"}


def quoted(text: str) -> str:
    """As it stands in a rule."""
    return msgspec.json.encode(text).decode()


def _optional_text(text: str) -> str:
    """What sets others apart, or nothing."""
    return quoted(text) if text else ""


def _sequence(*parts: str) -> str:
    """One after the other; texts that follow each other become one."""
    joined: list[str] = []
    for part in filter(None, parts):
        if joined and joined[-1].startswith('"') and part.startswith('"'):
            joined[-1] = joined[-1][:-1] + part[1:]
        else:
            joined.append(part)
    return " ".join(joined)


# ----------------------------------------------------------------------------------------- elements


class _XmlRules:
    """Functions as elements with parameters. `rules`: that the functions refer to."""

    def __init__(self, tags: XmlTags, request: GrammarRequest) -> None:
        self._tags = tags
        self._request = request
        self._optional_text = _optional_text(tags.separator)
        self._line = _optional_text("\n" * tags.value_on_lines)
        end = request.tag(tags.value_end)
        self._closing = _sequence(self._line, end, self._optional_text)
        never = _text_without(*tags.ends_of_value)
        self._special = request.has_special_token(tags.value_end)
        # What of the closing no token spells is a part of a text before it.
        self._lead = (
            "\n" * tags.value_on_lines + request.text_before_special(tags.value_end)
            if self._special
            else ""
        )
        self._after_lead = _sequence(
            request.from_first_special(tags.value_end), self._optional_text
        )
        if self._special:
            ends = f" & /(?s:.*){_escaped_in_slashes(self._lead)}/" if self._lead else ""
            self.rules = [f"value: VALUE {self._after_lead}", f"VALUE: {never}{ends}"]
        else:
            self.rules = [f"value[suffix={self._closing}]: VALUE", f"VALUE: {never}"]

    def function(self, name: str, prefix: str, schema: JsonObject | None) -> str:
        """The rule of a call from behind the call tag. Rules that it needs are named with `prefix`.
        Raises UnsupportedSchema.
        """
        opening, end = self._tags.function
        opening = self._request.tag(opening) if opening else ""
        closing = self._request.tag(end) if end else ""
        before = self._optional_text if opening and not self._tags.shared_call_tag else ""
        named = quoted(name + self._tags.name_end + self._tags.separator)
        text = self._request.input_grammars.get(name)
        if text is not None:
            parameters = self._text(name, prefix, text)
        else:
            parameters = self._parameters(name, prefix, schema)
        behind = self._optional_text if closing else ""
        return _sequence(before, opening, named, parameters, closing, behind)

    def _key(self, key: str, text: bool | None) -> str:
        """The begin of a parameter, up to its value. `key`: an expression. `text`: whether the
        value is one; None: either."""
        tag, value, typed = self._request.tag, self._tags.value, self._tags.string_flag
        between = (self._optional_text, tag(value)) if value else ()
        types = '("true" | "false")' if text is None else quoted("true" if text else "false")
        said = (quoted(typed), types) if typed else ()
        return _sequence(
            tag(self._tags.key), key, *said, tag(self._tags.key_end), *between, self._line
        )

    def _text(self, name: str, prefix: str, text: StructuredOutputs) -> str:
        """The one parameter of a custom tool, whose text is held."""
        closing = self._lead if self._special else msgspec.json.decode(self._closing, type=str)
        regex = _text_regex(name, text, closing and closing[0] + "<")
        if regex is not None:
            value = self._regex(prefix, regex)
        else:
            value = f"{_nested_grammar(text)} {self._closing}"
        self.rules.append(f"{prefix}: {self._key(quoted(INPUT_PARAMETER), True)} {value}")
        return prefix

    def _regex(self, prefix: str, regex: str) -> str:
        """A text of a regular expression, and its end."""
        name, upper = f"{prefix}_text", f"{prefix.upper()}_TEXT"
        text_regex = f"/{slashed(regex)}/ & {_text_without(*self._tags.ends_of_value)}"
        if self._special:
            text = f"/({slashed(regex)}){_escaped_in_slashes(self._lead)}/"
            self.rules.append(f"{upper}: {text} & {_text_without(*self._tags.ends_of_value)}")
            return f"{upper} {self._after_lead}"
        self.rules += [f"{name}[suffix={self._closing}]: {upper}", f"{upper}: {text_regex}"]
        return name

    def _parameters(self, name: str, prefix: str, given: JsonObject | None) -> str:
        if given is None:
            self.rules.append(f"{prefix}: {self._key(f'/{_KEY}/', None)} value")
            return f"{prefix}*"
        properties, required, shared = _by_name(name, given, _KEY)
        parts: list[str] = []
        for i, (key, value) in enumerate(properties.items()):
            said = self._value(name, value, shared)
            self.rules.append(f"{prefix}_{i}: {self._key(quoted(key), _is_text(value))} {said}")
            parts.append(f"{prefix}_{i}" + "?" * (key not in required))
        return " ".join(parts)

    def _value(self, name: str, schema: JsonValue, shared: JsonObject) -> str:
        """A text stands for itself, all else is JSON."""
        if not _is_text(schema) or not isinstance(schema, dict):
            own = schema if isinstance(schema, dict) else {}
            return f"%json {msgspec.json.encode({**own, **shared}).decode()} {self._closing}"
        if set(schema) <= _ANNOTATIONS | {"type"}:
            return "value"
        options = schema.get("enum", [schema["const"]] if "const" in schema else [])
        call_list = options if isinstance(options, list) else []
        plain = set(schema) <= _ANNOTATIONS | {"type", "enum", "const"}
        texts = [text for text in call_list if isinstance(text, str)]
        if not plain or not texts or any("\n" in text or "<" in text for text in texts):
            raise UnsupportedSchema(
                f"{name}: calls of this model cannot be held to the patterns, lengths and formats "
                "of texts"
            )
        return f"({' | '.join(map(quoted, texts))}) {self._closing}"


def _is_text(schema: JsonValue) -> bool:
    """Whether a value of that schema is a text, and nothing else."""
    return schema_types(schema) == frozenset(("string",))


def _by_name(
    function: str, given: JsonObject, key: str
) -> tuple[JsonObject, Collection[JsonValue], JsonObject]:
    """(schemas of the parameters, names that are required, definitions), for formats that write
    each parameter by itself. `key`: a regular expression of names. Raises UnsupportedSchema.
    """
    schema = given or NO_PARAMETERS
    properties, required = schema.get("properties", {}), schema.get("required", [])
    strange = sorted(set(schema) - _OBJECT_KEYWORDS)
    if strange or not isinstance(properties, dict) or not isinstance(required, list):
        names = strange[0] if strange else "properties"
        raise UnsupportedSchema(
            f"{function}: calls of this model cannot be held to {names[:100]!r}"
        )
    missing = [each for each in required if each not in properties]
    if missing:
        raise UnsupportedSchema(
            f"{function}: {str(missing[0])[:100]!r} is required and has no schema"
        )
    for each in properties:
        if not re.fullmatch(key, each):
            raise UnsupportedSchema(f"{function}: {each[:100]!r} cannot be the name of a parameter")
    return properties, required, {each: schema[each] for each in DEFINITIONS if each in schema}


# ------------------------------------------------------------------------------------------- Python


class _PythonicRules:
    """Functions with their arguments in parentheses. `rules`: that the functions refer to."""

    def __init__(self, request: GrammarRequest) -> None:
        self._request = request
        self.rules = [f'pair: /{ARGUMENT_NAME}/ "=" %json {{}}']
        self._values: dict[str, str] = {}  # the names of their rules

    def call(self, name: str, prefix: str) -> str:
        """The rule from behind the opening parenthesis. Raises UnsupportedSchema."""
        if not re.fullmatch(FUNCTION_NAME, name):
            raise UnsupportedSchema(f"{name[:100]!r} cannot be called in this model's form")
        text = self._request.input_grammars.get(name)
        regex = None if text is None else _text_regex(name, text, JSON_ESCAPED_CHARS)
        if text is not None and regex is None:
            return f'{quoted(INPUT_PARAMETER + "=" + chr(34))} {_nested_grammar(text)} "\\")"'
        schema = _schema(self._request, name, regex)
        if schema is None:
            return '(pair (", " pair)*)? ")"'
        return f'{self._arguments(name, prefix, schema)} ")"'.lstrip()

    def _arguments(self, name: str, prefix: str, given: JsonObject) -> str:
        """Those that are required, and others, in their order. Up to the first that is required,
        each may be the first one; it has rules of its own then, as it stands in two places."""
        properties, required, shared = _by_name(name, given, ARGUMENT_NAME)
        values = [self._value(value, shared) for value in properties.values()]
        heads = [f"{key}=" for key in properties]
        optional = [key not in required for key in properties]
        ahead = optional.index(False) if False in optional else len(heads)
        behind = ""
        for i in reversed(range(ahead + 1, len(heads))):
            more = f"{quoted(', ' + heads[i])} {values[i]}"
            behind = f"({more})? {behind}" if optional[i] else f"{more} {behind}"
        rest = '""'
        if ahead < len(heads):
            self.rules.append(
                f"{prefix}b{ahead}: {quoted(', ' + heads[ahead])} {values[ahead]} {behind}"
            )
            rest = f"{quoted(heads[ahead])} {values[ahead]} {behind}"
        for i in reversed(range(ahead)):
            # b: behind others; f: as the first one, or none.
            after = f"{prefix}b{i + 1}" if i + 1 < len(heads) else ""
            self.rules += [
                f"{prefix}b{i}: ({quoted(', ' + heads[i])} {values[i]})? {after}",
                f"{prefix}f{i}: {quoted(heads[i])} {values[i]} {after} | {rest}",
            ]
            rest = f"{prefix}f{i}"
        return rest if heads else ""

    def _value(self, schema: JsonValue, shared: JsonObject) -> str:
        """In a rule that all values of such a schema share."""
        value = _python_value(schema, shared)
        if value not in self._values:
            self._values[value] = f"v{len(self._values)}"
            self.rules.append(f"{self._values[value]}: {value}")
        return self._values[value]


def _python_value(schema: JsonValue, shared: JsonObject) -> str:
    """As JSON; words that are all of a value may be Python's."""
    own = schema if isinstance(schema, dict) else {}
    if not set(own) - _ANNOTATIONS - {"type"}:
        if schema_types(own) == frozenset(("boolean",)):
            return '("True" | "False" | "true" | "false")'
        if schema_types(own) == frozenset(("null",)):
            return '("None" | "null")'
    return f"%json {msgspec.json.encode({**own, **shared}).decode()}"
