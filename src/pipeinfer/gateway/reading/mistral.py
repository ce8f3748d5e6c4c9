"""Calls as Mistral says them, behind [TOOL_CALLS]: a JSON list of objects, or in newer models
name[ARGS]{...}, with [TOOL_CALLS] before each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pipeinfer.gateway.pieces import SPACE, Piece
from pipeinfer.gateway.reading.content import Content
from pipeinfer.gateway.reading.held import find
from pipeinfer.gateway.reading.json_text import CallObject, ValueEnd

OPENING = "[TOOL_CALLS]"


class Mistral:
    """What is neither after the opening is content."""

    def __init__(self) -> None:
        self._state: Literal["content", "form", "list", "object", "name", "arguments"] = "content"
        self._text: str = ""
        self._calls = 0
        self._content = Content()
        self._object = CallObject(0)
        self._value = ValueEnd()

    def read(self, text: str) -> Sequence[Piece]:
        self._text += text
        pieces: list[Piece] = []
        steps = {
            "content": self._outside,
            "form": self._form,
            "list": self._list,
            "object": self._inside,
            "name": self._name,
            "arguments": self._arguments,
        }
        while self._text and steps[self._state](pieces):
            pass
        return pieces

    def end(self) -> Sequence[Piece]:
        pieces: list[Piece] = []
        if self._state in ("form", "name"):
            self._content.say(OPENING + self._text, pieces)
        elif self._state == "object" and not self._object.named:
            self._content.say(self._object.taken + self._text, pieces)
        elif self._state == "content":
            self._content.say(self._text, pieces)
        self._content.end(pieces)
        self._text = ""
        return pieces

    def _outside(self, pieces: list[Piece]) -> bool:
        found = find(self._text, (OPENING,))
        self._content.say(found.before, pieces)
        self._text = found.rest
        if found.marker is None:
            return False
        self._state = "form"
        return True

    def _form(self, _pieces: list[Piece]) -> bool:
        bare = self._text.lstrip(SPACE)
        if not bare:
            return False
        self._state = "list" if bare[0] == "[" else "name"
        self._text = bare[1:] if bare[0] == "[" else bare
        return True

    def _list(self, _pieces: list[Piece]) -> bool:
        self._text = self._text.lstrip(SPACE + ",")
        if not self._text:
            return False
        if self._text[0] == "{":
            self._state, self._object = "object", CallObject(self._calls)
        else:  # the end of the list, or what does not belong there
            self._text = self._text.removeprefix("]")
            self._state = "content"
        return True

    def _inside(self, pieces: list[Piece]) -> bool:
        said, many = self._object.feed(self._text)
        if self._object.named and said:
            self._content.call()
        pieces += said
        self._text = self._text[many:]
        if self._object.state == "open":
            return False
        if self._object.named:
            self._calls += 1
            self._state = "list"
        else:
            self._content.say(self._object.taken, pieces)
            self._state = "content"
        return True

    def _name(self, pieces: list[Piece]) -> bool:
        """Up to the arguments; an id of the call may stand between."""
        name, brace, rest = self._text.partition("{")
        if not brace:
            return False
        name = name.partition("[")[0].strip(SPACE)
        if not name:
            self._content.say(OPENING + self._text, pieces)
            self._text, self._state = "", "content"
            return False
        self._content.call()
        pieces.append(Piece("call", name, self._calls))
        self._state, self._value = "arguments", ValueEnd()
        self._text = brace + rest
        return True

    def _arguments(self, pieces: list[Piece]) -> bool:
        end = self._value.take(self._text, 0)
        pieces.append(Piece("arguments", self._text[:end], self._calls))
        self._text = self._text[end:]
        if not self._value.done:
            return False
        self._calls += 1
        self._state = "content"
        return True
