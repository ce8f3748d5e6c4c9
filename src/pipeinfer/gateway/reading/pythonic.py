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

from pipeinfer.gateway.pieces import SPACE, Piece
from pipeinfer.gateway.reading.content import Content
from pipeinfer.gateway.reading.held import find
from pipeinfer.gateway.reading.python_text import Behind, PythonValue

MOST_LETTERS = 256  # from a bracket to the first value
NAME = r"[\w.-]{1,128}"  # of a function
KEY = r"[^\s()\[\]{}<>,:;=\"'`]{1,128}"  # of an argument
SLIPS = SPACE + ",;"  # what may stand behind a call, before another one

# Behind a parenthesis or comma: the end, or a name and the begin of its value.
_FIRST = rf"(?:(?P<end>\))|(?P<key>{KEY})\s*=\s*(?=[^=\s]))"
_HEAD = re.compile(rf"\s*(?P<name>{NAME})\s*\(\s*{_FIRST}")
_HEAD_BEGUN = re.compile(rf"\s*(?:{NAME}(?:\s*(?:\(\s*(?:{KEY}\s*(?:=\s*)?)?)?)?)?")
_CALLED = re.compile(rf"\s*({NAME})\s*\(")
_NEXT = re.compile(rf"\s*{_FIRST}")
_NEXT_BEGUN = re.compile(rf"\s*(?:{KEY}\s*(?:=\s*)?)?")
# Behind the value of an argument. More than one letter is asked for, since a text may hold quotes
# that nobody escaped.
_BEHIND = Behind(
    re.compile(rf"\s*(?:,\s*(?:{KEY}\s*=|\))|\)\s*(?:[,;\]<]|{NAME}\s*\())"),
    re.compile(rf"\s*(?:,\s*(?:{KEY}\s*)?|\)\s*(?:{NAME}\s*)?)?"),
)


@dataclass(frozen=True)
class CallList:
    """`around`: tags of all calls; without them calls stand in a list whose first function is one
    of the tools. `brackets`: they stand in a list. `between`: what sets them apart."""

    around: tuple[str, str] = ("", "")
    brackets: bool = True
    between: str = ", "

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(filter(None, self.around))


PYTHONIC = CallList()
LFM2 = CallList(("<|tool_call_start|>", "<|tool_call_end|>"))
OLMO3 = CallList(("<function_calls>", "</function_calls>"), brackets=False, between="\n")

State = Literal["content", "opened", "head", "value", "behind", "key", "next"]


