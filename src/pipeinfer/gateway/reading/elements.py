"""Calls as elements, each parameter one of its own, with texts that stand for themselves:

    <tool_call><function=name><parameter=key>value</parameter></function></tool_call>
    <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>
    <invoke name="name"><parameter name="key" string="true">value</parameter></invoke>

What a value is in JSON, the tool's schema says. `ElementTags` says how a form writes the elements.
Knows no model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from pipeinfer.gateway.pieces import SPACE, Piece
from pipeinfer.gateway.reading.content import Content
from pipeinfer.gateway.reading.held import find
from pipeinfer.gateway.reading.json_text import ValueEnd
from pipeinfer.gateway.reading.python_text import PythonValue
from pipeinfer.gateway.reading.schema_types import types
from pipeinfer.json_values import JsonObject, JsonValue

MOST_LETTERS = 256  # of a name
_PYTHON = ("T", "F", "N", "[", "{", "(")  # what a literal begins with that JSON may not know
_BARE_NAME = re.compile(r"[^\s<>{}\[\]\"'`]+")  # of a function that stands between tags


@dataclass(frozen=True)
class ElementTags:
    """How a form writes elements. Empty tags are not there.

    `call`: around calls. `function`: around one of them, up to its name, which `name_end` ends;
    where it is empty the name stands behind the tag `call`, before a key or the end. `key`: before
    the name of a parameter, which `key_end` ends; `value`: before its value, which `value_end`
    ends. `typed`: between a parameter's name and whether its value is a text, true or false; empty
    where nothing says so. `lines`: a value stands on lines of its own. `forgets`: models of this
    form forget ends. `apart`: what stands between elements. `together`: all calls stand between two
    tags."""

    call: tuple[str, str]
    key: str
    key_end: str
    value_end: str
    function: tuple[str, str] = ("", "")
    name_end: str = ""
    value: str = ""
    typed: str = ""
    lines: bool = False
    forgets: bool = True
    apart: str = "\n"
    together: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """That may be tokens of their own."""
        whole = (*self.call, self.function[1], self.key, self.key_end, self.value, self.value_end)
        return tuple(tag for tag in whole if tag[:1] == "<" and tag[-1] == ">")

    @property
    def ends_of_value(self) -> tuple[str, ...]:
        """A line's begin is asked for, since texts may hold such tags."""
        ends = (self.key, self.function[1], self.call[1]) if self.forgets else ()
        return (self.value_end, *("\n" + end for end in ends if end))

    @property
    def ends_of_body(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.key, self.function[1], self.call[1], self.call[0],
                                   self.function[0])))  # fmt: skip


QWEN3_CODER = ElementTags(
    ("<tool_call>", "</tool_call>"),
    "<parameter=", ">", "</parameter>",
    ("<function=", "</function>"), ">",
    lines=True,
)  # fmt: skip
SEED_OSS = replace(QWEN3_CODER, call=("<seed:tool_call>", "</seed:tool_call>"), lines=False)
MINIMAX_M2 = ElementTags(
    ("<minimax:tool_call>", "</minimax:tool_call>"),
    '<parameter name="', '">', "</parameter>",
    ('<invoke name="', "</invoke>"), '">',
    together=True,
)  # fmt: skip
DEEPSEEK_V32 = ElementTags(
    ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
    '<｜DSML｜parameter name="', '">', "</｜DSML｜parameter>",
    ('<｜DSML｜invoke name="', "</｜DSML｜invoke>"), '">',
    typed='" string="',
    together=True,
)  # fmt: skip
DEEPSEEK_V4 = replace(DEEPSEEK_V32, call=("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"))
GLM45 = ElementTags(
    ("<tool_call>", "</tool_call>"),
    "<arg_key>", "</arg_key>", "</arg_value>",
    value="<arg_value>", forgets=False,
)  # fmt: skip
GLM47 = replace(GLM45, apart="")

State = Literal["content", "tag", "name", "begin", "body", "object", "key", "between", "value"]


