"""Calls of custom tools, which models make as functions of one text: their input, as it stands.

Reads pieces behind a reader of calls, letter by letter. Knows no model.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence

import msgspec

from pipeinfer.gateway.pieces import INPUT_PARAMETER, WHITESPACE, OutputParser, ParsedDelta
from pipeinfer.gateway.reading.json_text import ESCAPES
from pipeinfer.json_values import JsonValue

_SHORT_ESCAPES = dict(
    zip(ESCAPES, '"\\/\b\f\n\r\t', strict=False)
)  # behind a backslash; `u` has digits
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # for a half of a letter whose other half is not there


class JsonStringDecoder:
    """A JSON string behind its opening quote, as the text that it says. `done`: it has ended."""

    def __init__(self) -> None:
        self.done = False
        self._escape_so_far = ""  # an escape that has begun
        self._high_surrogate = ""  # the first half of a letter

    def feed(self, text: str) -> tuple[str, int]:
        """(what is certain, how many letters of `text` belong to the string)."""
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
        """A letter, or half of one."""
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
    """Of one call: arguments in JSON become the text that they say.

    {"input": "..."} goes on as it comes, and so does a text that stands alone. What is otherwise is
    known at its end: the input of an object that has one, or all of it as it stands.
    """

    def __init__(self) -> None:
        self._buffered: list[str] = []  # all of it, while the text has not begun
        self._unmatched = ""  # what may become the next of _BEGIN
        self._matched = 0  # so many of them are there
        self._decoder: JsonStringDecoder | None = None

    def feed(self, text: str) -> str:
        """What is certain."""
        if self._decoder is None:
            self._buffered.append(text)
            if self._matched < len(_START_TOKENS):
                self._find_start(text)
            text = self._unmatched
        return "" if self._decoder is None else self._decoder.feed(text)[0]

    def _find_start(self, text: str) -> None:
        """Looks for the text's begin; `_begun` is beyond all where there is none."""
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
        """What was held back."""
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
    """`behind`: reads calls. Those of the tools `names` are custom ones."""

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
        """What the last call has still to say: none goes on behind the next one."""
        for call, extractor in self._extractors.items():
            if chunk := extractor.finish():
                yield ParsedDelta("input", chunk, call)
        self._extractors.clear()
