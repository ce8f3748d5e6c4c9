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

from pipeinfer.gateway.pieces import MESSAGE_BREAK, WHITESPACE, ParsedDelta
from pipeinfer.gateway.reading.held import find_marker
from pipeinfer.gateway.reading.json_text import CallObjectParser, is_json
from pipeinfer.gateway.reasoning_tokens import ReasoningTokenCounter
from pipeinfer.json_values import JsonObject
from pipeinfer.text.harmony import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START

MARKERS = (START, END, MESSAGE, CHANNEL, CONSTRAIN, RETURN, CALL)
ASSISTANT = "assistant"
FUNCTIONS_NAMESPACE = "functions."
# Tools of the format itself, which nobody runs here: what they are sent is part of the thoughts.
BUILT_IN_TOOLS = frozenset(("browser", "python", "container"))
BROADCAST_RECIPIENTS = frozenset(("user", "all"))  # recipients of what has no recipient
HEADER_WORDS = frozenset(("t", "to", "json", "code", "text"))  # words that only a header has there
MAX_UNMARKED_HEADER_CHARS = 300  # letters that may be a header without its first marker
_RECIPIENT = re.compile(r"to=([^\s{]*)")
_ONLY_RECIPIENT = re.compile(r"to=\S*\s*")
_WORD = re.compile(r"\s*(\w*)")
_ROLE = re.compile(r"\s*([^\s{]*)")

HeaderSection = Literal["role", "channel", "type"]
MessageKind = Literal["content", "reasoning", "call", "nothing"]


class MessageHeader:
    """What stands before a message's text, by sections: the role, what follows <|channel|>, what
    follows <|constrain|>. `opened`: a marker has begun the header; text alone may be no header."""

    def __init__(self, opened: bool = False) -> None:
        self.opened = opened
        self._section: HeaderSection = "role"
        self._texts: dict[HeaderSection, list[str]] = {"role": [], "channel": [], "type": []}

    def add(self, text: str) -> None:
        self._texts[self._section].append(text)

    def start_section(self, section: HeaderSection) -> None:
        """A marker begins that section."""
        self.opened, self._section = True, section
        self._texts[section].append(" ")  # what comes twice is apart

    def _section_text(self, section: HeaderSection) -> str:
        return "".join(self._texts[section])

    @property
    def unmarked_text(self) -> str:
        """Text that no marker has opened."""
        return "" if self.opened else self._section_text("role")

    @property
    def recipient(self) -> str:
        """Of the message, empty if there is none."""
        for section in ("role", "channel", "type"):
            if found := _RECIPIENT.search(self._section_text(section)):
                return found[1]
        return ""

    @property
    def role(self) -> str:
        """Whose message it is; empty where the header leaves it open."""
        found = _ROLE.match(_RECIPIENT.sub(" ", self._section_text("role")))
        return found[1] if found is not None else ""

    @property
    def channel(self) -> str:
        """Its name; models also write it right behind the role."""
        found = _WORD.match(_RECIPIENT.sub(" ", self._section_text("channel")))
        return (found[1] if found is not None else "") or self.role.removeprefix(ASSISTANT)

    @property
    def leftover_text(self) -> str:
        """What is no part of a header: text of a message whose <|message|> was forgotten."""
        parts = [_ROLE.sub("", _RECIPIENT.sub(" ", self._section_text("role")), count=1)]
        for section in ("channel", "type"):
            parts.append(_WORD.sub("", _RECIPIENT.sub(" ", self._section_text(section)), count=1))
        text = "".join(parts).strip(WHITESPACE)
        return "" if text in HEADER_WORDS or (self.recipient and text[:1] != "{") else text


