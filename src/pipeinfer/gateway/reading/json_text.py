"""JSON that comes in pieces: where a value ends, and a call of a tool that an object says.

Each character is looked at once, so it does not matter how the text is cut. Knows no model.
"""

from __future__ import annotations

from collections.abc import Container

import msgspec

from pipeinfer.gateway.pieces import WHITESPACE, ParsedDelta

ARGUMENT_KEYS = ("arguments", "parameters")
ESCAPES = '"\\/bfnrtu'  # what may stand behind a backslash
NULL_WORDS = ("null", "None")


class JsonValueScanner:
    """Finds the end of one JSON value whose first character is not white space.

    Models write line ends and the like into strings as they are, and backslashes that escape
    nothing. JSON has neither: such a letter is escaped, such a backslash doubled.
    """

    __slots__ = ("_after_backslash", "_depth", "_in_scalar", "done", "in_string")

    def __init__(self) -> None:
        """`quoted`: amid a string."""
        self._depth = 0
        self.in_string = self._after_backslash = self._in_scalar = self.done = False

    def feed(self, text: str, start: int) -> tuple[int, str]:
        """(up to where `text` from `start` on belongs to the value, that part of it in JSON)."""
        parts: list[str] = []
        copied, at = start, start
        while at < len(text) and not self.done:
            char = text[at]
            if self.in_string:
                if chunk := self._string_char(char):
                    parts += (text[copied:at], chunk)
                    copied = at + 1
            elif self._in_scalar:
                if char in ",]}" or char in WHITESPACE:
                    self.done = True
                    break
            else:
                self._structure_char(char)
            at += 1
        return at, "".join((*parts, text[copied:at]))

    def _string_char(self, char: str) -> str:
        """What stands in JSON for a letter of a string; empty if it may stand for itself."""
        if self._after_backslash:
            self._after_backslash = False
            if char in ESCAPES:
                return ""
            # The backslash is said already.
            return "u0027" if char == "'" else "\\" + (_escaped_control_char(char) or char)
        if char == "\\":
            self._after_backslash = True
        elif char == '"':
            self.in_string = False
            self.done = self._depth == 0
        return _escaped_control_char(char)

    def _structure_char(self, char: str) -> None:
        if char == '"':
            self.in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.done = self._depth <= 0
        elif self._depth == 0:
            self._in_scalar = True


def _escaped_control_char(char: str) -> str:
    """How JSON writes a control character; empty for others."""
    return msgspec.json.encode(char).decode()[1:-1] if char < " " else ""


