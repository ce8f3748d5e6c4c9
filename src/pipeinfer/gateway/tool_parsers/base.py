"""Common parts of the parsers of a model's output text, and the parsers of reasoning.

The output text of one choice goes through a chain of parsers: reasoning, then tool calls, then
plain content. Each parser takes text as it is decoded and returns what is certain.

- ParsedDelta, OutputParser: what a parser returns, and what a parser is.
- find_marker, ContentBuffer: text that may be the beginning of a marker is held back.
- ReasoningParser, AnswerTagParser: reasoning between tags, and content between answer tags.

Knows no model and no HTTP.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Literal, NamedTuple, Protocol

from pipeinfer.params import JsonValue, ReasoningState
from pipeinfer.text import ReasoningTags
from pipeinfer.wire import unpack_few

WHITESPACE = " \t\r\n"  # between parts of an output

# Ids of calls: "call_" and a hash, nine letters and digits, or the function's name and a number.
CallIdStyle = Literal["", "short", "numbered"]
DeltaKind = Literal["content", "reasoning", "call", "arguments", "custom", "input"]
INPUT_PARAMETER = "input"  # the one parameter of a custom tool's function, its text
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


# Makes a parser from the state of reasoning at the end of the prompt.
ParserFactory = Callable[[ReasoningState], ChoiceParser]


class PlainTextParser:
    """All text is content."""

    def feed(self, text: str) -> Sequence[ParsedDelta]:
        return (ParsedDelta("content", text),) if text else ()

    def finish(self) -> Sequence[ParsedDelta]:
        return ()


class ReasoningTokenCounter:
    """Counts the output tokens of one choice that are reasoning.

    A parser gives the places of reasoning in the output text, the detokenizer the place where each
    token's text begins. A token counts if its text begins behind the opening tag and before the
    closing tag: tags do not count, white space between them does.

    Attributes:
    - count: reasoning tokens among those whose place is certain; of all tokens at the end
    - parsed_chars: characters of the output for which the parser has decided what they are;
      infinite where no parser looks for reasoning
    """

    __slots__ = ("_offsets", "_open_start", "_span_open", "_spans", "count", "parsed_chars")

    def __init__(self) -> None:
        self.count = 0
        self.parsed_chars = inf  # until there is a reasoning parser
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
        """Adds the offsets of further tokens. `offsets`: int32 bytes, the characters of output
        before each token."""
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
    """The result of find_marker.

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
    """The first of `markers` in `text`. No marker may be the beginning of another one."""
    first, found = len(text), None
    for marker in markers:
        if 0 <= (at := text.find(marker)) < first:
            first, found = at, marker
    if found is not None:
        return MarkerMatch(text[:first], found, text[first + len(found) :])
    begun = max([_begun(text, marker) for marker in markers])
    return MarkerMatch(text[: len(text) - begun], None, text[len(text) - begun :])


def _begun(text: str, marker: str) -> int:
    """Characters at the end of `text` that begin `marker`."""
    at = text.find(marker[0], max(len(text) - len(marker) + 1, 0))
    while at >= 0:
        if marker.startswith(text[at:]):
            return len(text) - at
        at = text.find(marker[0], at + 1)
    return 0


