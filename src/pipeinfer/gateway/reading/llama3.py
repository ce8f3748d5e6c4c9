"""Calls as Llama 3 says them: {"name": ..., "parameters": {...}} is all that the answer is.

Several stand behind each other, with a semicolon between; <|python_tag|> may stand before them.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Literal

from pipeinfer.gateway.pieces import WHITESPACE, ParsedDelta
from pipeinfer.gateway.reading.json_text import CallObjectParser

PYTHON_TAG = "<|python_tag|>"
BETWEEN_CALLS = WHITESPACE + ";,}"  # calls; a brace too many is a slip


class Llama3Parser:
    """An answer that does not begin with a call of one of `names` is content, to its end."""

    def __init__(self, names: Container[str]) -> None:
        self._names = names
        self._state: Literal["begin", "call", "between", "content"] = "begin"
        self._buffer: str = ""
        self._prefix: list[str] = []  # of an object: what sets it apart, the tag
        self._tag_seen = False  # the tag is there
        self._call_count = 0
        self._call_parser = CallObjectParser(0, names)

    def feed(self, text: str) -> Sequence[ParsedDelta]:
        self._buffer += text
        deltas: list[ParsedDelta] = []
        steps = {
            "begin": self._expect_first_call,
            "call": self._feed_call,
            "between": self._expect_call,
            "content": self._emit_content,
        }
        while self._buffer and steps[self._state](deltas):
            pass
        return deltas

    def finish(self) -> Sequence[ParsedDelta]:
        rest = self._buffer
        if self._state == "begin":
            rest = self._with_prefix(rest)
        if self._state == "call" and not self._call_parser.named:
            rest = self._with_prefix(self._call_parser.consumed + rest)
        if self._state == "between":
            rest = ""
        self._buffer = ""
        return (ParsedDelta("content", rest),) if rest else ()

    def _expect_first_call(self, _deltas: list[ParsedDelta]) -> bool:
        if not self._skip_prefix(WHITESPACE):
            return False
        if self._buffer[0] == "{":
            self._state = "call"
        else:
            self._state, self._buffer = "content", self._with_prefix(self._buffer)
        return True

    def _skip_prefix(self, apart: str) -> bool:
        """Puts away what sets calls apart and the tag; false while that is all."""
        if not self._tag_seen:
            self._strip(apart)
            if self._buffer.startswith(PYTHON_TAG):
                self._prefix.append(PYTHON_TAG)
                self._buffer, self._tag_seen = self._buffer[len(PYTHON_TAG) :], True
            elif PYTHON_TAG.startswith(self._buffer):
                return False
        if self._tag_seen:
            self._strip(WHITESPACE)
        return bool(self._buffer)

    def _strip(self, apart: str) -> None:
        bare = self._buffer.lstrip(apart)
        self._prefix.append(self._buffer[: len(self._buffer) - len(bare)])
        self._buffer = bare

    def _with_prefix(self, text: str) -> str:
        """With what stood before it."""
        return "".join((*self._prefix, text))

    def _feed_call(self, deltas: list[ParsedDelta]) -> bool:
        parsed, consumed = self._call_parser.feed(self._buffer)
        deltas += parsed
        self._buffer = self._buffer[consumed:]
        if self._call_parser.state == "open":
            return False
        if self._call_parser.named:
            self._call_count += 1
            self._state, self._prefix, self._tag_seen = "between", [], False
        else:
            self._buffer = self._with_prefix(self._call_parser.consumed + self._buffer)
            self._state = "content"
        return True

    def _expect_call(self, _deltas: list[ParsedDelta]) -> bool:
        if not self._skip_prefix(BETWEEN_CALLS):
            return False
        if self._buffer[0] == "{":
            self._state, self._call_parser = "call", CallObjectParser(self._call_count, self._names)
            self._prefix = []
        else:
            self._state, self._buffer = (
                "content",
                self._with_prefix(self._buffer).lstrip(BETWEEN_CALLS),
            )
        return True

    def _emit_content(self, deltas: list[ParsedDelta]) -> bool:
        deltas.append(ParsedDelta("content", self._buffer))
        self._buffer = ""
        return False