class CallObjectParser:
    """Reads {"name": ..., "arguments": {...}}, or with "parameters", in any order.

    `call`: its number. `names`: of tools, None where any name will do. `state`: "open", "done", or
    "broken" for what is no such object. `named`: a piece with the call's name was given.
    """

    def __init__(self, call: int, names: Container[str] | None = None) -> None:
        self._call_index = call
        self._names = names
        self.state = "open"
        self.named = False
        self._consumed: list[str] = []
        self._expected = "{"  # then: key, :, value, comma
        self._key = ""
        self._value_parts: list[str] = []  # of the value, unless it is passed on as it comes
        self._value: JsonValueScanner | None = None
        self._streaming = False
        self._arguments_before_name: list[str] = []  # arguments from before the name
        self._arguments_seen = False

    @property
    def consumed(self) -> str:
        """All of its text until it was named."""
        return "".join(self._consumed)

    @property
    def in_string(self) -> bool:
        """Whether what comes next belongs to a string."""
        return self._value is not None and self._value.in_string

    def abort(self, deltas: list[ParsedDelta]) -> None:
        """No more of it comes. What is named is a call, with the arguments that came."""
        self.state = "broken"
        if self.named and not self._arguments_seen:
            self._arguments_seen = True
            deltas.append(ParsedDelta("arguments", "{}", self._call_index))

    def feed(self, text: str) -> tuple[list[ParsedDelta], int]:
        """(pieces, how many characters of `text` belong to the object)."""
        deltas: list[ParsedDelta] = []
        at = 0
        while at < len(text) and self.state == "open":
            at = self._next(text, at, deltas)
        if not self.named:
            self._consumed.append(text[:at])
        return deltas, at

    def _next(self, text: str, at: int, deltas: list[ParsedDelta]) -> int:
        if self._value is not None:
            return self._continue_value(text, at, deltas)
        char = text[at]
        if char in WHITESPACE:
            return at + 1
        if self._expected == "{" and char == "{":
            self._expected = "key"
        elif self._expected == ":" and char == ":":
            self._expected = "value"
        elif self._expected == "comma" and char == ",":
            self._expected = "key"
        elif self._expected in ("comma", "key") and char == "}":
            self._end_object(deltas)
        elif self._expected == "value" and char in ",}":  # there is none
            self._expected = "comma"
            return at
        elif (self._expected == "value" and char not in ":]") or (
            self._expected == "key" and char == '"'
        ):
            self._value, self._value_parts = JsonValueScanner(), []
            is_arguments = (
                self._expected == "value"
                and self._key in ARGUMENT_KEYS
                and not self._arguments_seen
            )
            self._streaming = is_arguments and char == "{"
            return at
        else:
            self.abort(deltas)
            return at
        return at + 1

    def _continue_value(self, text: str, at: int, deltas: list[ParsedDelta]) -> int:
        value = self._value
        assert value is not None
        end, chunk = value.feed(text, at)
        if self._streaming:
            self._arguments_seen = True
            self._emit_arguments(chunk, deltas)
        else:
            self._value_parts.append(chunk)
        if value.done:
            self._value = None
            self._end_value(deltas)
        return end

    def _end_value(self, deltas: list[ParsedDelta]) -> None:
        """A key or a value is there. None but texts are decoded: others may be nested deeper than
        a decoder goes."""
        if self._expected == "key":
            key = _decode_string("".join(self._value_parts))
            self._key, self._expected = key or "", ":"
            if key is None:
                self.abort(deltas)
            return
        self._expected = "comma"
        if self._key == "name":
            self._set_name(_decode_string("".join(self._value_parts)), deltas)
        elif self._key in ARGUMENT_KEYS and not self._arguments_seen:
            self._arguments_seen = True
            self._emit_arguments(_arguments_object("".join(self._value_parts)), deltas)

    def _set_name(self, name: str | None, deltas: list[ParsedDelta]) -> None:
        if not name or not name.isprintable():
            self.abort(deltas)
            return
        if self.named or (self._names is not None and name not in self._names):
            self.abort(deltas)
            return
        self.named = True
        deltas.append(ParsedDelta("call", name, self._call_index))
        self._emit_arguments("".join(self._arguments_before_name), deltas)

    def _emit_arguments(self, text: str, deltas: list[ParsedDelta]) -> None:
        if not self.named:
            self._arguments_before_name.append(text)
        elif text:
            deltas.append(ParsedDelta("arguments", text, self._call_index))

    def _end_object(self, deltas: list[ParsedDelta]) -> None:
        self.state = "done" if self.named else "broken"
        if self.named and not self._arguments_seen:
            deltas.append(ParsedDelta("arguments", "{}", self._call_index))


class CallArgumentsParser:
    """Reads the arguments of call number `call`, whose name is told already: a JSON object. Else
    the same as CallObject."""

    named = True
    consumed = ""

    def __init__(self, call: int) -> None:
        self._call_index = call
        self._value = JsonValueScanner()
        self.state = "open"

    @property
    def in_string(self) -> bool:
        return self._value.in_string

    def abort(self, _deltas: list[ParsedDelta]) -> None:
        self.state = "broken"

    def feed(self, text: str) -> tuple[list[ParsedDelta], int]:
        end, chunk = self._value.feed(text, 0)
        if self._value.done:
            self.state = "done"
        return [ParsedDelta("arguments", chunk, self._call_index)] if chunk else [], end


def _decode_string(raw: str) -> str | None:
    """What a text says that is written in JSON; None for anything else."""
    try:
        return msgspec.json.decode(raw, type=str)
    except (msgspec.DecodeError, UnicodeError):
        return None


def _arguments_object(raw: str) -> str:
    """Of arguments that are no object: an object that a text holds, none, or what they are."""
    text = "" if raw in NULL_WORDS else _decode_string(raw)
    if text is None:
        return raw if raw[0] in '["' or is_json(raw) else msgspec.json.encode(raw).decode()
    bare = text.strip(WHITESPACE)
    if not bare or bare in NULL_WORDS:
        return "{}"
    end, chunk = JsonValueScanner().feed(bare, 0)
    return chunk if bare[0] == "{" and end == len(bare) and is_json(chunk) else raw


def is_json(text: str) -> bool:
    """Whether it is JSON, as far as a decoder goes into its depth."""
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError):
        return False
    except RecursionError:
        return True
    return True
