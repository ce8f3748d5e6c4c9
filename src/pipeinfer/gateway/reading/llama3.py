"""Calls as Llama 3 says them: {"name": ..., "parameters": {...}} is all that the answer is.

Several stand behind each other, with a semicolon between; <|python_tag|> may stand before them.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Literal

from pipeinfer.gateway.pieces import SPACE, Piece
from pipeinfer.gateway.reading.json_text import CallObject

TAG = "<|python_tag|>"
BETWEEN = SPACE + ";,}"  # calls; a brace too many is a slip


class Llama3:
    """An answer that does not begin with a call of one of `names` is content, to its end."""

    def __init__(self, names: Container[str]) -> None:
        self._names = names
        self._state: Literal["begin", "call", "between", "content"] = "begin"
        self._text: str = ""
        self._before: list[str] = []  # of an object: what sets it apart, the tag
        self._tagged = False  # the tag is there
        self._calls = 0
        self._object = CallObject(0, names)

    def read(self, text: str) -> Sequence[Piece]:
        self._text += text
        pieces: list[Piece] = []
        steps = {
            "begin": self._begin,
            "call": self._call,
            "between": self._between,
            "content": self._content,
        }
        while self._text and steps[self._state](pieces):
            pass
        return pieces

    def end(self) -> Sequence[Piece]:
        rest = self._text
        if self._state == "begin":
            rest = self._all(rest)
        if self._state == "call" and not self._object.named:
            rest = self._all(self._object.taken + rest)
        if self._state == "between":
            rest = ""
        self._text = ""
        return (Piece("content", rest),) if rest else ()

    def _begin(self, _pieces: list[Piece]) -> bool:
        if not self._bare(SPACE):
            return False
        if self._text[0] == "{":
            self._state = "call"
        else:
            self._state, self._text = "content", self._all(self._text)
        return True

    def _bare(self, apart: str) -> bool:
        """Puts away what sets calls apart and the tag; false while that is all."""
        if not self._tagged:
            self._strip(apart)
            if self._text.startswith(TAG):
                self._before.append(TAG)
                self._text, self._tagged = self._text[len(TAG) :], True
            elif TAG.startswith(self._text):
                return False
        if self._tagged:
            self._strip(SPACE)
        return bool(self._text)

    def _strip(self, apart: str) -> None:
        bare = self._text.lstrip(apart)
        self._before.append(self._text[: len(self._text) - len(bare)])
        self._text = bare

    def _all(self, text: str) -> str:
        """With what stood before it."""
        return "".join((*self._before, text))

    def _call(self, pieces: list[Piece]) -> bool:
        said, many = self._object.feed(self._text)
        pieces += said
        self._text = self._text[many:]
        if self._object.state == "open":
            return False
        if self._object.named:
            self._calls += 1
            self._state, self._before, self._tagged = "between", [], False
        else:
            self._text = self._all(self._object.taken + self._text)
            self._state = "content"
        return True

    def _between(self, _pieces: list[Piece]) -> bool:
        if not self._bare(BETWEEN):
            return False
        if self._text[0] == "{":
            self._state, self._object = "call", CallObject(self._calls, self._names)
            self._before = []
        else:
            self._state, self._text = "content", self._all(self._text).lstrip(BETWEEN)
        return True

    def _content(self, pieces: list[Piece]) -> bool:
        pieces.append(Piece("content", self._text))
        self._text = ""
        return False
