"""Tool calls as XML-like elements, one for each parameter, whose text is not escaped:

    <tool_call><function=name><parameter=key>value</parameter></function></tool_call>
    <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>
    <invoke name="name"><parameter name="key" string="true">value</parameter></invoke>

The tool's schema decides which JSON a value is. XmlTags says how a format writes the elements.
xml_grammar makes the grammar of such calls. Knows no model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from pipeinfer.gateway.tool_parsers.base import (
    INPUT_PARAMETER,
    WHITESPACE,
    ContentBuffer,
    ParsedDelta,
    find_marker,
    schema_types,
)
from pipeinfer.gateway.tool_parsers.grammars import (
    ANNOTATIONS,
    CallGrammar,
    GrammarRequest,
    UnsupportedSchema,
    escaped_in_slashes,
    input_regex,
    is_text_schema,
    nested_grammar,
    optional_text,
    parameter_schemas,
    quoted,
    repeated,
    rule,
    sequence,
    slashed,
    tagged_calls,
    text_without,
)
from pipeinfer.gateway.tool_parsers.partial_json import JsonValueScanner
from pipeinfer.gateway.tool_parsers.pythonic import PythonLiteralParser
from pipeinfer.params import JsonObject, JsonValue, StructuredOutputs

MAX_NAME_CHARS = 256  # characters of a name of a function or parameter
_PYTHON = ("T", "F", "N", "[", "{", "(")  # first letters of Python literals that are no JSON
_BARE_NAME = re.compile(r"[^\s<>{}\[\]\"'`]+")  # of a function that stands between tags


@dataclass(frozen=True)
class XmlTags:
    """The tags of one format. An empty string: the format has no such tag.

    Attributes:
    - call: (opening, closing) around calls
    - key, key_end: around the name of a parameter
    - value, value_end: around its value; with an empty `value` it follows `key_end`
    - function: (opening, closing) of one call, the opening up to its name. If empty, the name
      stands behind the opening of `call`, before a key or the closing
    - name_end: ends the name
    - string_flag: between a parameter's name and whether its value is a string, "true" or "false"
    - value_on_lines: a value stands on lines of its own
    - tolerates_missing_ends: models of this format forget end tags
    - separator: text between elements
    - shared_call_tag: all calls stand between one pair of `call` tags
    """

    call: tuple[str, str]
    key: str
    key_end: str
    value_end: str
    function: tuple[str, str] = ("", "")
    name_end: str = ""
    value: str = ""
    string_flag: str = ""
    value_on_lines: bool = False
    tolerates_missing_ends: bool = True
    separator: str = "\n"
    shared_call_tag: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """Tags that may be tokens of their own."""
        tags = (*self.call, self.function[1], self.key, self.key_end, self.value, self.value_end)
        return tuple(tag for tag in tags if tag[:1] == "<" and tag[-1] == ">")

    @property
    def ends_of_value(self) -> tuple[str, ...]:
        """Texts that end a value. Tags but `value_end` must begin a line: values may hold them."""
        ends = (self.key, self.function[1], self.call[1]) if self.tolerates_missing_ends else ()
        return (self.value_end, *("\n" + end for end in ends if end))

    @property
    def ends_of_body(self) -> tuple[str, ...]:
        """Tags that end the body of a call or begin a parameter in it."""
        return tuple(filter(None, (self.key, self.function[1], self.call[1], self.call[0],
                                   self.function[0])))  # fmt: skip


QWEN3_CODER = XmlTags(
    ("<tool_call>", "</tool_call>"),
    "<parameter=", ">", "</parameter>",
    ("<function=", "</function>"), ">",
    value_on_lines=True,
)  # fmt: skip
SEED_OSS = replace(
    QWEN3_CODER, call=("<seed:tool_call>", "</seed:tool_call>"), value_on_lines=False
)
MINIMAX_M2 = XmlTags(
    ("<minimax:tool_call>", "</minimax:tool_call>"),
    '<parameter name="', '">', "</parameter>",
    ('<invoke name="', "</invoke>"), '">',
    shared_call_tag=True,
)  # fmt: skip
DEEPSEEK_V32 = XmlTags(
    ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
    '<｜DSML｜parameter name="', '">', "</｜DSML｜parameter>",
    ('<｜DSML｜invoke name="', "</｜DSML｜invoke>"), '">',
    string_flag='" string="',
    shared_call_tag=True,
)  # fmt: skip
DEEPSEEK_V4 = replace(DEEPSEEK_V32, call=("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"))
GLM45 = XmlTags(
    ("<tool_call>", "</tool_call>"),
    "<arg_key>", "</arg_key>", "</arg_value>",
    value="<arg_value>", tolerates_missing_ends=False,
)  # fmt: skip
GLM47 = replace(GLM45, separator="")

XmlCallState = Literal[
    "content", "tag", "name", "begin", "body", "object", "key", "between", "value"
]


class XmlCallParser:
    """Parses calls of one format. `schemas`: of the tools' parameters, by name.

    Models also forget the tag around calls. Without it the function must be one of the tools,
    because content may be about <function=...>.
    """

    def __init__(self, tags: XmlTags, schemas: Mapping[str, JsonObject]) -> None:
        self._tags = tags
        self._schemas = schemas
        self._inside_call_tag = False  # between the tags around calls
        self._state: XmlCallState = "content"
        self._buffer: str = ""
        self._prefix: list[str] = []  # tags before a name, which are content if it is no name
        self._call_count = self._value_count = 0
        self._properties: JsonObject = {}
        self._content_buffer = ContentBuffer()
        self._key = self._string_flag = ""
        self._value = _ValueEncoder(frozenset(), tags.value_on_lines)
        # Scans the JSON object of a call whose parameters are one object.
        self._object_scanner: JsonValueScanner | None = None

    def feed(self, text: str) -> Sequence[ParsedDelta]:
        self._buffer += text
        deltas: list[ParsedDelta] = []
        steps = {
            "content": self._find_call,
            "tag": self._expect_function,
            "name": self._parse_name,
            "begin": self._start_body,
            "body": self._find_parameter,
            "object": self._feed_object,
            "key": self._parse_key,
            "between": self._expect_value,
            "value": self._feed_value,
        }
        while steps[self._state](deltas):
            pass
        return deltas

    def finish(self) -> Sequence[ParsedDelta]:
        """A call without an end is closed. One that is cut off within a value is not, so that its
        arguments are not taken for complete ones.
        """
        deltas: list[ParsedDelta] = []
        match self._state:
            case "name" | "tag":
                self._content_buffer.add("".join((*self._prefix, self._buffer)), deltas)
            case "content":
                begun = self._content_buffer.after_call and self._tags.call[1].startswith(
                    self._buffer
                )
                self._content_buffer.add("" if begun else self._buffer, deltas)
            case "begin" | "body":
                self._close_arguments(deltas)
            case "value":
                self._emit_arguments(self._value.add(self._buffer), deltas)
            case _:
                pass
        self._content_buffer.flush(deltas)
        self._buffer = ""
        return deltas

    def _find_call(self, deltas: list[ParsedDelta]) -> bool:
        call, end, function = *self._tags.call, self._tags.function[0]
        found = find_marker(self._buffer, (call, end, function) if function else (call, end))
        self._content_buffer.add(found.before, deltas)
        self._buffer = found.tail
        if found.marker is None:
            return False
        if found.marker == end:
            self._inside_call_tag = False
            if not self._content_buffer.after_call:
                self._content_buffer.add(end, deltas)
        else:
            follows = self._inside_call_tag and self._content_buffer.after_call
            self._inside_call_tag = follows or found.marker == call
            self._prefix = [found.marker]
            self._state = "name" if found.marker == function or not function else "tag"
        return True

    def _expect_function(self, deltas: list[ParsedDelta]) -> bool:
        function = self._tags.function[0]
        bare = self._buffer.lstrip(WHITESPACE)
        self._prefix.append(self._buffer[: len(self._buffer) - len(bare)])
        self._buffer = bare
        if bare.startswith(function):
            self._prefix.append(function)
            self._buffer, self._state = bare[len(function) :], "name"
            return True
        if function.startswith(bare):
            return False
        return self._not_a_call(deltas)

    def _not_a_call(self, deltas: list[ParsedDelta]) -> bool:
        """Text that began like a call is content."""
        self._content_buffer.add("".join(self._prefix), deltas)
        self._state, self._inside_call_tag = "content", False
        return True

    def _parse_name(self, deltas: list[ParsedDelta]) -> bool:
        if self._tags.name_end:
            at = self._buffer.find(self._tags.name_end, 0, MAX_NAME_CHARS)
            name, tail = self._buffer[: max(at, 0)], self._buffer[at + len(self._tags.name_end) :]
        else:
            found = find_marker(self._buffer[:MAX_NAME_CHARS], (self._tags.key, self._tags.call[1]))
            at = -1 if found.marker is None else len(found.before)
            name = found.before if _BARE_NAME.fullmatch(found.before.strip(WHITESPACE)) else ""
            tail = self._buffer[len(found.before) :]
        if at < 0 and len(self._buffer) < MAX_NAME_CHARS:
            return False
        name = name.strip(WHITESPACE)
        if at < 0 or not name or not (self._inside_call_tag or name in self._schemas):
            return self._not_a_call(deltas)
        self._content_buffer.start_call()
        self._value_count, self._object_scanner, self._buffer = 0, None, tail
        properties = self._schemas.get(name, {}).get("properties")
        self._properties = properties if isinstance(properties, dict) else {}
        deltas.append(ParsedDelta("call", name, self._call_count))
        self._emit_arguments("{", deltas)
        self._state = "begin"
        return True

    def _start_body(self, _deltas: list[ParsedDelta]) -> bool:
        bare = self._buffer.lstrip(WHITESPACE)
        if bare[:1] == "{":
            self._object_scanner = JsonValueScanner()
            self._object_scanner.feed("{", 0)
            self._state, bare = "object", bare[1:]
        elif bare:
            self._state = "body"
        begun, self._buffer = bool(bare) or self._state == "object", bare
        return begun

    def _find_parameter(self, deltas: list[ParsedDelta]) -> bool:
        found = find_marker(self._buffer, self._tags.ends_of_body)
        self._buffer = found.tail
        self._handle_marker(found.marker, deltas)
        return found.marker is not None

    def _feed_object(self, deltas: list[ParsedDelta]) -> bool:
        """The arguments as one JSON object, in place of elements."""
        assert self._object_scanner is not None
        end, chunk = self._object_scanner.feed(self._buffer, 0)
        self._emit_arguments(chunk, deltas)
        self._buffer = self._buffer[end:]
        if self._object_scanner.done:
            self._state = "body"
        return self._object_scanner.done

    def _handle_marker(self, marker: str | None, deltas: list[ParsedDelta]) -> None:
        """Goes on behind a marker of the body."""
        if marker == self._tags.key:
            self._state = "key"
        elif marker is not None and marker != self._tags.value_end:
            self._close_arguments(deltas)
            self._call_count += 1
            self._state = "content"
            if marker != self._tags.function[1]:  # which the model forgot, or the format lacks
                self._buffer = marker + self._buffer

    def _close_arguments(self, deltas: list[ParsedDelta]) -> None:
        if self._object_scanner is None:
            self._emit_arguments("}", deltas)

    def _parse_key(self, _deltas: list[ParsedDelta]) -> bool:
        at = self._buffer.find(self._tags.key_end, 0, MAX_NAME_CHARS)
        if at < 0:
            self._state = "key" if len(self._buffer) < MAX_NAME_CHARS else "body"
            return self._state == "body"
        key, self._buffer = self._buffer[:at], self._buffer[at + len(self._tags.key_end) :]
        if self._tags.string_flag:
            key, _, self._string_flag = key.partition(self._tags.string_flag)
        self._key = key.strip(WHITESPACE)
        self._state = "between"
        return True

    def _expect_value(self, deltas: list[ParsedDelta]) -> bool:
        """Between a key and its value. A key without a value is left out."""
        value = self._tags.value
        if value:
            self._buffer = self._buffer.lstrip(WHITESPACE)
            if not self._buffer.startswith(value):
                waits = value.startswith(self._buffer)
                self._state = "between" if waits else "body"
                return not waits
            self._buffer = self._buffer[len(value) :]
        self._emit_arguments(
            f"{', ' if self._value_count else ''}{_json_string(self._key)}: ", deltas
        )
        self._value_count += 1
        self._value = _ValueEncoder(self._value_types(), self._tags.value_on_lines)
        self._state = "value"
        return True

    def _value_types(self) -> frozenset[str]:
        """JSON types of the key's value, by the schema and by the call's own flag."""
        known = schema_types(self._properties.get(self._key))
        if self._string_flag == "true" and (not known or "string" in known):
            return frozenset(("string",))
        return (known - {"string"} or known) if self._string_flag == "false" else known

    def _feed_value(self, deltas: list[ParsedDelta]) -> bool:
        found = find_marker(self._buffer, self._tags.ends_of_value)
        self._buffer = found.tail
        self._emit_arguments(self._value.add(found.before), deltas)
        if found.marker is None:
            return False
        self._emit_arguments(self._value.end(), deltas)
        self._state = "body"
        self._handle_marker(found.marker.lstrip(), deltas)
        return True

    def _emit_arguments(self, text: str, deltas: list[ParsedDelta]) -> None:
        if text:
            deltas.append(ParsedDelta("arguments", text, self._call_count))


class _ValueEncoder:
    """Encodes one value as JSON.

    Strings are returned as they arrive, values that may be of another type at their end.

    Arguments:
    - allowed: JSON types that the schema allows; empty if nothing is known
    - value_on_lines: one line end before and behind the value is not part of it
    """

    def __init__(self, allowed: frozenset[str], value_on_lines: bool) -> None:
        self._value_types = allowed
        self._value_on_lines = value_on_lines
        self._is_string = allowed == frozenset(("string",))
        self._started = False
        self._pending_newline = ""  # the last line end is not part of the value
        self._parts: list[str] = []

    def add(self, text: str) -> str:
        """JSON text that is certain."""
        if not text:
            return ""
        opening = ""
        if not self._started:
            self._started = True
            text = text.removeprefix("\n") if self._value_on_lines else text
            opening = '"' * self._is_string
        text = self._pending_newline + text
        bare = text.removesuffix("\n") if self._value_on_lines else text
        self._pending_newline = text[len(bare) :]
        if self._is_string:
            return opening + _json_string(bare)[1:-1]
        self._parts.append(bare)
        return ""

    def end(self) -> str:
        """The rest of the JSON text."""
        if self._is_string:
            return '"' if self._started else '""'
        text = "".join(self._parts)
        bare = text.strip(WHITESPACE)
        found = _json_type(bare)
        if not found and bare[:1] in _PYTHON:
            bare = _from_python(bare)
            found = _json_type(bare)
        return bare if self._allows_type(found) else _json_string(text)

    def _allows_type(self, found: str) -> bool:
        """Whether a value of JSON type `found` is passed on as it is. Where no type fits, one that
        is no string is: the tool's own error explains better what is wrong.
        """
        if not found:
            return False
        fits = found in self._value_types or (found == "integer" and "number" in self._value_types)
        return fits or "string" not in self._value_types


def _json_type(text: str) -> str:
    """The JSON type of a text; empty if it is no JSON."""
    try:
        value: JsonValue = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return ""
    match value:
        case bool():
            return "boolean"
        case None:
            return "null"
        case int():
            return "integer"
        case float():
            return "number"
        case list():
            return "array"
        case dict():
            return "object"
        case _:
            return "string"


def _from_python(text: str) -> str:
    """A Python literal as JSON, if all of the text is one; else empty."""
    value = PythonLiteralParser()
    end, chunk = value.feed(text, 0, last=True)
    chunk += value.finish()
    return chunk if value.done and not value.irregular and end == len(text) else ""


def _json_string(value: str) -> str:
    return msgspec.json.encode(value).decode()


# ------------------------------------------------------------------------------- grammars of calls

_KEY = r"[^<>\s\"]{1,200}"


def xml_grammar(tags: XmlTags) -> CallGrammar:
    """Parameters as elements, in the order of the schema."""

    def grammar(request: GrammarRequest) -> str:
        elements, bodies = _XmlRules(tags, request), list[str]()
        for i, (name, schema) in enumerate(request.schemas.items()):
            bodies.append(elements.function(name, f"p{i}", schema))
        never, (opening, closing) = tags.function[0], tags.call
        if tags.shared_call_tag:
            calls = f'"\\n" {repeated(request, "function", "")} {request.tag(closing)}'
            form = tagged_calls(replace(request, parallel=False), opening, [calls], never, "")
            return "\n".join((form, rule("function", bodies), *elements.rules))
        bodies = [f"{body} {request.tag(closing)}" for body in bodies]
        between = optional_text(tags.separator)
        return "\n".join((tagged_calls(request, opening, bodies, never, between), *elements.rules))

    return grammar


class _XmlRules:
    """Functions as elements with parameters. rules: the rules that the functions refer to."""

    def __init__(self, tags: XmlTags, request: GrammarRequest) -> None:
        self._tags = tags
        self._request = request
        self._optional_text = optional_text(tags.separator)
        self._line = optional_text("\n" * tags.value_on_lines)
        end = request.tag(tags.value_end)
        self._closing = sequence(self._line, end, self._optional_text)
        never = text_without(*tags.ends_of_value)
        self._special = request.has_special_token(tags.value_end)
        # A part of the closing that no token spells is a part of the text before it.
        self._lead = (
            "\n" * tags.value_on_lines + request.text_before_special(tags.value_end)
            if self._special
            else ""
        )
        self._after_lead = sequence(request.from_first_special(tags.value_end), self._optional_text)
        if self._special:
            ends = f" & /(?s:.*){escaped_in_slashes(self._lead)}/" if self._lead else ""
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
        return sequence(before, opening, named, parameters, closing, behind)

    def _key(self, key: str, text: bool | None) -> str:
        """The begin of a parameter, up to its value. `key`: an expression. `text`: whether the
        value is one; None: either."""
        tag, value, typed = self._request.tag, self._tags.value, self._tags.string_flag
        between = (self._optional_text, tag(value)) if value else ()
        types = '("true" | "false")' if text is None else quoted("true" if text else "false")
        flag = (quoted(typed), types) if typed else ()
        return sequence(
            tag(self._tags.key), key, *flag, tag(self._tags.key_end), *between, self._line
        )

    def _text(self, name: str, prefix: str, text: StructuredOutputs) -> str:
        """The one parameter of a custom tool, whose text must fit a grammar."""
        closing = self._lead if self._special else msgspec.json.decode(self._closing, type=str)
        regex = input_regex(name, text, closing and closing[0] + "<")
        if regex is not None:
            value = self._regex(prefix, regex)
        else:
            value = f"{nested_grammar(text)} {self._closing}"
        self.rules.append(f"{prefix}: {self._key(quoted(INPUT_PARAMETER), True)} {value}")
        return prefix

    def _regex(self, prefix: str, regex: str) -> str:
        """A text of a regular expression, and its end."""
        name, upper = f"{prefix}_text", f"{prefix.upper()}_TEXT"
        text_regex = f"/{slashed(regex)}/ & {text_without(*self._tags.ends_of_value)}"
        if self._special:
            text = f"/({slashed(regex)}){escaped_in_slashes(self._lead)}/"
            self.rules.append(f"{upper}: {text} & {text_without(*self._tags.ends_of_value)}")
            return f"{upper} {self._after_lead}"
        self.rules += [f"{name}[suffix={self._closing}]: {upper}", f"{upper}: {text_regex}"]
        return name

    def _parameters(self, name: str, prefix: str, given: JsonObject | None) -> str:
        if given is None:
            self.rules.append(f"{prefix}: {self._key(f'/{_KEY}/', None)} value")
            return f"{prefix}*"
        properties, required, shared = parameter_schemas(name, given, _KEY)
        parts: list[str] = []
        for i, (key, value) in enumerate(properties.items()):
            said = self._value(name, value, shared)
            self.rules.append(
                f"{prefix}_{i}: {self._key(quoted(key), is_text_schema(value))} {said}"
            )
            parts.append(f"{prefix}_{i}" + "?" * (key not in required))
        return " ".join(parts)

    def _value(self, name: str, schema: JsonValue, shared: JsonObject) -> str:
        """A text stands for itself, all else is JSON."""
        if not is_text_schema(schema) or not isinstance(schema, dict):
            own = schema if isinstance(schema, dict) else {}
            return f"%json {msgspec.json.encode({**own, **shared}).decode()} {self._closing}"
        if set(schema) <= ANNOTATIONS | {"type"}:
            return "value"
        options = schema.get("enum", [schema["const"]] if "const" in schema else [])
        choices = options if isinstance(options, list) else []
        plain = set(schema) <= ANNOTATIONS | {"type", "enum", "const"}
        texts = [text for text in choices if isinstance(text, str)]
        if not plain or not texts or any("\n" in text or "<" in text for text in texts):
            raise UnsupportedSchema(
                f"{name}: calls of this model cannot be constrained by patterns, lengths and "
                "formats of texts"
            )
        return f"({' | '.join(map(quoted, texts))}) {self._closing}"