class ContentBuffer:
    """The content around tool calls, without the white space that only separates calls.

    White space at the end of content is buffered until a call, more content or the end follows.
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
        """The output ends: buffered white space is content."""
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


class ReasoningParser:
    """Reasoning between a model's tags, at the begin of the output."""

    def __init__(
        self,
        next_parser: OutputParser,
        tags: ReasoningTags,
        opened_by_prompt: bool,
        include_reasoning: bool = True,
        strip_answer: bool = False,
        counter: ReasoningTokenCounter | None = None,
    ) -> None:
        """Arguments:
        - next_parser: parses what follows the reasoning
        - tags: opening and closing tag
        - opened_by_prompt: the prompt ends behind the opening tag
        - include_reasoning: reasoning is returned, without white space at either end; else dropped
        - strip_answer: white space before the answer is not part of it
        - counter: gets the places of reasoning in the output text
        """
        self._counter = counter or ReasoningTokenCounter()
        self._counter.parsed_chars = 0
        self._total_chars = 0  # of all text so far
        self._next_parser = next_parser
        self._tags = tags
        self._opened_by_prompt = opened_by_prompt
        self._include_reasoning = include_reasoning
        self._strip_answer = strip_answer
        self._state: Literal["begin", "reasoning", "space", "answer"] = "begin"
        self._buffer: str = ""
        self._leading_space: list[str] = []  # white space before anything else
        self._pending_space: list[str] = []  # white space after reasoning
        self._emitted = False

    @property
    def _buffer_start(self) -> int:
        """The position in the whole output at which the buffered text begins, in characters."""
        return self._total_chars - len(self._buffer)

    def feed(self, text: str) -> Sequence[ParsedDelta]:
        self._buffer += text
        self._total_chars += len(text)
        deltas: list[ParsedDelta] = []
        steps = {
            "begin": self._find_opening,
            "reasoning": self._find_closing,
            "space": self._skip_space,
            "answer": self._feed_answer,
        }
        while self._buffer and steps[self._state](deltas):
            pass
        if self._state != "begin":
            self._counter.parsed_chars = self._buffer_start
        return deltas

    def finish(self) -> Sequence[ParsedDelta]:
        deltas: list[ParsedDelta] = []
        if self._state == "begin" and self._opened_by_prompt:
            self._state = "reasoning"
            self._counter.open_span(0)
        if self._state == "reasoning":
            self._emit_reasoning(self._buffer, deltas)
        elif self._state == "begin":
            deltas += self._next_parser.feed(self._answer_text(self._buffer))
        self._buffer = ""
        self._counter.parsed_chars = inf
        return (*deltas, *self._next_parser.finish())

    def _find_opening(self, _deltas: list[ParsedDelta]) -> bool:
        bare, opening = self._buffer.lstrip(WHITESPACE), self._tags.opening
        self._leading_space.append(self._buffer[: len(self._buffer) - len(bare)])
        self._buffer = bare
        if bare.startswith(opening):
            self._buffer, self._state = bare[len(opening) :], "reasoning"
            self._counter.open_span(self._buffer_start)
        elif opening.startswith(bare):
            return False
        elif self._opened_by_prompt:
            self._state = "reasoning"
            self._counter.open_span(0)
        else:
            self._buffer, self._state = self._answer_text(bare), "answer"
        return True

    def _answer_text(self, bare: str) -> str:
        """An answer without reasoning that begins with `bare`, with the white space before it."""
        return bare if self._strip_answer else "".join((*self._leading_space, bare))

    def _find_closing(self, deltas: list[ParsedDelta]) -> bool:
        found = find_marker(self._buffer, (self._tags.closing,))
        self._emit_reasoning(found.before, deltas)
        self._buffer = found.tail
        if found.marker is None:
            return False
        self._counter.close_span(self._buffer_start - len(found.marker))
        self._state = "space"
        return True

    def _emit_reasoning(self, text: str, deltas: list[ParsedDelta]) -> None:
        if not self._emitted:
            text = text.lstrip(WHITESPACE)
        bare = text.rstrip(WHITESPACE)
        if bare:
            if self._include_reasoning:
                deltas.append(ParsedDelta("reasoning", "".join((*self._pending_space, bare))))
            self._pending_space, self._emitted = [text[len(bare) :]], True
        elif text:
            self._pending_space.append(text)

    def _skip_space(self, _deltas: list[ParsedDelta]) -> bool:
        self._buffer = self._buffer.lstrip(WHITESPACE)
        if self._buffer:
            self._state = "answer"
        return bool(self._buffer)

    def _feed_answer(self, deltas: list[ParsedDelta]) -> bool:
        deltas += self._next_parser.feed(self._buffer)
        self._buffer = ""
        return False


class AnswerTagParser:
    """Removes the tags around an answer; the text between them goes to the next parser.

    Output that does not begin with the `opening` tag is passed on as it is.
    """

    def __init__(self, next_parser: OutputParser, opening: str, closing: str) -> None:
        self._next_parser = next_parser
        self._opening = opening
        self._closing = closing
        self._state: Literal["begin", "space", "inside", "over", "bare"] = "begin"
        self._buffer = ""
        self._pending_space: list[str] = []  # white space that may stand before the closing tag

    def feed(self, text: str) -> Sequence[ParsedDelta]:
        self._buffer += text
        if self._state == "begin":
            self._find_opening()
        if self._state == "space":
            self._buffer = self._buffer.lstrip(WHITESPACE)
            self._state = "inside" if self._buffer else "space"
        if self._state == "inside":
            return self._feed_inside()
        return self._feed_tail() if self._state in ("over", "bare") else ()

    def finish(self) -> Sequence[ParsedDelta]:
        if self._state == "begin":
            self._state = "bare"
        inside = "".join((*self._pending_space, self._buffer)) if self._state == "inside" else ""
        deltas_after = self._next_parser.feed(inside) if inside else self._feed_tail()
        return (*deltas_after, *self._next_parser.finish())

    def _find_opening(self) -> None:
        bare = self._buffer.lstrip(WHITESPACE)
        if bare.startswith(self._opening):
            self._buffer, self._state = bare[len(self._opening) :], "space"
        elif not self._opening.startswith(bare):
            self._state = "bare"

    def _feed_inside(self) -> Sequence[ParsedDelta]:
        found = find_marker(self._buffer, (self._closing,))
        self._buffer, bare = found.tail, found.before.rstrip(WHITESPACE)
        deltas: list[ParsedDelta] = []
        if bare:
            deltas += self._next_parser.feed("".join((*self._pending_space, bare)))
            self._pending_space = []
        self._pending_space.append(found.before[len(bare) :])
        if found.marker is not None:
            self._pending_space, self._state = [], "over"
            deltas += self._feed_tail()
        return deltas

    def _feed_tail(self) -> Sequence[ParsedDelta]:
        """Text behind the closing tag without the white space before it; or all of an untagged
        answer.
        """
        text, self._buffer = self._buffer, ""
        if self._state == "over":
            text = text.lstrip(WHITESPACE)
            self._state = "bare" if text else "over"
        return self._next_parser.feed(text) if text else ()