class Elements:
    """`schemas`: of the tools' parameters, by name. Models forget the tag around calls, too: what
    is called without it must be one of the tools, for answers may speak of <function=...>."""

    def __init__(self, tags: ElementTags, schemas: Mapping[str, JsonObject]) -> None:
        self._tags = tags
        self._schemas = schemas
        self._tagged = False  # between the tags around calls
        self._state: State = "content"
        self._text: str = ""
        self._before: list[str] = []  # of a name, if it is none: the tags
        self._calls = self._values = 0
        self._properties: JsonObject = {}
        self._content = Content()
        self._key = self._typed = ""
        self._value = _Value(frozenset(), tags.lines)
        self._object: ValueEnd | None = None  # of a call whose parameters are no elements

    def read(self, text: str) -> Sequence[Piece]:
        self._text += text
        pieces: list[Piece] = []
        steps = {
            "content": self._outside,
            "tag": self._opened,
            "name": self._named,
            "begin": self._begin,
            "body": self._body,
            "object": self._whole,
            "key": self._keyed,
            "between": self._between,
            "value": self._valued,
        }
        while steps[self._state](pieces):
            pass
        return pieces

    def end(self) -> Sequence[Piece]:
        """A call without an end is closed; one that is cut off amid a value is not, so that nobody
        takes its arguments for whole ones."""
        pieces: list[Piece] = []
        match self._state:
            case "name" | "tag":
                self._content.say("".join((*self._before, self._text)), pieces)
            case "content":
                begun = self._content.after_call and self._tags.call[1].startswith(self._text)
                self._content.say("" if begun else self._text, pieces)
            case "begin" | "body":
                self._close(pieces)
            case "value":
                self._argue(self._value.add(self._text), pieces)
            case _:
                pass
        self._content.end(pieces)
        self._text = ""
        return pieces

    def _outside(self, pieces: list[Piece]) -> bool:
        call, end, function = *self._tags.call, self._tags.function[0]
        found = find(self._text, (call, end, function) if function else (call, end))
        self._content.say(found.before, pieces)
        self._text = found.rest
        if found.marker is None:
            return False
        if found.marker == end:
            self._tagged = False
            if not self._content.after_call:
                self._content.say(end, pieces)
        else:
            follows = self._tagged and self._content.after_call
            self._tagged = follows or found.marker == call
            self._before = [found.marker]
            self._state = "name" if found.marker == function or not function else "tag"
        return True

    def _opened(self, pieces: list[Piece]) -> bool:
        function = self._tags.function[0]
        bare = self._text.lstrip(SPACE)
        self._before.append(self._text[: len(self._text) - len(bare)])
        self._text = bare
        if bare.startswith(function):
            self._before.append(function)
            self._text, self._state = bare[len(function) :], "name"
            return True
        if function.startswith(bare):
            return False
        return self._none(pieces)

    def _none(self, pieces: list[Piece]) -> bool:
        """What began like a call is content."""
        self._content.say("".join(self._before), pieces)
        self._state, self._tagged = "content", False
        return True

    def _named(self, pieces: list[Piece]) -> bool:
        if self._tags.name_end:
            at = self._text.find(self._tags.name_end, 0, MOST_LETTERS)
            name, rest = self._text[: max(at, 0)], self._text[at + len(self._tags.name_end) :]
        else:
            found = find(self._text[:MOST_LETTERS], (self._tags.key, self._tags.call[1]))
            at = -1 if found.marker is None else len(found.before)
            name = found.before if _BARE_NAME.fullmatch(found.before.strip(SPACE)) else ""
            rest = self._text[len(found.before) :]
        if at < 0 and len(self._text) < MOST_LETTERS:
            return False
        name = name.strip(SPACE)
        if at < 0 or not name or not (self._tagged or name in self._schemas):
            return self._none(pieces)
        self._content.call()
        self._values, self._object, self._text = 0, None, rest
        properties = self._schemas.get(name, {}).get("properties")
        self._properties = properties if isinstance(properties, dict) else {}
        pieces.append(Piece("call", name, self._calls))
        self._argue("{", pieces)
        self._state = "begin"
        return True

    def _begin(self, _pieces: list[Piece]) -> bool:
        bare = self._text.lstrip(SPACE)
        if bare[:1] == "{":
            self._object = ValueEnd()
            self._object.take("{", 0)
            self._state, bare = "object", bare[1:]
        elif bare:
            self._state = "body"
        begun, self._text = bool(bare) or self._state == "object", bare
        return begun

    def _body(self, pieces: list[Piece]) -> bool:
        found = find(self._text, self._tags.ends_of_body)
        self._text = found.rest
        self._go_on(found.marker, pieces)
        return found.marker is not None

    def _whole(self, pieces: list[Piece]) -> bool:
        """The arguments as an object, in the place of elements."""
        assert self._object is not None
        end, said = self._object.take(self._text, 0)
        self._argue(said, pieces)
        self._text = self._text[end:]
        if self._object.done:
            self._state = "body"
        return self._object.done

    def _go_on(self, marker: str | None, pieces: list[Piece]) -> None:
        """Behind a marker of the body."""
        if marker == self._tags.key:
            self._state = "key"
        elif marker is not None and marker != self._tags.value_end:
            self._close(pieces)
            self._calls += 1
            self._state = "content"
            if marker != self._tags.function[1]:  # which was forgotten, or is not there
                self._text = marker + self._text

    def _close(self, pieces: list[Piece]) -> None:
        if self._object is None:
            self._argue("}", pieces)

    def _keyed(self, _pieces: list[Piece]) -> bool:
        at = self._text.find(self._tags.key_end, 0, MOST_LETTERS)
        if at < 0:
            self._state = "key" if len(self._text) < MOST_LETTERS else "body"
            return self._state == "body"
        key, self._text = self._text[:at], self._text[at + len(self._tags.key_end) :]
        if self._tags.typed:
            key, _, self._typed = key.partition(self._tags.typed)
        self._key = key.strip(SPACE)
        self._state = "between"
        return True

    def _between(self, pieces: list[Piece]) -> bool:
        """A key and its value. A key that has none is left out."""
        value = self._tags.value
        if value:
            self._text = self._text.lstrip(SPACE)
            if not self._text.startswith(value):
                waits = value.startswith(self._text)
                self._state = "between" if waits else "body"
                return not waits
            self._text = self._text[len(value) :]
        self._argue(f"{', ' if self._values else ''}{_json(self._key)}: ", pieces)
        self._values += 1
        self._value = _Value(self._types(), self._tags.lines)
        self._state = "value"
        return True

    def _types(self) -> frozenset[str]:
        """Of the value of the key, by the schema, and by what the call says of it."""
        known = types(self._properties.get(self._key))
        if self._typed == "true" and (not known or "string" in known):
            return frozenset(("string",))
        return (known - {"string"} or known) if self._typed == "false" else known

    def _valued(self, pieces: list[Piece]) -> bool:
        found = find(self._text, self._tags.ends_of_value)
        self._text = found.rest
        self._argue(self._value.add(found.before), pieces)
        if found.marker is None:
            return False
        self._argue(self._value.end(), pieces)
        self._state = "body"
        self._go_on(found.marker.lstrip(), pieces)
        return True

    def _argue(self, text: str, pieces: list[Piece]) -> None:
        if text:
            pieces.append(Piece("arguments", text, self._calls))


