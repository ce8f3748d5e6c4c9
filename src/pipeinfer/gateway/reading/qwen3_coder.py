"""Calls as Qwen3-Coder says them: <function=name><parameter=key>value</parameter></function>.

Values are texts; what they are in JSON, the tool's schema says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from pipeinfer.gateway.pieces import Piece
from pipeinfer.gateway.reading.content import Content
from pipeinfer.gateway.reading.held import find
from pipeinfer.json_values import JsonObject, JsonValue

TAG, END_TAG = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"


class Qwen3Coder:
    """`schemas`: of the tools' parameters, by name."""

    def __init__(self, schemas: Mapping[str, JsonObject]) -> None:
        self._schemas = schemas
        self._state: Literal["content", "name", "body", "key", "value"] = "content"
        self._text: str = ""
        self._calls = self._values = 0
        self._function = self._key = ""
        self._content = Content()

    def read(self, text: str) -> Sequence[Piece]:
        self._text += text
        pieces: list[Piece] = []
        steps = {
            "content": self._outside,
            "name": self._named,
            "body": self._body,
            "key": self._keyed,
            "value": self._valued,
        }
        while steps[self._state](pieces):
            pass
        return pieces

    def end(self) -> Sequence[Piece]:
        """A call that did not come to its end has the parameters that did."""
        pieces: list[Piece] = []
        if self._state == "name":
            self._content.say(FUNCTION + self._text, pieces)
        elif self._state == "content":
            self._content.say(self._text, pieces)
        else:
            self._close(pieces)
        self._content.end(pieces)
        self._text = ""
        return pieces

    def _outside(self, pieces: list[Piece]) -> bool:
        found = find(self._text, (TAG, END_TAG, FUNCTION))
        self._content.say(found.before, pieces)
        self._text = found.rest
        if found.marker == FUNCTION:
            self._state = "name"
        elif found.marker is not None:
            self._content.call()
        return found.marker is not None

    def _named(self, pieces: list[Piece]) -> bool:
        name, bracket, rest = self._text.partition(">")
        if not bracket:
            return False
        self._content.call()
        self._function, self._values, self._text = name.strip(), 0, rest
        pieces.append(Piece("call", self._function, self._calls))
        pieces.append(Piece("arguments", "{", self._calls))
        self._state = "body"
        return True

    def _body(self, pieces: list[Piece]) -> bool:
        found = find(self._text, (PARAMETER, END_FUNCTION))
        self._text = found.rest
        if found.marker == END_FUNCTION:
            self._close(pieces)
            self._calls += 1
            self._state = "content"
        elif found.marker is not None:
            self._state = "key"
        return found.marker is not None

    def _keyed(self, _pieces: list[Piece]) -> bool:
        key, bracket, rest = self._text.partition(">")
        if not bracket:
            return False
        self._key, self._text, self._state = key.strip(), rest, "value"
        return True

    def _valued(self, pieces: list[Piece]) -> bool:
        found = find(self._text, (END_PARAMETER,))
        if found.marker is None:
            return False
        text = found.before.removeprefix("\n").removesuffix("\n")
        value = self._value(text)
        between = ", " if self._values else ""
        member = f"{between}{_json(self._key)}: {_json(value)}"
        pieces.append(Piece("arguments", member, self._calls))
        self._values += 1
        self._text, self._state = found.rest, "body"
        return True

    def _close(self, pieces: list[Piece]) -> None:
        pieces.append(Piece("arguments", "}", self._calls))

    def _value(self, text: str) -> JsonValue:
        """A text, where the schema says so or nothing else can be read from it."""
        properties = self._schemas.get(self._function, {}).get("properties")
        schema = properties.get(self._key) if isinstance(properties, dict) else None
        kind = schema.get("type") if isinstance(schema, dict) else None
        if kind == "string":
            return text
        try:
            return msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return {"True": True, "False": False, "None": None}.get(text, text)


def _json(value: JsonValue) -> str:
    return msgspec.json.encode(value).decode()
