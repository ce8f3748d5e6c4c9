"""JSON that arrives in parts: where a value ends, calls that are objects, inputs of custom tools.

Each character is looked at once, so the result does not depend on how the text is cut. Knows no
model.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence

import msgspec

from pipeinfer.gateway.tool_parsers.base import (
    INPUT_PARAMETER,
    WHITESPACE,
    OutputParser,
    ParsedDelta,
)
from pipeinfer.params import JsonValue

ARGUMENT_KEYS = ("arguments", "parameters")
ESCAPES = '"\\/bfnrtu'  # characters that may stand behind a backslash
NULL_WORDS = ("null", "None")


class JsonValueScanner:
    """Finds the end of a JSON value whose first character is not white space, and repairs its
    strings.

    Models write control characters into strings unescaped, and backslashes that escape nothing. The
    control characters are escaped, such backslashes doubled.

    Attributes:
    - in_string: the next character belongs to a string
    - done: the value has ended
    """

    __slots__ = ("_after_backslash", "_depth", "_in_scalar", "done", "in_string")

    def __init__(self) -> None:
        self._depth = 0
        self.in_string = self._after_backslash = self._in_scalar = self.done = False

    def feed(self, text: str, start: int) -> tuple[int, str]:
        """(index behind the value's part of `text` from `start` on, that part as JSON)."""
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
        """The JSON of a character within a string; empty if it stands for itself."""
        if self._after_backslash:
            self._after_backslash = False
            if char in ESCAPES:
                return ""
            # The backslash was returned already.
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
    """Parses a call {"name": ..., "arguments": {...}} (or "parameters"), in any order of the keys.

    Attributes:
    - state: "open", "done", or "broken" for an object that is no call
    - named: a delta with the tool's name was returned
    - consumed: all text of the object until its name was found
    - in_string: the next character belongs to a string
    """

    def __init__(self, call: int, names: Container[str] | None = None) -> None:
        """`call`: its number. `names`: of tools; None if any name will do."""
        self._call_index = call
        self._names = names
        self.state = "open"
        self.named = False
        self._consumed: list[str] = []
        self._expected = "{"  # then: key, :, value, comma
        self._key = ""
        self._value_parts: list[str] = []  # of a value that is not streamed
        self._value: JsonValueScanner | None = None
        self._streaming = False
        self._arguments_before_name: list[str] = []
        self._arguments_seen = False

    @property
    def consumed(self) -> str:
        """All of its text until it was named."""
        return "".join(self._consumed)

    @property
    def in_string(self) -> bool:
        """Whether the next character belongs to a string."""
        return self._value is not None and self._value.in_string

    def abort(self, deltas: list[ParsedDelta]) -> None:
        """No more of the object comes. If it is named, it is a call with the arguments so far."""
        self.state = "broken"
        if self.named and not self._arguments_seen:
            self._arguments_seen = True
            deltas.append(ParsedDelta("arguments", "{}", self._call_index))

    def feed(self, text: str) -> tuple[list[ParsedDelta], int]:
        """(deltas, number of characters of `text` that belong to the object)."""
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
        """A key or a value is complete. Only strings are decoded: other values may be nested deeper
        than a decoder goes.
        """
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
    """Parses the arguments, a JSON object, of call number `call`, whose name is known. Has the
    interface of CallObjectParser.
    """

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
    """The value of a JSON string; None for anything else."""
    try:
        return msgspec.json.decode(raw, type=str)
    except (msgspec.DecodeError, UnicodeError):
        return None


def _arguments_object(raw: str) -> str:
    """Arguments that are no object: the object within a string, {} for nothing, or the value
    itself.
    """
    text = "" if raw in NULL_WORDS else _decode_string(raw)
    if text is None:
        return raw if raw[0] in '["' or is_json(raw) else msgspec.json.encode(raw).decode()
    bare = text.strip(WHITESPACE)
    if not bare or bare in NULL_WORDS:
        return "{}"
    end, chunk = JsonValueScanner().feed(bare, 0)
    return chunk if bare[0] == "{" and end == len(bare) and is_json(chunk) else raw


def is_json(text: str) -> bool:
    """Whether `text` is JSON, as deep as a decoder goes."""
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError):
        return False
    except RecursionError:
        return True
    return True


# {letter behind a backslash: character}; `u`, the last of ESCAPES, has digits instead.
_SHORT_ESCAPES = dict(zip(ESCAPES, '"\\/\b\f\n\r\t', strict=False))
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # for half of a surrogate pair


