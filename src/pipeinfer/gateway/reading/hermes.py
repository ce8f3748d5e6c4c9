"""Calls as Hermes and Qwen say them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>.

Several may stand behind each other, with content before and between them, or within one tag.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pipeinfer.gateway.pieces import SPACE, Piece
from pipeinfer.gateway.reading.content import Content
from pipeinfer.gateway.reading.held import find
from pipeinfer.gateway.reading.json_text import CallObject

OPENING, CLOSING = "<tool_call>", "</tool_call>"
MARKERS = (OPENING, CLOSING)
SLIPS = SPACE + ",}]"  # what a model may write too much of, behind an object


class Hermes:
    """What is no call after its opening is content, with the opening."""

    def __init__(self) -> None:
        self._state: Literal["content", "call", "next", "closing"] = "content"
        self._text: str = ""
        self._before = ""  # of the object, if it is none: how it was opened
        self._after: list[str] = []  # of a call, before it is closed
        self._calls = 0
        self._content = Content()
        self._object = CallObject(0)

    def read(self, text: str) -> Sequence[Piece]:
        self._text += text
        pieces: list[Piece] = []
        steps = {
            "content": self._outside,
            "call": self._inside,
            "next": self._next,
            "closing": self._closing,
        }
        while steps[self._state](pieces):
            pass
        return pieces

    def end(self) -> Sequence[Piece]:
        pieces: list[Piece] = []
        if self._state == "content":
            self._content.say(self._text, pieces)
        elif self._state == "call":
            self._cut_off(pieces)
        else:
            begun = CLOSING.startswith(self._text)
            self._forgotten("" if begun else self._text, pieces)
        self._content.end(pieces)
        self._text = ""
        return pieces

    def _cut_off(self, pieces: list[Piece]) -> None:
        """Amid an object. The begin of a tag is a part of it only within a string."""
        if self._object.quoted or not self._object.named:
            pieces += self._object.feed(self._text)[0]
        if not self._object.named:
            self._forgotten(self._before + self._object.taken, pieces)

    def _outside(self, pieces: list[Piece]) -> bool:
        found = find(self._text, (OPENING,))
        self._content.say(found.before, pieces)
        self._text = found.rest
        if found.marker is None:
            return False
        self._open(OPENING)
        return True

    def _open(self, before: str) -> None:
        self._state, self._before, self._object = "call", before, CallObject(self._calls)

    def _inside(self, pieces: list[Piece]) -> bool:
        """A tag within a string belongs to it; elsewhere it ends the object."""
        found = find(self._text, MARKERS)
        rest = self._feed(found.before, pieces)
        if self._object.state == "open" and found.marker is not None:
            if self._object.quoted:
                rest = self._feed(found.marker, pieces)
                self._text = found.rest
                return True
            self._object.break_off(pieces)
        self._text = rest + (found.marker or "") + found.rest
        if self._object.state == "open":
            return False
        if self._object.named:
            self._calls += 1
            self._state, self._after = "next", []
        elif self._before:
            self._content.say(self._before + self._object.taken, pieces)
            self._state = "content"
        else:
            self._after.append(self._object.taken)
            self._state = "closing"
        return True

    def _feed(self, text: str, pieces: list[Piece]) -> str:
        """What of `text` is behind the object."""
        said, many = self._object.feed(text)
        if self._object.named and said:
            self._content.call()
        pieces += said
        return text[many:]

    def _next(self, _pieces: list[Piece]) -> bool:
        """Behind an object another may stand within the same tag."""
        bare = self._text.lstrip(SLIPS)
        self._after.append(self._text[: len(self._text) - len(bare)])
        self._text = bare
        if not bare:
            return False
        if bare[0] == "{":
            self._open("")
        else:
            self._state = "closing"
        return True

    def _closing(self, pieces: list[Piece]) -> bool:
        """What stands before the closing is a slip. Where another call is opened first, or nothing
        comes, it was none: the closing was forgotten."""
        found = find(self._text, MARKERS)
        self._after.append(found.before)
        self._text = found.rest
        if found.marker is None:
            return False
        if found.marker == OPENING:
            self._forgotten("", pieces)
            self._open(OPENING)
        else:
            self._state = "content"
        self._after = []
        return True

    def _forgotten(self, text: str, pieces: list[Piece]) -> None:
        """What came behind a call that is not closed, and `text`, are content, but for slips."""
        after = "".join((*self._after, text))
        self._after = []
        if after.strip(SLIPS):
            self._content.say(after, pieces)