class HarmonyParser:
    """Reads one choice. Analysis is reasoning; commentary and final are content; what is sent to a
    function is a call, and what is sent to a built-in tool is reasoning. Text outside of messages
    is content, so nothing is lost of an answer that does not keep to the format.

    Where a second message of one kind follows, a line end comes between, as a piece of its own.
    """

    def __init__(
        self,
        schemas: Mapping[str, JsonObject] | None,
        continues_message: bool = False,
        parse_reasoning: bool = True,
        include_reasoning: bool = True,
        counter: ReasoningTokenCounter | None = None,
    ) -> None:
        """`schemas`: of the parameters of functions, by name; None: no calls are looked for.
        `goes_on`: the prompt ends amid a final message. `thinks`: analysis is reasoning, else it is
        content. `shown`: reasoning is not left out. `reasoning`: is told where it lies."""
        self._counter = counter or ReasoningTokenCounter()
        self._counter.parsed_chars = 0
        self._total_chars = 0  # of all text so far
        self._marker_position = (
            0  # the place in the whole text of the marker or end that is being read
        )
        self._schemas = schemas
        self._parse_reasoning = parse_reasoning
        self._include_reasoning = include_reasoning
        self._buffer = ""  # what may become a marker
        self._header: MessageHeader | None = None if continues_message else MessageHeader()
        self._kind: MessageKind = (
            "content"  # of the message whose text comes, where there is no header
        )
        self._message_started = continues_message  # some of the message's text was said
        self._emitted_kinds = {"content": continues_message, "reasoning": False}
        self._call_count = 0
        self._arguments_parser = HarmonyArgumentsParser(0, "")

    def feed(self, text: str) -> Sequence[ParsedDelta]:
        self._buffer += text
        self._total_chars += len(text)
        deltas: list[ParsedDelta] = []
        while self._buffer:
            found = find_marker(self._buffer, MARKERS)
            if found.before:
                self._handle_text(found.before, deltas)
            self._buffer = found.tail
            if found.marker is None:
                break
            self._marker_position = self._total_chars - len(self._buffer) - len(found.marker)
            self._handle_marker(found.marker, deltas)
        if self._header is None:  # a header's text may turn out to be a message
            self._counter.parsed_chars = self._total_chars - len(self._buffer)
        return deltas

    def finish(self) -> Sequence[ParsedDelta]:
        deltas: list[ParsedDelta] = []
        if self._buffer:
            self._handle_text(self._buffer, deltas)
        self._buffer = ""
        self._marker_position = self._total_chars
        self._end_message(deltas)
        self._counter.parsed_chars = inf
        return deltas

    def _handle_text(self, text: str, deltas: list[ParsedDelta]) -> None:
        """Text between markers."""
        if self._header is None:
            self._emit(text, deltas)
            return
        self._header.add(text)
        bare = self._header.unmarked_text
        if not _may_be_header(bare):
            self._headerless_message(bare, deltas)

    def _headerless_message(self, text: str, deltas: list[ParsedDelta]) -> None:
        """A message without a header."""
        self._start_message("content", "", deltas)
        self._emit(text, deltas)

    def _handle_marker(self, marker: str, deltas: list[ParsedDelta]) -> None:
        header = self._header
        if marker in (START, END, RETURN, CALL) or (marker == CHANNEL and header is None):
            self._end_message(deltas)
            if marker == START:
                self._header = MessageHeader(opened=True)
                return
            header = self._header
        if header is None:
            return  # of a second <|message|> or a late <|constrain|> nothing is shown
        if marker == CHANNEL:
            header.start_section("channel")
        elif marker == CONSTRAIN:
            header.start_section("type")
        elif marker == MESSAGE:
            self._start_message(
                self._message_kind(header), _function_name(header.recipient), deltas
            )
            self._open_reasoning_span(self._marker_position + len(MESSAGE))

    def _open_reasoning_span(self, at: int) -> None:
        """The message's text begins there."""
        if self._kind == "reasoning":
            self._counter.open_span(at)

    def _message_kind(self, header: MessageHeader) -> MessageKind:
        to, thought = header.recipient, header.channel == "analysis"
        own = not header.role or header.role.startswith(ASSISTANT)
        if not own or to == ASSISTANT:
            return "nothing"  # another's turn, which a model goes on to invent
        name = _function_name(to)
        known = self._schemas is not None and name in self._schemas
        if to.partition(".")[0] in BUILT_IN_TOOLS and not known:
            thought = True
        elif (
            self._schemas is not None
            and to not in BROADCAST_RECIPIENTS
            and name
            and name.isprintable()
        ):
            return "call"
        return "reasoning" if thought and self._parse_reasoning else "content"

    def _start_message(self, kind: MessageKind, name: str, deltas: list[ParsedDelta]) -> None:
        """The text of a message comes."""
        self._header, self._kind, self._message_started = None, kind, False
        if kind == "call":
            self._arguments_parser = HarmonyArgumentsParser(self._call_count, name)
            self._call_count += 1
            deltas += self._arguments_parser.start()

    def _emit(self, text: str, deltas: list[ParsedDelta]) -> None:
        """Text of the message."""
        kind = self._kind
        if kind == "call":
            deltas += self._arguments_parser.feed(text)
        elif kind == "reasoning" and not self._include_reasoning:
            return
        elif kind != "nothing" and text:
            if not self._message_started and self._emitted_kinds[kind]:
                deltas.append(ParsedDelta(kind, "\n", MESSAGE_BREAK))
            self._message_started = self._emitted_kinds[kind] = True
            deltas.append(ParsedDelta(kind, text))

    def _end_message(self, deltas: list[ParsedDelta]) -> None:
        """Nothing comes of the message any more, or of its header."""
        header, self._header = self._header, MessageHeader()
        if header is None:
            self._counter.close_span(self._marker_position)
            if self._kind == "call":
                deltas += self._arguments_parser.finish()
        elif header.unmarked_text.strip(WHITESPACE):
            self._headerless_message(header.unmarked_text, deltas)
            self._header = MessageHeader()
        elif unread := header.leftover_text:
            self._start_message(
                self._message_kind(header), _function_name(header.recipient), deltas
            )
            self._open_reasoning_span(self._marker_position - len(unread))
            self._emit(unread, deltas)
            self._end_message(deltas)


