"""JSON that comes in pieces: where a value ends, and a call of a tool that an object says.

Each character is looked at once, so it does not matter how the text is cut. Knows no model.
"""

from __future__ import annotations

import msgspec

from pipeinfer.gateway.pieces import SPACE, Piece

ARGUMENTS = ("arguments", "parameters")


class ValueEnd:
    """Finds the end of one JSON value whose first character is not white space."""

    __slots__ = ("_closing", "_depth", "_escaped", "_scalar", "_string", "done")

    def __init__(self) -> None:
        self._depth = 0
        self._string = self._escaped = self._scalar = self.done = False
        self._closing = False

    def take(self, text: str, start: int) -> int:
        """Up to where `text` from `start` on belongs to the value."""
        for at in range(start, len(text)):
            char = text[at]
            if self._string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._string = False
                    self.done = self._depth == 0
            elif self._scalar:
                if char in ",]}" or char in SPACE:
                    self.done = True
                    return at
            elif char == '"':
                self._string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                self.done = self._depth <= 0
            elif self._depth == 0:
                self._scalar = True
            if self.done:
                return at + 1
        return len(text)


class CallObject:
    """Reads {"name": ..., "arguments": {...}}, or with "parameters", in any order.

    `state`: "open", "done", or "broken" for what is no such object. `taken`: all of its text so
    far. `named`: a piece with the call's name was given.
    """

    def __init__(self, call: int) -> None:
        self._call = call
        self.state = "open"
        self.taken = ""
        self.named = False
        self._expects = "{"  # then: key, :, value, comma
        self._key = self._raw = ""
        self._value: ValueEnd | None = None
        self._streams = False  # the arguments' text goes out as it comes
        self._early = ""  # arguments from before the name
        self._argued = False

    def feed(self, text: str) -> tuple[list[Piece], int]:
        """(pieces, how many characters of `text` belong to the object)."""
        pieces: list[Piece] = []
        at = 0
        while at < len(text) and self.state == "open":
            at = self._next(text, at, pieces)
        self.taken += text[:at]
        return pieces, at

    def _next(self, text: str, at: int, pieces: list[Piece]) -> int:
        if self._value is not None:
            return self._go_on(text, at, pieces)
        char = text[at]
        if char in SPACE:
            return at + 1
        if self._expects == "{" and char == "{":
            self._expects = "key"
        elif self._expects == ":" and char == ":":
            self._expects = "value"
        elif self._expects == "comma" and char == ",":
            self._expects = "key"
        elif self._expects in ("comma", "key") and char == "}":
            self._close(pieces)
        elif self._expects == "value" or (self._expects == "key" and char == '"'):
            self._value, self._raw = ValueEnd(), ""
            named = self._expects == "value" and self._key in ARGUMENTS
            self._streams = named and char == "{"
            return at
        else:
            self.state = "broken"
            return at
        return at + 1

    def _go_on(self, text: str, at: int, pieces: list[Piece]) -> int:
        value = self._value
        assert value is not None
        end = value.take(text, at)
        self._raw += text[at:end]
        if self._streams:
            self._argued = True
            self._argue(text[at:end], pieces)
        if value.done:
            self._value = None
            self._ended(pieces)
        return end

    def _ended(self, pieces: list[Piece]) -> None:
        """A key or a value is there, in `_raw`."""
        try:
            value = None if self._streams else msgspec.json.decode(self._raw)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.state = "broken"
            return
        if self._expects == "key":
            self._key, self._expects = str(value), ":"
            return
        self._expects = "comma"
        if self._key == "name":
            if not isinstance(value, str) or not value or self.named:
                self.state = "broken"
                return
            self.named = True
            pieces.append(Piece("call", value, self._call))
            early, self._early = self._early, ""
            self._argue(early, pieces)
        elif self._key in ARGUMENTS and not self._streams:
            self._argued = True  # a text that holds JSON, or nothing
            self._argue(value if isinstance(value, str) and value else "{}", pieces)

    def _argue(self, text: str, pieces: list[Piece]) -> None:
        if not self.named:
            self._early += text
        elif text:
            pieces.append(Piece("arguments", text, self._call))

    def _close(self, pieces: list[Piece]) -> None:
        self.state = "done" if self.named else "broken"
        if self.named and not self._argued:
            pieces.append(Piece("arguments", "{}", self._call))