class JsonStringDecoder:
    """Decodes a JSON string from behind its opening quote. `done`: the closing quote has come."""

    def __init__(self) -> None:
        self.done = False
        self._escape_so_far = ""  # an escape that has begun
        self._high_surrogate = ""  # the first half of a surrogate pair

    def feed(self, text: str) -> tuple[str, int]:
        """(decoded text that is certain, number of characters of `text` that belong to the
        string).
        """
        parts: list[str] = []
        at = 0
        while at < len(text) and not self.done:
            if self._escape_so_far:
                self._escape_so_far += text[at]
                at += 1
                self._escape(parts)
                continue
            end = min((i for i in (text.find('"', at), text.find("\\", at)) if i >= 0), default=-1)
            run = text[at:] if end < 0 else text[at:end]
            if run:
                self._emit(run, parts)
            at += len(run)
            if end >= 0:
                self.done, self._escape_so_far = text[end] == '"', "\\" * (text[end] == "\\")
                at += 1
        if self.done:
            self._emit("", parts)
        return "".join(parts), at

    def _escape(self, parts: list[str]) -> None:
        kind, digits = self._escape_so_far[1], self._escape_so_far[2:]
        if kind != "u":
            self._emit(_SHORT_ESCAPES.get(kind, kind), parts)
        elif len(digits) < 4:
            return
        else:
            self._code_unit(int(digits, 16) if _is_hex(digits) else 0xFFFD, parts)
        self._escape_so_far = ""

    def _code_unit(self, code: int, parts: list[str]) -> None:
        """A character, or one half of a surrogate pair."""
        if 0xDC00 <= code < 0xE000 and self._high_surrogate:
            both = 0x10000 + ((ord(self._high_surrogate) - 0xD800) << 10) + (code - 0xDC00)
            self._high_surrogate = ""
            parts.append(chr(both))
        elif 0xD800 <= code < 0xDC00:
            self._emit("", parts)
            self._high_surrogate = chr(code)
        else:
            self._emit(_REPLACEMENT if 0xDC00 <= code < 0xE000 else chr(code), parts)

    def _emit(self, text: str, parts: list[str]) -> None:
        if self._high_surrogate:
            parts.append(_REPLACEMENT)
            self._high_surrogate = ""
        parts.append(text)


class _InputExtractor:
    """The input of one custom tool's call, out of its JSON arguments.

    The text of {"input": "..."}, or of a string alone, is returned as it arrives. Other arguments
    are returned at their end: the input of an object that has one, else the arguments as they are.
    """

    def __init__(self) -> None:
        self._buffered: list[str] = []  # all arguments, until the text begins
        self._unmatched = ""  # text that may become the next of _START_TOKENS
        self._matched = 0  # how many of _START_TOKENS have come
        self._decoder: JsonStringDecoder | None = None

    def feed(self, text: str) -> str:
        """Input text that is certain."""
        if self._decoder is None:
            self._buffered.append(text)
            if self._matched < len(_START_TOKENS):
                self._find_start(text)
            text = self._unmatched
        return "" if self._decoder is None else self._decoder.feed(text)[0]

    def _find_start(self, text: str) -> None:
        """Looks for the begin of the text; `_matched` is beyond all tokens where there is none."""
        self._unmatched += text
        while self._matched < len(_START_TOKENS) and self._decoder is None:
            self._unmatched = self._unmatched.lstrip(WHITESPACE)
            expected = (
                '"'
                if self._matched == 0 and self._unmatched[:1] == '"'
                else _START_TOKENS[self._matched]
            )
            if not self._unmatched.startswith(expected):
                self._matched += len(_START_TOKENS) * (not expected.startswith(self._unmatched))
                return
            self._unmatched = self._unmatched[len(expected) :]
            self._matched += 1
            if expected == '"':
                self._decoder = JsonStringDecoder()

    def finish(self) -> str:
        """Input text that was buffered."""
        return "" if self._decoder is not None else _input_of("".join(self._buffered))


_START_TOKENS = ("{", f'"{INPUT_PARAMETER}"', ":", '"')


def _input_of(text: str) -> str:
    try:
        given: JsonValue = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return text
    if isinstance(given, str):
        return given
    if not isinstance(given, dict) or INPUT_PARAMETER not in given:
        return "" if given == {} else text
    chunk = given[INPUT_PARAMETER]
    return chunk if isinstance(chunk, str) else msgspec.json.encode(chunk).decode()


def _is_hex(digits: str) -> bool:
    return all(digit in "0123456789abcdefABCDEF" for digit in digits)


class CustomToolParser:
    """Turns calls of custom tools, which models make as functions of one text, into inputs.

    Stands behind `next_parser`, which parses the calls. `custom_tools`: names of the custom tools.
    """

    def __init__(self, next_parser: OutputParser, custom_tools: Container[str]) -> None:
        self._next_parser = next_parser
        self._custom_tools = custom_tools
        self._extractors: dict[int, _InputExtractor] = {}

    def feed(self, text: str) -> Sequence[ParsedDelta]:
        return list(self._translate(self._next_parser.feed(text)))

    def finish(self) -> Sequence[ParsedDelta]:
        deltas = list(self._translate(self._next_parser.finish()))
        return [*deltas, *self._finish_inputs()]

    def _translate(self, deltas: Iterable[ParsedDelta]) -> Iterator[ParsedDelta]:
        for delta in deltas:
            if delta.kind == "call":
                yield from self._finish_inputs()
                if delta.text in self._custom_tools:
                    self._extractors[delta.call_index] = _InputExtractor()
                    delta = delta._replace(kind="custom")
                yield delta
            elif delta.kind == "arguments" and delta.call_index in self._extractors:
                if chunk := self._extractors[delta.call_index].feed(delta.text):
                    yield ParsedDelta("input", chunk, delta.call_index)
            else:
                yield delta

    def _finish_inputs(self) -> Iterator[ParsedDelta]:
        """The buffered input of the last call: no call goes on behind the next one."""
        for call, extractor in self._extractors.items():
            if chunk := extractor.finish():
                yield ParsedDelta("input", chunk, call)
        self._extractors.clear()
