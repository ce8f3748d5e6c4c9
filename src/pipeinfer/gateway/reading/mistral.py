"""Calls as Mistral says them, behind [TOOL_CALLS]: a JSON list of objects, or one object, or in
newer models name[ARGS]{...}, with [TOOL_CALLS] before each.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from pipeinfer.gateway.pieces import SPACE, Piece
from pipeinfer.gateway.reading.content import Content
from pipeinfer.gateway.reading.held import find
from pipeinfer.gateway.reading.json_text import CallObject, ValueEnd

OPENING = "[TOOL_CALLS]"
MOST_BEFORE = 256  # letters between the opening and arguments: the name, an id, white space
_HEAD = re.compile(
    r"[ \t\r\n]*([a-zA-Z0-9_.-]{1,64})[ \t\r\n]*(\[CALL_ID\][^][{}]*)?(\[ARGS\][ \t\r\n]*)?"
)


class Mistral:
    """What is neither after the opening is content."""

    def __init__(self) -> None:
        self._state: Literal["content", "form", "list", "object", "name", "arguments"] = "content"
        self._text: str = ""
        # What the opening and white space behind it were, until a call comes.
        self._before: list[str] = []
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
        if self._state == "object" and not self._object.named:
            self._say(self._object.taken + self._text, pieces)
        elif self._state == "list" and not self._before:  # what sets calls apart
            self._text = ""
        elif self._state != "object" and self._state != "arguments":
            self._say(self._text, pieces)
        self._content.end(pieces)
        self._text = ""
        return pieces

    def _outside(self, pieces: list[Piece]) -> bool:
        found = find(self._text, (OPENING,))
        self._content.say(found.before, pieces)
        self._text = found.rest
        if found.marker is None:
            return False
        self._state, self._before = "form", [OPENING]
        return True

    def _form(self, _pieces: list[Piece]) -> bool:
        bare = self._text.lstrip(SPACE)
        listed = bare[:1] == "["
        begun = len(self._text) - len(bare) + listed
        self._before.append(self._text[:begun])
        self._text = self._text[begun:]
        if not bare:
            return False
        self._state = "list" if listed else "name"
        if bare[0] == "{":
            self._open()
        return True

    def _open(self) -> None:
        self._state, self._object = "object", CallObject(self._calls)

    def _list(self, pieces: list[Piece]) -> bool:
        bare = self._text.lstrip(SPACE + ",")
        apart, self._text = self._text[: len(self._text) - len(bare)], bare
        if bare[:1] == "{":
            self._open()
            return True
        if self._before:
            self._before.append(apart)
        if not bare:
            return False
        if self._before:  # nothing of the list was a call
            self._none("", pieces)
        else:  # the end of the list, or what does not belong there
            self._text = bare.removeprefix("]")
            self._state = "content"
        return True

    def _none(self, text: str, pieces: list[Piece]) -> None:
        """What came since the opening is content."""
        self._say(text, pieces)
        self._state = "content"

    def _say(self, text: str, pieces: list[Piece]) -> None:
        """`text`, and what stood before it."""
        self._content.say("".join((*self._before, text)), pieces)
        self._before = []

    def _inside(self, pieces: list[Piece]) -> bool:
        said, many = self._object.feed(self._text)
        if self._object.named and said:
            self._content.call()
            self._before = []
        pieces += said
        self._text = self._text[many:]
        if self._object.state == "open":
            return False
        if self._object.named:
            self._calls += 1
            self._state = "list"
        else:
            self._none(self._object.taken, pieces)
        return True

    def _name(self, pieces: list[Piece]) -> bool:
        """Up to the arguments; an id of the call may stand between."""
        at = self._text.find("{", 0, MOST_BEFORE)
        if at < 0 and len(self._text) < MOST_BEFORE:
            return False
        head = _HEAD.fullmatch(self._text[: max(at, 0)])
        if head is None:
            self._none("", pieces)
            return True
        self._content.call()
        self._before = []
        pieces.append(Piece("call", head[1], self._calls))
        self._state, self._value = "arguments", ValueEnd()
        self._text = self._text[at:]
        return True

    def _arguments(self, pieces: list[Piece]) -> bool:
        end, said = self._value.take(self._text, 0)
        pieces.append(Piece("arguments", said, self._calls))
        self._text = self._text[end:]
        if not self._value.done:
            return False
        self._calls += 1
        self._state = "content"
        return True
