"""Answers in the harmony format of gpt-oss: messages with headers, each on a channel.

    <|channel|>analysis<|message|>thoughts<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>the answer<|return|>

The prompt ends with <|start|>assistant. A recipient may also stand before the channel. Knows no
request.
"""  # noqa: E501

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import inf
from typing import Literal

import msgspec

from pipeinfer.gateway.pieces import NEXT, SPACE, Piece
from pipeinfer.gateway.reading.held import find
from pipeinfer.gateway.reading.json_text import CallObject, decodes
from pipeinfer.gateway.reasoning_tokens import ReasoningTokens
from pipeinfer.json_values import JsonObject
from pipeinfer.text.thoughts import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START

MARKERS = (START, END, MESSAGE, CHANNEL, CONSTRAIN, RETURN, CALL)
ASSISTANT = "assistant"
FUNCTIONS = "functions."
# Tools of the format itself, which nobody runs here: what they are sent is part of the thoughts.
BUILT_IN = frozenset(("browser", "python", "container"))
EVERYBODY = frozenset(("user", "all"))  # recipients of what has no recipient
CUT_OFF = frozenset(("t", "to", "json", "code", "text"))  # words that only a header has there
LONGEST_BARE = 300  # letters that may be a header without its first marker
_TO = re.compile(r"to=([^\s{]*)")
_TO_ALONE = re.compile(r"to=\S*\s*")
_WORD = re.compile(r"\s*(\w*)")
_ROLE = re.compile(r"\s*([^\s{]*)")

Section = Literal["role", "channel", "type"]
Kind = Literal["content", "reasoning", "call", "nothing"]


class Header:
    """What stands before a message's text, by sections: the role, what follows <|channel|>, what
    follows <|constrain|>. `opened`: a marker has begun the header; text alone may be no header."""

    def __init__(self, opened: bool = False) -> None:
        self.opened = opened
        self._section: Section = "role"
        self._texts: dict[Section, list[str]] = {"role": [], "channel": [], "type": []}

    def add(self, text: str) -> None:
        self._texts[self._section].append(text)

    def turn(self, section: Section) -> None:
        """A marker begins that section."""
        self.opened, self._section = True, section
        self._texts[section].append(" ")  # what comes twice is apart

    def _text(self, section: Section) -> str:
        return "".join(self._texts[section])

    @property
    def bare(self) -> str:
        """Text that no marker has opened."""
        return "" if self.opened else self._text("role")

    @property
    def recipient(self) -> str:
        """Of the message, empty if there is none."""
        for section in ("role", "channel", "type"):
            if found := _TO.search(self._text(section)):
                return found[1]
        return ""

    @property
    def role(self) -> str:
        """Whose message it is; empty where the header leaves it open."""
        found = _ROLE.match(_TO.sub(" ", self._text("role")))
        return found[1] if found is not None else ""

    @property
    def channel(self) -> str:
        """Its name; models also write it right behind the role."""
        found = _WORD.match(_TO.sub(" ", self._text("channel")))
        return (found[1] if found is not None else "") or self.role.removeprefix(ASSISTANT)

    @property
    def unread(self) -> str:
        """What is no part of a header: text of a message whose <|message|> was forgotten."""
        parts = [_ROLE.sub("", _TO.sub(" ", self._text("role")), count=1)]
        for section in ("channel", "type"):
            parts.append(_WORD.sub("", _TO.sub(" ", self._text(section)), count=1))
        text = "".join(parts).strip(SPACE)
        return "" if text in CUT_OFF or (self.recipient and text[:1] != "{") else text


