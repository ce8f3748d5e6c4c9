"""Calls as Python writes them, whose arguments are literals with names:

    [get_weather(city="Wien", days=3), now()]
    <|tool_call_start|>[get_weather(city="Wien", days=3), now()]<|tool_call_end|>
    <function_calls>get_weather(city="Wien", days=3)
    now()</function_calls>

Nothing is evaluated. `CallList` says which of these a form has. Knows no model.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from pipeinfer.gateway.pieces import WHITESPACE, ParsedDelta
from pipeinfer.gateway.reading.content import ContentBuffer
from pipeinfer.gateway.reading.held import find_marker
from pipeinfer.gateway.reading.python_text import Lookahead, PythonLiteralParser

MAX_HEAD_CHARS = 256  # from a bracket to the first value
FUNCTION_NAME = r"[\w.-]{1,128}"  # of a function
ARGUMENT_NAME = r"[^\s()\[\]{}<>,:;=\"'`]{1,128}"  # of an argument
BETWEEN_PYTHON_CALLS = WHITESPACE + ",;"  # what may stand behind a call, before another one

# Behind a parenthesis or comma: the end, or a name and the begin of its value.
_FIRST = rf"(?:(?P<end>\))|(?P<key>{ARGUMENT_NAME})\s*=\s*(?=[^=\s]))"
_HEAD = re.compile(rf"\s*(?P<name>{FUNCTION_NAME})\s*\(\s*{_FIRST}")
_HEAD_PARTIAL = re.compile(
    rf"\s*(?:{FUNCTION_NAME}(?:\s*(?:\(\s*(?:{ARGUMENT_NAME}\s*(?:=\s*)?)?)?)?)?"
)
_CALLED = re.compile(rf"\s*({FUNCTION_NAME})\s*\(")
_NEXT = re.compile(rf"\s*{_FIRST}")
_NEXT_PARTIAL = re.compile(rf"\s*(?:{ARGUMENT_NAME}\s*(?:=\s*)?)?")
# Behind the value of an argument. More than one letter is asked for, since a text may hold quotes
# that nobody escaped.
_AFTER_ARGUMENT = Lookahead(
    re.compile(rf"\s*(?:,\s*(?:{ARGUMENT_NAME}\s*=|\))|\)\s*(?:[,;\]<]|{FUNCTION_NAME}\s*\())"),
    re.compile(rf"\s*(?:,\s*(?:{ARGUMENT_NAME}\s*)?|\)\s*(?:{FUNCTION_NAME}\s*)?)?"),
)


@dataclass(frozen=True)
class PythonicFormat:
    """`around`: tags of all calls; without them calls stand in a list whose first function is one
    of the tools. `brackets`: they stand in a list. `between`: what sets them apart."""

    tags: tuple[str, str] = ("", "")
    brackets: bool = True
    separator: str = ", "

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(filter(None, self.tags))


PYTHONIC = PythonicFormat()
LFM2 = PythonicFormat(("<|tool_call_start|>", "<|tool_call_end|>"))
OLMO3 = PythonicFormat(("<function_calls>", "</function_calls>"), brackets=False, separator="\n")

PythonicState = Literal["content", "opened", "head", "value", "behind", "key", "next"]


class PythonicParser:
    """What is no call behind an opening is content, with the opening. A call whose arguments are
    no literals with names ends there, and its arguments are not closed."""

    def __init__(self, format: PythonicFormat, names: Container[str]) -> None:
        self._format = format
        self._names = names
        self._state: PythonicState = "content"
        self._buffer: str = ""
        self._no_more_text = False  # no more text comes
        self._prefix: list[str] = []  # of the first call
        self._call_count = 0
        self._value = PythonLiteralParser(_AFTER_ARGUMENT)
        self._content_buffer = ContentBuffer()

    def feed(self, text: str) -> Sequence[ParsedDelta]:
        self._buffer += text
        deltas: list[ParsedDelta] = []
        steps = {
            "content": self._find_opening,
            "opened": self._skip_bracket,
            "head": self._parse_head,
            "value": self._feed_value,
            "behind": self._after_value,
            "key": self._parse_key,
            "next": self._after_call,
        }
        while self._buffer and steps[self._state](deltas):
            pass
        return deltas

    def finish(self) -> Sequence[ParsedDelta]:
        """A call that is cut off is not closed, so that nobody takes its arguments for whole
        ones."""
        self._no_more_text = True
        deltas = list(self.feed(""))
        closing = self._format.tags[1]
        begun = self._content_buffer.after_call and closing.startswith(self._buffer)
        if self._state in ("content", "opened", "head") and not begun:
            self._not_a_call(self._buffer, deltas)
        self._content_buffer.flush(deltas)
        self._buffer = ""
        return deltas

    # ------------------------------------------------------------------------------- before a call

    def _find_opening(self, deltas: list[ParsedDelta]) -> bool:
        opening, closing = self._format.tags
        found = find_marker(self._buffer, (opening, closing) if opening else ("[",))
        self._content_buffer.add(found.before, deltas)
        self._buffer = found.tail
        if found.marker is None:
            return False
        if found.marker != closing:
            self._prefix = [found.marker]
            self._state = "opened" if opening else "head"
        elif not self._content_buffer.after_call:
            self._content_buffer.add(closing, deltas)
        return True

    def _skip_bracket(self, _deltas: list[ParsedDelta]) -> bool:
        bare = self._buffer.lstrip(WHITESPACE)
        skipped = len(self._buffer) - len(bare) + bare.startswith("[")
        self._prefix.append(self._buffer[:skipped])
        self._buffer = self._buffer[skipped:]
        if bare:
            self._state = "head"
        return True

    def _not_a_call(self, text: str, deltas: list[ParsedDelta]) -> None:
        """What came since the opening is content."""
        self._content_buffer.add("".join((*self._prefix, text)), deltas)
        self._state, self._prefix = "content", []

    def _parse_head(self, deltas: list[ParsedDelta]) -> bool:
        """From a name to its first argument."""
        ahead = self._buffer[:MAX_HEAD_CHARS]
        found, named = _HEAD.match(ahead), _CALLED.match(ahead)
        first = bool(self._prefix)
        if named is not None and first and not self._format.markers and named[1] not in self._names:
            found = None
        elif found is None and len(ahead) < MAX_HEAD_CHARS and _HEAD_PARTIAL.fullmatch(ahead):
            return False
        if found is None:
            self._not_a_call("", deltas)
            return True
        self._prefix = []
        self._content_buffer.start_call()
        deltas.append(ParsedDelta("call", found["name"], self._call_count))
        self._emit_arguments("{", deltas)
        self._start_argument(found, "", deltas)
        return True

    # -------------------------------------------------------------------------------------- a call

    def _start_argument(self, found: re.Match[str], apart: str, deltas: list[ParsedDelta]) -> None:
        self._buffer = self._buffer[found.end() :]
        if found["end"]:
            self._end_call(deltas)
            return
        self._emit_arguments(f"{apart}{msgspec.json.encode(found['key']).decode()}: ", deltas)
        self._state, self._value = "value", PythonLiteralParser(_AFTER_ARGUMENT)

    def _end_call(self, deltas: list[ParsedDelta]) -> None:
        self._emit_arguments("}", deltas)
        self._call_count += 1
        self._state = "next"

    def _break_call(self) -> bool:
        """The rest is no part of the call."""
        self._call_count += 1
        self._state = "content"
        return True

    def _emit_arguments(self, text: str, deltas: list[ParsedDelta]) -> None:
        if text:
            deltas.append(ParsedDelta("arguments", text, self._call_count))

    def _feed_value(self, deltas: list[ParsedDelta]) -> bool:
        end, chunk = self._value.feed(self._buffer, 0, self._no_more_text)
        self._emit_arguments(chunk, deltas)
        self._buffer = self._buffer[end:]
        if self._value.broken:
            return self._break_call()
        if self._value.done:
            self._state = "behind"
        return self._value.done

    def _after_value(self, deltas: list[ParsedDelta]) -> bool:
        self._buffer = self._buffer.lstrip(WHITESPACE)
        if not self._buffer:
            return False
        char = self._buffer[0]
        if char not in ",)":
            return self._break_call()
        self._buffer = self._buffer[1:]
        if char == ",":
            self._state = "key"
        else:
            self._end_call(deltas)
        return True

    def _parse_key(self, deltas: list[ParsedDelta]) -> bool:
        ahead = self._buffer[:MAX_HEAD_CHARS]
        found = _NEXT.match(ahead)
        if found is not None:
            self._start_argument(found, ", ", deltas)
        elif len(ahead) < MAX_HEAD_CHARS and _NEXT_PARTIAL.fullmatch(ahead):
            return False
        else:
            self._break_call()
        return True

    def _after_call(self, deltas: list[ParsedDelta]) -> bool:
        """Behind a call: another one, or the end of all."""
        self._buffer = self._buffer.lstrip(BETWEEN_PYTHON_CALLS)
        closing = self._format.tags[1]
        if not closing:
            if self._buffer.startswith("]"):
                self._buffer, self._state = self._buffer[1:], "content"
            elif self._buffer:
                self._state = "head"
            return bool(self._buffer)
        if self._buffer[:1] in ("[", "]"):
            self._buffer = self._buffer[1:]
        elif self._buffer.startswith(closing):
            self._buffer, self._state = self._buffer[len(closing) :], "content"
        elif closing.startswith(self._buffer):
            return False
        else:
            self._state = "head"
        return True