class _Value:
    """Makes JSON of one value, of the `types` that its schema allows; none: nothing is known.
    `lines`: a line end before and behind it is not its own.

    A text goes on as it comes. What may be something else is known at its end.
    """

    def __init__(self, types: frozenset[str], lines: bool) -> None:
        self._types = types
        self._lines = lines
        self._only_text = types == frozenset(("string",))
        self._begun = False
        self._line = ""  # the end of a line: of the last one it does not belong to the value
        self._parts: list[str] = []

    def add(self, text: str) -> str:
        """JSON that is certain."""
        if not text:
            return ""
        opening = ""
        if not self._begun:
            self._begun = True
            text = text.removeprefix("\n") if self._lines else text
            opening = '"' * self._only_text
        text = self._line + text
        bare = text.removesuffix("\n") if self._lines else text
        self._line = text[len(bare) :]
        if self._only_text:
            return opening + _json(bare)[1:-1]
        self._parts.append(bare)
        return ""

    def end(self) -> str:
        """The rest of it."""
        if self._only_text:
            return '"' if self._begun else '""'
        text = "".join(self._parts)
        bare = text.strip(SPACE)
        found = _type(bare)
        if not found and bare[:1] in _PYTHON:
            bare = _from_python(bare)
            found = _type(bare)
        return bare if self._allows(found) else _json(text)

    def _allows(self, found: str) -> bool:
        """Whether a value of type `found` may stand for itself. Where no type fits, one that is no
        text does: its tool says better what is wrong with it."""
        if not found:
            return False
        fits = found in self._types or (found == "integer" and "number" in self._types)
        return fits or "string" not in self._types


def _type(text: str) -> str:
    """Of the value that a text is in JSON; of none or of a text that is not quoted, empty."""
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
    """A literal in JSON, where all of the text is one; else nothing."""
    value = PythonValue()
    end, said = value.take(text, 0, last=True)
    said += value.end()
    return said if value.done and not value.strange and end == len(text) else ""


def _json(value: str) -> str:
    return msgspec.json.encode(value).decode()
