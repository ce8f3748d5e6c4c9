"""Calls as JSON behind markers: what most models write, each with markers of its own.

    content [section] opening {"name": ..., "arguments": {...}} closing [end of section] content
    content [section] opening [{...}, {...}]                    closing [end of section] content
    content [section] opening head {...}                        closing [end of section] content

`Marks` says which of these a form has; the head holds the name, and the object behind it is the
arguments. Knows no model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipeinfer.gateway.pieces import SPACE, Piece
from pipeinfer.gateway.reading.content import Content
from pipeinfer.gateway.reading.held import Found, find
from pipeinfer.gateway.reading.json_text import NOTHING, CallArguments, CallObject

MOST_BEFORE = 256  # letters between the opening and arguments: the name, an id, white space
SLIPS = SPACE + ",}]`"  # what a model may write too much of, behind an object
SEPARATOR, ARGUMENT_BEGIN = "<｜tool▁sep｜>", "<|tool_call_argument_begin|>"  # behind names
_NAME = r"([^\s<>{}\[\]\"'｜|]{1,128}?)"


@dataclass(frozen=True)
class Marks:
    """`opening`, `closing`: around one call, or around a list of calls; without a closing, calls
    end where their JSON ends. `section`: around all calls of an answer, or nothing. `head`: of a
    call whose name stands before its arguments; its first group is the name. `objects`: calls may
    be objects with a name and arguments; `lists`: these may stand in a list."""

    opening: str
    closing: str = ""
    section: tuple[str, str] | None = None
    head: re.Pattern[str] | None = None
    objects: bool = True
    lists: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.opening, self.closing, *(self.section or ()))))

    @property
    def ends(self) -> tuple[str, ...]:
        """The markers that stand behind calls."""
        return tuple(filter(None, (self.closing, *(self.section or ())[1:])))


HERMES = Marks("<tool_call>", "</tool_call>")
MISTRAL = Marks(
    "[TOOL_CALLS]",
    head=re.compile(
        r"[ \t\r\n]*([a-zA-Z0-9_.-]{1,64})[ \t\r\n]*(\[CALL_ID\][^][{}]*)?(\[ARGS\][ \t\r\n]*)?"
    ),
    lists=True,
)
GIGACHAT3 = Marks("<|function_call|>")
GRANITE = Marks("<|tool_call|>", lists=True)
PHI4_MINI = Marks("functools", lists=True)
HUNYUAN = Marks("<tool_calls>", "</tool_calls>", lists=True)
JSON_LIST = Marks("", lists=True)
XLAM = Marks("", objects=False, lists=True)
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
DEEPSEEK_V3 = Marks(
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    _DEEPSEEK,
    re.compile(rf"\s*\w*\s*{SEPARATOR}\s*{_NAME}\s*(```\w*\s*)?"),
    objects=False,
)
DEEPSEEK_V31 = Marks(
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    _DEEPSEEK,
    re.compile(rf"\s*{_NAME}\s*{SEPARATOR}\s*(```\w*\s*)?"),
    objects=False,
)
KIMI_K2 = Marks(
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    re.compile(rf"\s*(?:functions\.)?{_NAME}(?::\d+)?\s*{re.escape(ARGUMENT_BEGIN)}\s*"),
    objects=False,
)

State = Literal["content", "section", "opened", "list", "name", "object", "next", "closing"]


class Marked:
    """What is no call after its opening is content, with the opening. `begun`: the opening stands
    before the answer."""

    def __init__(self, marks: Marks, begun: bool = False) -> None:
        self._marks = marks
        self._markers = marks.markers
        # They end JSON that is broken; without a closing nothing but JSON itself does.
        self._breaks = self._markers if marks.closing else ()
        self._state: State = "opened" if begun else "content"
        self._text: str = ""
        # What stands before a call: markers and white space. Empty, where it follows another one
        # without an opening of its own.
        self._before: list[str] = [""]
        self._behind: State = "content"  # a call
        self._after: list[str] = []  # of a call, before it is closed
        self._calls = 0
        self._content = Content()
        self._object: CallObject | CallArguments = CallObject(0)

    def read(self, text: str) -> Sequence[Piece]:
        self._text += text
        pieces: list[Piece] = []
        steps = {
            "content": self._outside,
            "section": self._section,
            "opened": self._opened,
            "list": self._list,
            "name": self._name,
            "object": self._inside,
            "next": self._next,
            "closing": self._closing,
        }
        while self._text and steps[self._state](pieces):
            pass
        return pieces

    def end(self) -> Sequence[Piece]:
        pieces: list[Piece] = []
        section = (self._marks.section or ())[1:]
        ends = section if self._state == "content" else self._marks.ends
        begun = any(end.startswith(self._text) for end in ends)
        match self._state:
            case "content":
                self._content.say("" if self._content.after_call and begun else self._text, pieces)
            case "section" | "opened" | "name":
                self._say(self._text, pieces)
            case "list" if self._before:
                self._say(self._text, pieces)
            case "object":
                self._cut_off(pieces)
            case "next" | "closing":
                self._forgotten("" if begun else self._text, pieces)
            case _:
                pass
        self._content.end(pieces)
        self._text = ""
        return pieces

    # ------------------------------------------------------------------------------- before a call

    def _outside(self, pieces: list[Piece]) -> bool:
        if not self._marks.opening:
            self._content.say(self._text, pieces)
            self._text = ""
            return False
        found = find(self._text, (self._marks.opening, *(self._marks.section or ())))
        self._content.say(found.before, pieces)
        self._text = found.rest
        if found.marker is not None:
            self._met(found.marker, pieces)
        return found.marker is not None

    def _met(self, marker: str, pieces: list[Piece]) -> None:
        """A marker outside of a call. The end of a section that has no calls is content."""
        self._state = "content"
        if marker == self._marks.opening:
            self._state, self._before = "opened", [marker]
        elif marker not in self._marks.ends:
            self._state, self._before = "section", [marker]
        elif not self._content.after_call:
            self._content.say(marker, pieces)

    def _section(self, pieces: list[Piece]) -> bool:
        """A call must follow."""
        bare = self._put_away(SPACE)
        opening = self._marks.opening
        if bare.startswith(opening):
            self._before.append(opening)
            self._text, self._state = bare[len(opening) :], "opened"
        elif opening.startswith(bare):
            return False
        else:
            self._none("", pieces)
        return True

    def _opened(self, pieces: list[Piece]) -> bool:
        bare = self._put_away(SPACE)
        if not bare:
            return False
        if bare[0] == "{" and self._marks.objects:
            self._open()
        elif bare[0] == "[" and self._marks.lists:
            self._before.append("[")
            self._text, self._state = bare[1:], "list"
        elif self._marks.head is not None:
            self._state = "name"
        else:
            self._none("", pieces)
        return True

    def _put_away(self, apart: str) -> str:
        """The text without what sets calls apart, which is kept in case that none comes."""
        bare = self._text.lstrip(apart)
        if self._before:
            self._before.append(self._text[: len(self._text) - len(bare)])
        self._text = bare
        return bare

    def _none(self, text: str, pieces: list[Piece]) -> None:
        """What came since the opening is content."""
        self._say(text, pieces)
        self._state = "content"

    def _say(self, text: str, pieces: list[Piece]) -> None:
        """`text`, and what stood before it."""
        self._content.say("".join((*self._before, text)), pieces)
        self._before = []

    # -------------------------------------------------------------------------------------- a call

    def _open(self) -> None:
        self._state, self._object = "object", CallObject(self._calls)
        self._behind = "next" if self._marks.closing else "list"

    def _list(self, pieces: list[Piece]) -> bool:
        bare = self._put_away(SPACE + ",")
        if not bare:
            return False
        if bare[0] == "{":
            self._open()
        elif self._before:  # nothing of the list was a call
            self._none("", pieces)
        else:  # the end of the list, or what does not belong there
            self._text = bare.removeprefix("]")
            self._state = "closing" if self._marks.closing else "content"
        return True

    def _inside(self, pieces: list[Piece]) -> bool:
        """A marker within a string belongs to it; elsewhere it ends the object."""
        found = find(self._text, self._breaks) if self._breaks else Found(self._text, None, "")
        rest = self._fed(found.before, pieces)
        if self._object.state == "open" and found.marker is not None:
            if self._object.quoted:
                self._text = self._fed(found.marker, pieces) + found.rest
                return True
            self._object.break_off(pieces)
        self._text = rest + (found.marker or "") + found.rest
        if self._object.state == "open":
            return False
        if self._object.named:
            self._called()
        elif self._before or not self._marks.closing:
            self._none(self._object.taken, pieces)
        else:
            self._after.append(self._object.taken)
            self._state = "closing"
        return True

    def _fed(self, text: str, pieces: list[Piece]) -> str:
        """What of `text` is behind the object."""
        said, many = self._object.feed(text)
        if self._object.named and said:
            self._content.call()
            self._before = []
        pieces += said
        return text[many:]

    def _called(self) -> None:
        """A call has ended."""
        self._calls += 1
        self._state, self._after = self._behind, []

    def _name(self, pieces: list[Piece]) -> bool:
        """Up to the arguments, or up to the closing where there are none."""
        head, closing = self._marks.head, self._marks.closing
        assert head is not None
        ends = [at for mark in ("{", closing) if mark and (at := self._text.find(mark)) >= 0]
        at = min(ends, default=MOST_BEFORE)
        if at >= MOST_BEFORE and len(self._text) < MOST_BEFORE:
            return False
        said = self._text[:at]
        if closing and not self._text.startswith("{", at):
            said = _without_nothing(said)
        found = head.fullmatch(said) if at < MOST_BEFORE else None
        if found is None:
            self._none("", pieces)
            return True
        self._content.call()
        self._before = []
        pieces.append(Piece("call", found[1], self._calls))
        self._text = self._text[at:]
        self._state, self._object = "object", CallArguments(self._calls)
        self._behind = "next" if closing else "content"
        if not self._text.startswith("{"):
            pieces.append(Piece("arguments", "{}", self._calls))
            self._called()
        return True

    def _cut_off(self, pieces: list[Piece]) -> None:
        """Amid an object. The begin of a marker is a part of it only within a string."""
        if self._object.quoted or not self._object.named or not self._breaks:
            pieces += self._object.feed(self._text)[0]
        if not self._object.named and self._before:
            self._say(self._object.taken, pieces)
        elif not self._object.named:
            self._forgotten(self._object.taken, pieces)

    # ------------------------------------------------------------------------------- behind a call

    def _next(self, _pieces: list[Piece]) -> bool:
        """Behind an object another may stand between the same markers."""
        bare = self._text.lstrip(SLIPS)
        self._after.append(self._text[: len(self._text) - len(bare)])
        self._text = bare
        if not bare:
            return False
        if bare[0] == "{" and self._marks.objects:
            self._open()
        else:
            self._state = "closing"
        return True

    def _closing(self, pieces: list[Piece]) -> bool:
        """What stands before the closing is a slip. Where another call is opened first, or nothing
        comes, it was none: the closing was forgotten."""
        found = find(self._text, self._markers)
        self._after.append(found.before)
        self._text = found.rest
        if found.marker is None:
            return False
        if found.marker in self._marks.ends:
            self._state, self._after = "content", []
        else:
            self._forgotten("", pieces)
            self._met(found.marker, pieces)
        return True

    def _forgotten(self, text: str, pieces: list[Piece]) -> None:
        """What came behind a call that is not closed, and `text`, are content, but for slips."""
        after = "".join((*self._after, text))
        self._after = []
        if after.strip(SLIPS):
            self._content.say(after, pieces)


def _without_nothing(text: str) -> str:
    """Where a head ends without an object, what stands in its place for no arguments."""
    bare = text.rstrip(SLIPS)
    word = next((word for word in NOTHING if bare.endswith(word)), "")
    return bare.removesuffix(word)
