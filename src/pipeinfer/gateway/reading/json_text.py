"""JSON that comes in pieces: where a value ends, and a call of a tool that an object says.

Each character is looked at once, so it does not matter how the text is cut. Knows no model.
"""

from __future__ import annotations

from collections.abc import Container

import msgspec

from pipeinfer.gateway.pieces import SPACE, Piece

ARGUMENTS = ("arguments", "parameters")
ESCAPES = '"\\/bfnrtu'  # what may stand behind a backslash
NOTHING = ("null", "None")


class ValueEnd:
    """Finds the end of one JSON value whose first character is not white space.

    Models write line ends and the like into strings as they are, and backslashes that escape
    nothing. JSON has neither: such a letter is escaped, such a backslash doubled.
    """

    __slots__ = ("_depth", "_escaped", "_scalar", "done", "quoted")

    def __init__(self) -> None:
        """`quoted`: amid a string."""
        self._depth = 0
        self.quoted = self._escaped = self._scalar = self.done = False

    def take(self, text: str, start: int) -> tuple[int, str]:
        """(up to where `text` from `start` on belongs to the value, that part of it in JSON)."""
        parts: list[str] = []
        copied, at = start, start
        while at < len(text) and not self.done:
            char = text[at]
            if self.quoted:
                if said := self._in_string(char):
                    parts += (text[copied:at], said)
                    copied = at + 1
            elif self._scalar:
                if char in ",]}" or char in SPACE:
                    self.done = True
                    break
            else:
                self._outside(char)
            at += 1
        return at, "".join((*parts, text[copied:at]))

    def _in_string(self, char: str) -> str:
        """What stands in JSON for a letter of a string; empty if it may stand for itself."""
        if self._escaped:
            self._escaped = False
            if char in ESCAPES:
                return ""
            # The backslash is said already.
            return "u0027" if char == "'" else "\\" + (_control(char) or char)
        if char == "\\":
            self._escaped = True
        elif char == '"':
            self.quoted = False
            self.done = self._depth == 0
        return _control(char)

    def _outside(self, char: str) -> None:
        if char == '"':
            self.quoted = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.done = self._depth <= 0
        elif self._depth == 0:
            self._scalar = True


def _control(char: str) -> str:
    """How JSON writes a control character; empty for others."""
    return msgspec.json.encode(char).decode()[1:-1] if char < " " else ""


class CallObject:
    """Reads {"name": ..., "arguments": {...}}, or with "parameters", in any order.

    `call`: its number. `names`: of tools, None where any name will do. `state`: "open", "done", or
    "broken" for what is no such object. `named`: a piece with the call's name was given.
    """

    def __init__(self, call: int, names: Container[str] | None = None) -> None:
        self._call = call
        self._names = names
        self.state = "open"
        self.named = False
        self._taken: list[str] = []
        self._expects = "{"  # then: key, :, value, comma
        self._key = ""
        self._raw: list[str] = []  # of the value, unless it is passed on as it comes
        self._value: ValueEnd | None = None
        self._streams = False
        self._early: list[str] = []  # arguments from before the name
        self._argued = False

    @property
    def taken(self) -> str:
        """All of its text until it was named."""
        return "".join(self._taken)

    @property
    def quoted(self) -> bool:
        """Whether what comes next belongs to a string."""
        return self._value is not None and self._value.quoted

    def break_off(self, pieces: list[Piece]) -> None:
        """No more of it comes. What is named is a call, with the arguments that came."""
        self.state = "broken"
        if self.named and not self._argued:
            self._argued = True
            pieces.append(Piece("arguments", "{}", self._call))

    def feed(self, text: str) -> tuple[list[Piece], int]:
        """(pieces, how many characters of `text` belong to the object)."""
        pieces: list[Piece] = []
        at = 0
        while at < len(text) and self.state == "open":
            at = self._next(text, at, pieces)
        if not self.named:
            self._taken.append(text[:at])
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
        elif self._expects == "value" and char in ",}":  # there is none
            self._expects = "comma"
            return at
        elif (self._expects == "value" and char not in ":]") or (
            self._expects == "key" and char == '"'
        ):
            self._value, self._raw = ValueEnd(), []
            argues = self._expects == "value" and self._key in ARGUMENTS and not self._argued
            self._streams = argues and char == "{"
            return at
        else:
            self.break_off(pieces)
            return at
        return at + 1

    def _go_on(self, text: str, at: int, pieces: list[Piece]) -> int:
        value = self._value
        assert value is not None
        end, said = value.take(text, at)
        if self._streams:
            self._argued = True
            self._argue(said, pieces)
        else:
            self._raw.append(said)
        if value.done:
            self._value = None
            self._ended(pieces)
        return end

    def _ended(self, pieces: list[Piece]) -> None:
        """A key or a value is there. None but texts are decoded: others may be nested deeper than
        a decoder goes."""
        if self._expects == "key":
            key = _text("".join(self._raw))
            self._key, self._expects = key or "", ":"
            if key is None:
                self.break_off(pieces)
            return
        self._expects = "comma"
        if self._key == "name":
            self._name(_text("".join(self._raw)), pieces)
        elif self._key in ARGUMENTS and not self._argued:
            self._argued = True
            self._argue(_arguments("".join(self._raw)), pieces)

    def _name(self, name: str | None, pieces: list[Piece]) -> None:
        if not name or not name.isprintable():
            self.break_off(pieces)
            return
        if self.named or (self._names is not None and name not in self._names):
            self.break_off(pieces)
            return
        self.named = True
        pieces.append(Piece("call", name, self._call))
        self._argue("".join(self._early), pieces)

    def _argue(self, text: str, pieces: list[Piece]) -> None:
        if not self.named:
            self._early.append(text)
        elif text:
            pieces.append(Piece("arguments", text, self._call))

    def _close(self, pieces: list[Piece]) -> None:
        self.state = "done" if self.named else "broken"
        if self.named and not self._argued:
            pieces.append(Piece("arguments", "{}", self._call))


class CallArguments:
    """Reads the arguments of call number `call`, whose name is told already: a JSON object. Else
    the same as CallObject."""

    named = True
    taken = ""

    def __init__(self, call: int) -> None:
        self._call = call
        self._value = ValueEnd()
        self.state = "open"

    @property
    def quoted(self) -> bool:
        return self._value.quoted

    def break_off(self, _pieces: list[Piece]) -> None:
        self.state = "broken"

    def feed(self, text: str) -> tuple[list[Piece], int]:
        end, said = self._value.take(text, 0)
        if self._value.done:
            self.state = "done"
        return [Piece("arguments", said, self._call)] if said else [], end


def _text(raw: str) -> str | None:
    """What a text says that is written in JSON; None for anything else."""
    try:
        return msgspec.json.decode(raw, type=str)
    except (msgspec.DecodeError, UnicodeError):
        return None


def _arguments(raw: str) -> str:
    """Of arguments that are no object: an object that a text holds, none, or what they are."""
    text = "" if raw in NOTHING else _text(raw)
    if text is None:
        return raw if raw[0] in '["' or decodes(raw) else msgspec.json.encode(raw).decode()
    bare = text.strip(SPACE)
    if not bare or bare in NOTHING:
        return "{}"
    end, said = ValueEnd().take(bare, 0)
    return said if bare[0] == "{" and end == len(bare) and decodes(said) else raw


def decodes(text: str) -> bool:
    """Whether it is JSON, as far as a decoder goes into its depth."""
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError):
        return False
    except RecursionError:
        return True
    return True
