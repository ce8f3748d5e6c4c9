"""Calls of custom tools, which models make as functions of one text: their input, as it stands.

Reads pieces behind a reader of calls, letter by letter. Knows no model.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence

import msgspec

from pipeinfer.gateway.pieces import INPUT, SPACE, Piece, Reader
from pipeinfer.gateway.reading.json_text import ESCAPES
from pipeinfer.json_values import JsonValue

_SHORT = dict(zip(ESCAPES, '"\\/\b\f\n\r\t', strict=False))  # behind a backslash; `u` has digits
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # for a half of a letter whose other half is not there


class Unescaped:
    """A JSON string behind its opening quote, as the text that it says. `done`: it has ended."""

    def __init__(self) -> None:
        self.done = False
        self._waits = ""  # an escape that has begun
        self._high = ""  # the first half of a letter

    def take(self, text: str) -> tuple[str, int]:
        """(what is certain, how many letters of `text` belong to the string)."""
        parts: list[str] = []
        at = 0
        while at < len(text) and not self.done:
            if self._waits:
                self._waits += text[at]
                at += 1
                self._escape(parts)
                continue
            end = min((i for i in (text.find('"', at), text.find("\\", at)) if i >= 0), default=-1)
            run = text[at:] if end < 0 else text[at:end]
            if run:
                self._say(run, parts)
            at += len(run)
            if end >= 0:
                self.done, self._waits = text[end] == '"', "\\" * (text[end] == "\\")
                at += 1
        if self.done:
            self._say("", parts)
        return "".join(parts), at

    def _escape(self, parts: list[str]) -> None:
        kind, digits = self._waits[1], self._waits[2:]
        if kind != "u":
            self._say(_SHORT.get(kind, kind), parts)
        elif len(digits) < 4:
            return
        else:
            self._unit(int(digits, 16) if _hex(digits) else 0xFFFD, parts)
        self._waits = ""

    def _unit(self, code: int, parts: list[str]) -> None:
        """A letter, or half of one."""
        if 0xDC00 <= code < 0xE000 and self._high:
            both = 0x10000 + ((ord(self._high) - 0xD800) << 10) + (code - 0xDC00)
            self._high = ""
            parts.append(chr(both))
        elif 0xD800 <= code < 0xDC00:
            self._say("", parts)
            self._high = chr(code)
        else:
            self._say(_UNKNOWN if 0xDC00 <= code < 0xE000 else chr(code), parts)

    def _say(self, text: str, parts: list[str]) -> None:
        if self._high:
            parts.append(_UNKNOWN)
            self._high = ""
        parts.append(text)


class _Input:
    """Of one call: arguments in JSON become the text that they say.

    {"input": "..."} goes on as it comes, and so does a text that stands alone. What is otherwise is
    known at its end: the input of an object that has one, or all of it as it stands.
    """

    def __init__(self) -> None:
        self._held: list[str] = []  # all of it, while the text has not begun
        self._rest = ""  # what may become the next of _BEGIN
        self._begun = 0  # so many of them are there
        self._text: Unescaped | None = None

    def take(self, text: str) -> str:
        """What is certain."""
        if self._text is None:
            self._held.append(text)
            if self._begun < len(_BEGIN):
                self._begin(text)
            text = self._rest
        return "" if self._text is None else self._text.take(text)[0]

    def _begin(self, text: str) -> None:
        """Looks for the text's begin; `_begun` is beyond all where there is none."""
        self._rest += text
        while self._begun < len(_BEGIN) and self._text is None:
            self._rest = self._rest.lstrip(SPACE)
            expected = '"' if self._begun == 0 and self._rest[:1] == '"' else _BEGIN[self._begun]
            if not self._rest.startswith(expected):
                self._begun += len(_BEGIN) * (not expected.startswith(self._rest))
                return
            self._rest = self._rest[len(expected) :]
            self._begun += 1
            if expected == '"':
                self._text = Unescaped()

    def end(self) -> str:
        """What was held back."""
        return "" if self._text is not None else _said("".join(self._held))


_BEGIN = ("{", f'"{INPUT}"', ":", '"')


def _said(text: str) -> str:
    try:
        given: JsonValue = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return text
    if isinstance(given, str):
        return given
    if not isinstance(given, dict) or INPUT not in given:
        return "" if given == {} else text
    said = given[INPUT]
    return said if isinstance(said, str) else msgspec.json.encode(said).decode()


def _hex(digits: str) -> bool:
    return all(digit in "0123456789abcdefABCDEF" for digit in digits)


class CustomInputs:
    """`behind`: reads calls. Those of the tools `names` are custom ones."""

    def __init__(self, behind: Reader, names: Container[str]) -> None:
        self._behind = behind
        self._names = names
        self._inputs: dict[int, _Input] = {}

    def read(self, text: str) -> Sequence[Piece]:
        return list(self._translated(self._behind.read(text)))

    def end(self) -> Sequence[Piece]:
        pieces = list(self._translated(self._behind.end()))
        return [*pieces, *self._ended()]

    def _translated(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            if piece.kind == "call":
                yield from self._ended()
                if piece.text in self._names:
                    self._inputs[piece.call] = _Input()
                    piece = piece._replace(kind="custom")
                yield piece
            elif piece.kind == "arguments" and piece.call in self._inputs:
                if said := self._inputs[piece.call].take(piece.text):
                    yield Piece("input", said, piece.call)
            else:
                yield piece

    def _ended(self) -> Iterator[Piece]:
        """What the last call has still to say: none goes on behind the next one."""
        for call, one in self._inputs.items():
            if said := one.end():
                yield Piece("input", said, call)
        self._inputs.clear()
