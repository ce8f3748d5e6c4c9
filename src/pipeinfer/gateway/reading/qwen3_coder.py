"""Calls as Qwen3-Coder says them: <function=name><parameter=key>value</parameter></function>.

Values are texts; what they are in JSON, the tool's schema says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from pipeinfer.gateway.pieces import SPACE, Piece
from pipeinfer.gateway.reading.content import Content
from pipeinfer.gateway.reading.held import find
from pipeinfer.gateway.reading.json_text import ValueEnd
from pipeinfer.gateway.reading.schema_types import types
from pipeinfer.json_values import JsonObject, JsonValue

TAG, END_TAG = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
# Models forget ends. A line's begin is asked for, since texts may hold such tags.
ENDS_OF_VALUE = (END_PARAMETER, "\n" + PARAMETER, "\n" + END_FUNCTION, "\n" + END_TAG)
ENDS_OF_BODY = (PARAMETER, END_FUNCTION, END_TAG, TAG, FUNCTION)
MOST_LETTERS = 256  # of a name
_PYTHONS = {"True": "true", "False": "false", "None": "null"}

State = Literal["content", "tag", "name", "begin", "body", "object", "key", "value"]


class Qwen3Coder:
    """`schemas`: of the tools' parameters, by name. Models forget <tool_call>, too: what is called
    without it must be one of the tools, for answers may speak of <function=...>."""

    def __init__(self, schemas: Mapping[str, JsonObject]) -> None:
        self._schemas = schemas
        self._state: State = "content"
        self._text: str = ""
        self._before: list[str] = []  # of a name, if it is none: the tags
        self._calls = self._values = 0
        self._properties: JsonObject = {}
        self._content = Content()
        self._value = _Value(frozenset())
        self._object: ValueEnd | None = None  # of a call whose parameters are no elements

    def read(self, text: str) -> Sequence[Piece]:
        self._text += text
        pieces: list[Piece] = []
        steps = {
            "content": self._outside,
            "tag": self._tagged,
            "name": self._named,
            "begin": self._begin,
            "body": self._body,
            "object": self._whole,
            "key": self._keyed,
            "value": self._valued,
        }
        while steps[self._state](pieces):
            pass
        return pieces

    def end(self) -> Sequence[Piece]:
        """A call without an end is closed; one that is cut off amid a value is not, so that nobody
        takes its arguments for whole ones."""
        pieces: list[Piece] = []
        if self._state == "name" or self._state == "tag":
            self._content.say("".join((*self._before, self._text)), pieces)
        elif self._state == "content":
            begun = self._content.after_call and END_TAG.startswith(self._text)
            self._content.say("" if begun else self._text, pieces)
        elif self._state == "begin" or self._state == "body":
            self._close(pieces)
        elif self._state == "value":
            self._argue(self._value.add(self._text), pieces)
        self._content.end(pieces)
        self._text = ""
        return pieces

    def _outside(self, pieces: list[Piece]) -> bool:
        found = find(self._text, (TAG, END_TAG, FUNCTION))
        self._content.say(found.before, pieces)
        self._text = found.rest
        if found.marker == FUNCTION:
            self._state, self._before = "name", [FUNCTION]
        elif found.marker == TAG:
            self._state, self._before = "tag", [TAG]
        elif found.marker is not None and not self._content.after_call:
            self._content.say(found.marker, pieces)
        return found.marker is not None

    def _tagged(self, pieces: list[Piece]) -> bool:
        bare = self._text.lstrip(SPACE)
        self._before.append(self._text[: len(self._text) - len(bare)])
        self._text = bare
        if bare.startswith(FUNCTION):
            self._before.append(FUNCTION)
            self._text, self._state = bare[len(FUNCTION) :], "name"
            return True
        if FUNCTION.startswith(bare):
            return False
        return self._none(pieces)

    def _none(self, pieces: list[Piece]) -> bool:
        """What began like a call is content."""
        self._content.say("".join(self._before), pieces)
        self._state = "content"
        return True

    def _named(self, pieces: list[Piece]) -> bool:
        at = self._text.find(">", 0, MOST_LETTERS)
        if at < 0 and len(self._text) < MOST_LETTERS:
            return False
        name, rest = self._text[: max(at, 0)].strip(), self._text[at + 1 :]
        if not name or (self._before == [FUNCTION] and name not in self._schemas):
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
        found = find(self._text, ENDS_OF_BODY)
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
        if marker == PARAMETER:
            self._state = "key"
        elif marker is not None and marker != END_PARAMETER:
            self._close(pieces)
            self._calls += 1
            self._state = "content"
            if marker != END_FUNCTION:  # which was forgotten
                self._text = marker + self._text

    def _close(self, pieces: list[Piece]) -> None:
        if self._object is None:
            self._argue("}", pieces)

    def _keyed(self, pieces: list[Piece]) -> bool:
        at = self._text.find(">", 0, MOST_LETTERS)
        if at < 0:
            self._state = "key" if len(self._text) < MOST_LETTERS else "body"
            return self._state == "body"
        key, rest = self._text[:at].strip(), self._text[at + 1 :]
        self._argue(f"{', ' if self._values else ''}{_json(key)}: ", pieces)
        self._values += 1
        self._value = _Value(types(self._properties.get(key)))
        self._text, self._state = rest, "value"
        return True

    def _valued(self, pieces: list[Piece]) -> bool:
        found = find(self._text, ENDS_OF_VALUE)
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

    A text goes on as it comes. What may be something else is known at its end.
    """

    def __init__(self, types: frozenset[str]) -> None:
        self._types = types
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
            text = text.removeprefix("\n")
            opening = '"' * self._only_text
        text = self._line + text
        bare = text.removesuffix("\n")
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
        written = _PYTHONS.get(bare, bare)
        return written if self._allows(_type(written)) else _json(text)

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


def _json(value: str) -> str:
    return msgspec.json.encode(value).decode()
