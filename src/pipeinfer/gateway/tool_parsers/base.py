"""What parsers of a model's output text share: parsed deltas, the search for markers, token counts.

The output text of one choice goes through a chain of parsers: reasoning, then tool calls, then
plain content. Each parser takes text as it is decoded and returns what is certain. Knows no model
and no HTTP.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Literal, NamedTuple, Protocol

from pipeinfer.params import JsonValue, ThoughtState
from pipeinfer.wire import unpack_few

WHITESPACE = " \t\r\n"  # between parts of an output

# Of calls: ours, nine letters and digits, or the function's name and the call's number.
CallIdStyle = Literal["", "short", "numbered"]
DeltaKind = Literal["content", "reasoning", "call", "arguments", "custom", "input"]
INPUT_PARAMETER = "input"  # the parameter that a custom tool's text is to the model
MESSAGE_BREAK = -2  # in place of a call's index: a new message begins here


class ParsedDelta(NamedTuple):
    """A part of a choice's output, as a parser found it.

    Attributes:
    - kind: "content", "reasoning"; "call" (a function's call begins), "arguments" (JSON text of
      it); "custom" (the call of a custom tool begins), "input" (text of it)
    - text: new text; of "call" and "custom" the tool's name
    - call_index: number of the call in the choice, from 0; -1 outside of calls; MESSAGE_BREAK where
      the text separates the next message from one of the same kind before it
    """

    kind: DeltaKind
    text: str
    call_index: int = -1


class OutputParser(Protocol):
    """A parser of one choice's output text. The deltas are the same however the text is cut."""

    def feed(self, text: str) -> Sequence[ParsedDelta]:
        """The deltas that are certain after `text`, the next part of the output."""
        ...

    def finish(self) -> Sequence[ParsedDelta]:
        """The deltas that were buffered: no more text comes."""
        ...


class ChoiceParser(OutputParser, Protocol):
    """The first parser of a choice's chain. `reasoning`: counts the choice's reasoning tokens; it
    is given the offsets of tokens before their text is fed.
    """

    @property
    def reasoning(self) -> ReasoningTokenCounter: ...


# From the state in which the prompt leaves the reasoning.
ParserFactory = Callable[[ThoughtState], ChoiceParser]


class PlainTextParser:
    """All text is content."""

    def feed(self, text: str) -> Sequence[ParsedDelta]:
        return (ParsedDelta("content", text),) if text else ()

    def finish(self) -> Sequence[ParsedDelta]:
        return ()


class ReasoningTokenCounter:
    """Counts the output tokens of one choice that are reasoning.

    A parser says where in the output text reasoning lies, the detokenizer says where each token's
    text begins. A token counts if its text begins behind the opening tag and before the closing
    tag: tags do not count, white space between them does.

    Attributes:
    - count: reasoning tokens among those whose place is certain; of all tokens at the end
    - parsed_chars: characters of the output for which the parser has decided what they are;
      infinite where no parser looks for reasoning
    """

    __slots__ = ("_offsets", "_open_start", "_span_open", "_spans", "count", "parsed_chars")

    def __init__(self) -> None:
        self.count = 0
        self.parsed_chars = inf  # until a parser of reasoning says otherwise
        self._open_start: float = 0
        self._span_open = False
        self._spans: deque[tuple[float, float]] = deque()  # of reasoning that has ended: from, to
        self._offsets: deque[int] = deque()  # of tokens that are not counted or passed over yet

    def open_span(self, at: float) -> None:
        """Reasoning begins at character `at` of the output."""
        self._open_start, self._span_open = at, True

    def close_span(self, at: float) -> None:
        """Reasoning ends before character `at`, if it has begun."""
        if self._span_open:
            self._span_open = False
            self._spans.append((self._open_start, at))

    def add_offsets(self, offsets: bytes) -> None:
        """Further tokens. `offsets`: int32 bytes, the characters of output before each token."""
        if offsets:
            self._offsets += unpack_few(offsets)

    def update_count(self) -> None:
        """Counts the tokens that begin before `parsed_chars`."""
        offsets, spans = self._offsets, self._spans
        while offsets and offsets[0] < self.parsed_chars:
            offset = offsets.popleft()
            while spans and spans[0][1] <= offset:
                spans.popleft()
            starts = spans[0][0] if spans else self._open_start if self._span_open else inf
            self.count += starts <= offset


class MarkerMatch:
    """What find_marker found.

    Attributes:
    - before: text that is certainly no part of a marker
    - marker: the first marker behind it, or None
    - tail: text behind the marker; without a marker, an end of the text that may become one
    """

    __slots__ = ("before", "marker", "tail")

    def __init__(self, before: str, marker: str | None, tail: str) -> None:
        self.before = before
        self.marker = marker
        self.tail = tail


def find_marker(text: str, markers: Sequence[str]) -> MarkerMatch:
    """The first of `markers` in `text`. No marker may be the begin of another."""
    first = min(
        ((at, marker) for marker in markers if (at := text.find(marker)) >= 0), default=None
    )
    if first is not None:
        at, marker = first
        return MarkerMatch(text[:at], marker, text[at + len(marker) :])
    begun = max(_begun(text, marker) for marker in markers)
    return MarkerMatch(text[: len(text) - begun], None, text[len(text) - begun :])


def _begun(text: str, marker: str) -> int:
    """Letters at the end of `text` that begin `marker`."""
    for many in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-many:]):
            return many
    return 0


class ContentBuffer:
    """The content around tool calls, without the white space that only separates calls.

    White space at the end of content is kept back until it is known what follows.
    """

    __slots__ = ("_no_content_since_call", "_pending_space")

    def __init__(self) -> None:
        self._pending_space: list[str] = []
        self._no_content_since_call = False

    @property
    def after_call(self) -> bool:
        """Whether only white space came since the last call."""
        return self._no_content_since_call

    def add(self, text: str, deltas: list[ParsedDelta]) -> None:
        """Adds content; appends to `deltas` what is certain."""
        if self._no_content_since_call:
            text = text.lstrip(WHITESPACE)
        if not text:
            return
        self._no_content_since_call = False
        bare = text.rstrip(WHITESPACE)
        if bare:
            deltas.append(ParsedDelta("content", "".join((*self._pending_space, bare))))
            self._pending_space = [text[len(bare) :]]
        else:
            self._pending_space.append(text)

    def start_call(self) -> None:
        """A call begins or has begun: white space before it is dropped."""
        self._pending_space, self._no_content_since_call = [], True

    def flush(self, deltas: list[ParsedDelta]) -> None:
        """The output ends: kept white space is content."""
        if pending := "".join(self._pending_space):
            deltas.append(ParsedDelta("content", pending))
        self._pending_space = []


_ANY_OF = ("anyOf", "oneOf")
_MAX_LEVELS = 8  # of choices within choices


def schema_types(schema: JsonValue, level: int = 0) -> frozenset[str]:
    """The JSON types that a schema allows, as JSON Schema names them; empty where nothing is
    known.
    """
    if not isinstance(schema, dict) or level > _MAX_LEVELS:
        return frozenset()
    given = schema.get("type")
    named = given if isinstance(given, list) else [given]
    found: set[str] = {name for name in named if isinstance(name, str)}
    for key in _ANY_OF:
        choices = schema.get(key)
        if not found and isinstance(choices, list):
            each = [schema_types(choice, level + 1) for choice in choices]
            found = {name for one in each for name in one} if all(each) else found
    options = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not found and isinstance(options, list):
        found = {"string"} if all(isinstance(option, str) for option in options) else found
    return frozenset(found)
