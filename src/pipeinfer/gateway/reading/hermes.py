"""Calls as Hermes and Qwen say them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>.

Several may stand behind each other, with content before and between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pipeinfer.gateway.pieces import Piece
from pipeinfer.gateway.reading.content import Content
from pipeinfer.gateway.reading.held import find
from pipeinfer.gateway.reading.json_text import CallObject

OPENING, CLOSING = "<tool_call>", "</tool_call>"


class Hermes:
    """What is no call after its opening is content, with the opening."""

    def __init__(self) -> None:
        self._state: Literal["content", "call", "closing"] = "content"
        self._text: str = ""
        self._after: list[str] = []  # of a call, before it is closed
        self._calls = 0
        self._content = Content()
        self._object = CallObject(0)

    def read(self, text: str) -> Sequence[Piece]:
        self._text += text
        pieces: list[Piece] = []
        steps = {"content": self._outside, "call": self._inside, "closing": self._closing}
        while steps[self._state](pieces):
            pass
        return pieces

    def end(self) -> Sequence[Piece]:
        pieces: list[Piece] = []
        if self._state == "call" and not self._object.named:
            self._content.say(OPENING + self._object.taken, pieces)
        self._content.say("".join((*self._after, self._text)), pieces)
        self._content.end(pieces)
        self._text = ""
        return pieces

    def _outside(self, pieces: list[Piece]) -> bool:
        found = find(self._text, (OPENING,))
        self._content.say(found.before, pieces)
        self._text = found.rest
        if found.marker is None:
            return False
        self._open()
        return True

    def _open(self) -> None:
        self._state, self._object = "call", CallObject(self._calls)

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
            self._state = "closing"
        else:
            self._content.say(OPENING + self._object.taken, pieces)
            self._state = "content"
        return True

    def _closing(self, pieces: list[Piece]) -> bool:
        """What stands before the closing is a slip. Where another call is opened first, or nothing
        comes, it was none: the closing was forgotten."""
        found = find(self._text, (CLOSING, OPENING))
        self._after.append(found.before)
        self._text = found.rest
        if found.marker is None:
            return False
        after, self._after = "".join(self._after), []
        self._state = "content"
        if found.marker == OPENING:
            self._content.say(after, pieces)
            self._open()
        return True