class HarmonyArgumentsParser:
    """The text of call number `call` to function `name`: its arguments, as JSON."""

    def __init__(self, call: int, name: str) -> None:
        self._call_parser = CallObjectParser(call)
        self._name = name
        self._buffered: list[str] = []  # what may be no object
        self._streaming = False

    def start(self) -> Sequence[ParsedDelta]:
        """The call's name."""
        name = msgspec.json.encode(self._name).decode()
        return self._call_parser.feed(f'{{"name": {name}, "arguments": ')[0]

    def feed(self, text: str) -> Sequence[ParsedDelta]:
        """An object comes as it is said; of all else the end must be known."""
        if not self._streaming and not self._buffered:
            text = text.lstrip(WHITESPACE)
            self._streaming = text[:1] == "{"
        if self._streaming:
            return self._call_parser.feed(text)[0]
        if text:
            self._buffered.append(text)
        return ()

    def finish(self) -> Sequence[ParsedDelta]:
        """All of it has come."""
        if self._streaming:
            return ()
        text = "".join(self._buffered).strip(WHITESPACE) or "{}"
        if not is_json(text):
            text = msgspec.json.encode(text).decode()
        return self._call_parser.feed(text + "}")[0]


def _function_name(recipient: str) -> str:
    """The name of the function that is called so; models leave the namespace out at times."""
    return recipient.removeprefix(FUNCTIONS_NAMESPACE)


def _may_be_header(text: str) -> bool:
    """Whether text that no marker has opened may be the begin of a header."""
    bare = text.lstrip()
    rest = bare.removeprefix(ASSISTANT).lstrip()
    begun = ASSISTANT.startswith(bare) or "to=".startswith(rest)
    return len(text) <= MAX_UNMARKED_HEADER_CHARS and (
        begun or _ONLY_RECIPIENT.fullmatch(rest) is not None
    )