class Pythonic:
    """What is no call behind an opening is content, with the opening. A call whose arguments are
    no literals with names ends there, and its arguments are not closed."""

    def __init__(self, style: CallList, names: Container[str]) -> None:
        self._style = style
        self._names = names
        self._state: State = "content"
        self._text: str = ""
        self._last = False  # no more text comes
        self._before: list[str] = []  # of the first call
        self._calls = 0
        self._value = PythonValue(_BEHIND)
        self._content = Content()

    def read(self, text: str) -> Sequence[Piece]:
        self._text += text
        pieces: list[Piece] = []
        steps = {
            "content": self._outside,
            "opened": self._opened,
            "head": self._head,
            "value": self._valued,
            "behind": self._behind,
            "key": self._keyed,
            "next": self._next,
        }
        while self._text and steps[self._state](pieces):
            pass
        return pieces

    def end(self) -> Sequence[Piece]:
        """A call that is cut off is not closed, so that nobody takes its arguments for whole
        ones."""
        self._last = True
        pieces = list(self.read(""))
        closing = self._style.around[1]
        begun = self._content.after_call and closing.startswith(self._text)
        if self._state in ("content", "opened", "head") and not begun:
            self._none(self._text, pieces)
        self._content.end(pieces)
        self._text = ""
        return pieces

    # ------------------------------------------------------------------------------- before a call

    def _outside(self, pieces: list[Piece]) -> bool:
        opening, closing = self._style.around
        found = find(self._text, (opening, closing) if opening else ("[",))
        self._content.say(found.before, pieces)
        self._text = found.rest
        if found.marker is None:
            return False
        if found.marker != closing:
            self._before = [found.marker]
            self._state = "opened" if opening else "head"
        elif not self._content.after_call:
            self._content.say(closing, pieces)
        return True

    def _opened(self, _pieces: list[Piece]) -> bool:
        bare = self._text.lstrip(SPACE)
        many = len(self._text) - len(bare) + bare.startswith("[")
        self._before.append(self._text[:many])
        self._text = self._text[many:]
        if bare:
            self._state = "head"
        return True

    def _none(self, text: str, pieces: list[Piece]) -> None:
        """What came since the opening is content."""
        self._content.say("".join((*self._before, text)), pieces)
        self._state, self._before = "content", []

    def _head(self, pieces: list[Piece]) -> bool:
        """From a name to its first argument."""
        ahead = self._text[:MOST_LETTERS]
        found, named = _HEAD.match(ahead), _CALLED.match(ahead)
        first = bool(self._before)
        if named is not None and first and not self._style.markers and named[1] not in self._names:
            found = None
        elif found is None and len(ahead) < MOST_LETTERS and _HEAD_BEGUN.fullmatch(ahead):
            return False
        if found is None:
            self._none("", pieces)
            return True
        self._before = []
        self._content.call()
        pieces.append(Piece("call", found["name"], self._calls))
        self._argue("{", pieces)
        self._argument(found, "", pieces)
        return True

    # -------------------------------------------------------------------------------------- a call

    def _argument(self, found: re.Match[str], apart: str, pieces: list[Piece]) -> None:
        self._text = self._text[found.end() :]
        if found["end"]:
            self._close(pieces)
            return
        self._argue(f"{apart}{msgspec.json.encode(found['key']).decode()}: ", pieces)
        self._state, self._value = "value", PythonValue(_BEHIND)

    def _close(self, pieces: list[Piece]) -> None:
        self._argue("}", pieces)
        self._calls += 1
        self._state = "next"

    def _broken(self) -> bool:
        """The rest is no part of the call."""
        self._calls += 1
        self._state = "content"
        return True

    def _argue(self, text: str, pieces: list[Piece]) -> None:
        if text:
            pieces.append(Piece("arguments", text, self._calls))

    def _valued(self, pieces: list[Piece]) -> bool:
        end, said = self._value.take(self._text, 0, self._last)
        self._argue(said, pieces)
        self._text = self._text[end:]
        if self._value.broken:
            return self._broken()
        if self._value.done:
            self._state = "behind"
        return self._value.done

    def _behind(self, pieces: list[Piece]) -> bool:
        self._text = self._text.lstrip(SPACE)
        if not self._text:
            return False
        char = self._text[0]
        if char not in ",)":
            return self._broken()
        self._text = self._text[1:]
        if char == ",":
            self._state = "key"
        else:
            self._close(pieces)
        return True

    def _keyed(self, pieces: list[Piece]) -> bool:
        ahead = self._text[:MOST_LETTERS]
        found = _NEXT.match(ahead)
        if found is not None:
            self._argument(found, ", ", pieces)
        elif len(ahead) < MOST_LETTERS and _NEXT_BEGUN.fullmatch(ahead):
            return False
        else:
            self._broken()
        return True

    def _next(self, pieces: list[Piece]) -> bool:
        """Behind a call: another one, or the end of all."""
        self._text = self._text.lstrip(SLIPS)
        closing = self._style.around[1]
        if not closing:
            if self._text.startswith("]"):
                self._text, self._state = self._text[1:], "content"
            elif self._text:
                self._state = "head"
            return bool(self._text)
        if self._text[:1] in ("[", "]"):
            self._text = self._text[1:]
        elif self._text.startswith(closing):
            self._text, self._state = self._text[len(closing) :], "content"
        elif closing.startswith(self._text):
            return False
        else:
            self._state = "head"
        return True