class Harmony:
    """Reads one choice. Analysis is reasoning; commentary and final are content; what is sent to a
    function is a call, and what is sent to a built-in tool is reasoning. Text outside of messages
    is content, so nothing is lost of an answer that does not keep to the format.

    Where a second message of one kind follows, a line end comes between, as a piece of its own.
    """

    def __init__(
        self,
        schemas: Mapping[str, JsonObject] | None,
        goes_on: bool = False,
        thinks: bool = True,
        shown: bool = True,
        reasoning: ReasoningTokens | None = None,
    ) -> None:
        """`schemas`: of the parameters of functions, by name; None: no calls are looked for.
        `goes_on`: the prompt ends amid a final message. `thinks`: analysis is reasoning, else it is
        content. `shown`: reasoning is not left out. `reasoning`: is told where it lies."""
        self._reasoning = reasoning or ReasoningTokens()
        self._reasoning.read = 0
        self._letters = 0  # of all text so far
        self._at = 0  # the place in the whole text of the marker or end that is being read
        self._schemas = schemas
        self._thinks = thinks
        self._shown = shown
        self._text = ""  # what may become a marker
        self._header: Header | None = None if goes_on else Header()
        self._kind: Kind = "content"  # of the message whose text comes, where there is no header
        self._begun = goes_on  # some of the message's text was said
        self._said = {"content": goes_on, "reasoning": False}
        self._calls = 0
        self._call = Arguments(0, "")

    def read(self, text: str) -> Sequence[Piece]:
        self._text += text
        self._letters += len(text)
        pieces: list[Piece] = []
        while self._text:
            found = find(self._text, MARKERS)
            if found.before:
                self._say(found.before, pieces)
            self._text = found.rest
            if found.marker is None:
                break
            self._at = self._letters - len(self._text) - len(found.marker)
            self._mark(found.marker, pieces)
        if self._header is None:  # a header's text may turn out to be a message
            self._reasoning.read = self._letters - len(self._text)
        return pieces

    def end(self) -> Sequence[Piece]:
        pieces: list[Piece] = []
        if self._text:
            self._say(self._text, pieces)
        self._text = ""
        self._at = self._letters
        self._close(pieces)
        self._reasoning.read = inf
        return pieces

    def _say(self, text: str, pieces: list[Piece]) -> None:
        """Text between markers."""
        if self._header is None:
            self._tell(text, pieces)
            return
        self._header.add(text)
        bare = self._header.bare
        if not _may_begin(bare):
            self._bare(bare, pieces)

    def _bare(self, text: str, pieces: list[Piece]) -> None:
        """A message without a header."""
        self._begin("content", "", pieces)
        self._tell(text, pieces)

    def _mark(self, marker: str, pieces: list[Piece]) -> None:
        header = self._header
        if marker in (START, END, RETURN, CALL) or (marker == CHANNEL and header is None):
            self._close(pieces)
            if marker == START:
                self._header = Header(opened=True)
                return
            header = self._header
        if header is None:
            return  # of a second <|message|> or a late <|constrain|> nothing is shown
        if marker == CHANNEL:
            header.turn("channel")
        elif marker == CONSTRAIN:
            header.turn("type")
        elif marker == MESSAGE:
            self._begin(self._kind_of(header), _function(header.recipient), pieces)
            self._note(self._at + len(MESSAGE))

    def _note(self, at: int) -> None:
        """The message's text begins there."""
        if self._kind == "reasoning":
            self._reasoning.begin(at)

    def _kind_of(self, header: Header) -> Kind:
        to, thought = header.recipient, header.channel == "analysis"
        own = not header.role or header.role.startswith(ASSISTANT)
        if not own or to == ASSISTANT:
            return "nothing"  # another's turn, which a model goes on to invent
        name = _function(to)
        known = self._schemas is not None and name in self._schemas
        if to.partition(".")[0] in BUILT_IN and not known:
            thought = True
        elif self._schemas is not None and to not in EVERYBODY and name and name.isprintable():
            return "call"
        return "reasoning" if thought and self._thinks else "content"

    def _begin(self, kind: Kind, name: str, pieces: list[Piece]) -> None:
        """The text of a message comes."""
        self._header, self._kind, self._begun = None, kind, False
        if kind == "call":
            self._call = Arguments(self._calls, name)
            self._calls += 1
            pieces += self._call.begin()

    def _tell(self, text: str, pieces: list[Piece]) -> None:
        """Text of the message."""
        kind = self._kind
        if kind == "call":
            pieces += self._call.read(text)
        elif kind == "reasoning" and not self._shown:
            return
        elif kind != "nothing" and text:
            if not self._begun and self._said[kind]:
                pieces.append(Piece(kind, "\n", NEXT))
            self._begun = self._said[kind] = True
            pieces.append(Piece(kind, text))

    def _close(self, pieces: list[Piece]) -> None:
        """Nothing comes of the message any more, or of its header."""
        header, self._header = self._header, Header()
        if header is None:
            self._reasoning.end(self._at)
            if self._kind == "call":
                pieces += self._call.end()
        elif header.bare.strip(SPACE):
            self._bare(header.bare, pieces)
            self._header = Header()
        elif unread := header.unread:
            self._begin(self._kind_of(header), _function(header.recipient), pieces)
            self._note(self._at - len(unread))
            self._tell(unread, pieces)
            self._close(pieces)


class Arguments:
    """The text of call number `call` to function `name`: its arguments, as JSON."""

    def __init__(self, call: int, name: str) -> None:
        self._object = CallObject(call)
        self._name = name
        self._held: list[str] = []  # what may be no object
        self._streams = False

    def begin(self) -> Sequence[Piece]:
        """The call's name."""
        name = msgspec.json.encode(self._name).decode()
        return self._object.feed(f'{{"name": {name}, "arguments": ')[0]

    def read(self, text: str) -> Sequence[Piece]:
        """An object comes as it is said; of all else the end must be known."""
        if not self._streams and not self._held:
            text = text.lstrip(SPACE)
            self._streams = text[:1] == "{"
        if self._streams:
            return self._object.feed(text)[0]
        if text:
            self._held.append(text)
        return ()

    def end(self) -> Sequence[Piece]:
        """All of it has come."""
        if self._streams:
            return ()
        text = "".join(self._held).strip(SPACE) or "{}"
        if not decodes(text):
            text = msgspec.json.encode(text).decode()
        return self._object.feed(text + "}")[0]


def _function(recipient: str) -> str:
    """The name of the function that is called so; models leave the namespace out at times."""
    return recipient.removeprefix(FUNCTIONS)


def _may_begin(text: str) -> bool:
    """Whether text that no marker has opened may be the begin of a header."""
    bare = text.lstrip()
    rest = bare.removeprefix(ASSISTANT).lstrip()
    begun = ASSISTANT.startswith(bare) or "to=".startswith(rest)
    return len(text) <= LONGEST_BARE and (begun or _TO_ALONE.fullmatch(rest) is not None)
