"""Tool calls as JSON, behind markers of each model's own, or as all of the output (Llama 3):

    content [section] opening {"name": ..., "arguments": {...}} closing [end of section] content
    content [section] opening [{...}, {...}]                    closing [end of section] content
    content [section] opening header {...}                      closing [end of section] content

JsonCallMarkers says which of these a format has; the header holds the name, and the object behind
it is the arguments. The grammar of each format stands behind its parser. Knows no model.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pipeinfer.gateway.tool_parsers.base import (
    WHITESPACE,
    ContentBuffer,
    MarkerMatch,
    ParsedDelta,
    find_marker,
)
from pipeinfer.gateway.tool_parsers.grammars import (
    ANY_TEXT,
    CallGrammar,
    GrammarRequest,
    call_object,
    call_schema,
    json_arguments,
    optional_text,
    quoted,
    repeated,
    rule,
    sequence,
    start_rule,
    tagged_calls,
)
from pipeinfer.gateway.tool_parsers.partial_json import (
    NULL_WORDS,
    CallArgumentsParser,
    CallObjectParser,
)

MAX_HEADER_CHARS = 256  # characters between the opening and arguments: the name, an id, white space
IGNORED_AFTER_CALL = WHITESPACE + ",}]`"  # surplus characters that models write behind an object
DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"  # between type and name, or behind the name
KIMI_ARGUMENT_BEGIN = "<|tool_call_argument_begin|>"  # behind the name
_NAME = r"([^\s<>{}\[\]\"'｜|]{1,128}?)"


@dataclass(frozen=True)
class JsonCallMarkers:
    """The markers of one format of JSON calls.

    Attributes:
    - opening: before a call, or a list of calls
    - closing: behind it; empty where calls end with their JSON
    - section: (opening, closing) around all calls of an answer, or None
    - header: matches what stands between opening and arguments; group 1 is the name. None where
      calls are objects with their name inside
    - objects: calls may be objects with a name and arguments
    - lists: such objects may stand in a list
    """

    opening: str
    closing: str = ""
    section: tuple[str, str] | None = None
    header: re.Pattern[str] | None = None
    objects: bool = True
    lists: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.opening, self.closing, *(self.section or ()))))

    @property
    def end_markers(self) -> tuple[str, ...]:
        """The markers behind calls."""
        return tuple(filter(None, (self.closing, *(self.section or ())[1:])))


HERMES = JsonCallMarkers("<tool_call>", "</tool_call>")
MISTRAL = JsonCallMarkers(
    "[TOOL_CALLS]",
    header=re.compile(
        r"[ \t\r\n]*([a-zA-Z0-9_.-]{1,64})[ \t\r\n]*(\[CALL_ID\][^][{}]*)?(\[ARGS\][ \t\r\n]*)?"
    ),
    lists=True,
)
GIGACHAT3 = JsonCallMarkers("<|function_call|>")
GRANITE = JsonCallMarkers("<|tool_call|>", lists=True)
PHI4_MINI = JsonCallMarkers("functools", lists=True)
HUNYUAN = JsonCallMarkers("<tool_calls>", "</tool_calls>", lists=True)
JSON_LIST = JsonCallMarkers("", lists=True)
XLAM = JsonCallMarkers("", objects=False, lists=True)
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
DEEPSEEK_V3 = JsonCallMarkers(
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    _DEEPSEEK,
    re.compile(rf"\s*\w*\s*{DEEPSEEK_SEPARATOR}\s*{_NAME}\s*(```\w*\s*)?"),
    objects=False,
)
DEEPSEEK_V31 = JsonCallMarkers(
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    _DEEPSEEK,
    re.compile(rf"\s*{_NAME}\s*{DEEPSEEK_SEPARATOR}\s*(```\w*\s*)?"),
    objects=False,
)
KIMI_K2 = JsonCallMarkers(
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    re.compile(rf"\s*(?:functions\.)?{_NAME}(?::\d+)?\s*{re.escape(KIMI_ARGUMENT_BEGIN)}\s*"),
    objects=False,
)

JsonCallState = Literal["content", "section", "opened", "list", "name", "object", "next", "closing"]


class JsonCallParser:
    """Parses calls that are JSON behind markers. Text behind an opening that is no call is content,
    with the opening.
    """

    def __init__(self, markers: JsonCallMarkers, opened: bool = False) -> None:
        """`opened`: the opening stands before the answer, in the prompt."""
        self._format = markers
        self._markers = markers.markers
        # Markers that end broken JSON. In a format without a closing only the JSON ends itself.
        self._breaking_markers = self._markers if markers.closing else ()
        self._state: JsonCallState = "opened" if opened else "content"
        self._buffer: str = ""
        # Markers and white space before a call. Empty for a call that follows another one without
        # an opening.
        self._prefix: list[str] = [""]
        self._state_after_call: JsonCallState = "content"
        self._suffix: list[str] = []  # text behind a call, before its closing
        self._call_count = 0
        self._content_buffer = ContentBuffer()
        self._call_parser: CallObjectParser | CallArgumentsParser = CallObjectParser(0)

    def feed(self, text: str) -> Sequence[ParsedDelta]:
        self._buffer += text
        deltas: list[ParsedDelta] = []
        steps = {
            "content": self._find_opening,
            "section": self._expect_call_in_section,
            "opened": self._expect_call,
            "list": self._next_in_list,
            "name": self._parse_header,
            "object": self._feed_object,
            "next": self._after_object,
            "closing": self._find_closing,
        }
        while self._buffer and steps[self._state](deltas):
            pass
        return deltas

    def finish(self) -> Sequence[ParsedDelta]:
        deltas: list[ParsedDelta] = []
        section = (self._format.section or ())[1:]
        ends = section if self._state == "content" else self._format.end_markers
        begun = any(end.startswith(self._buffer) for end in ends)
        match self._state:
            case "content":
                self._content_buffer.add(
                    "" if self._content_buffer.after_call and begun else self._buffer, deltas
                )
            case "section" | "opened" | "name":
                self._emit_content(self._buffer, deltas)
            case "list" if self._prefix:
                self._emit_content(self._buffer, deltas)
            case "object":
                self._finish_object(deltas)
            case "next" | "closing":
                self._emit_suffix("" if begun else self._buffer, deltas)
            case _:
                pass
        self._content_buffer.flush(deltas)
        self._buffer = ""
        return deltas

    # ------------------------------------------------------------------------------- before a call

    def _find_opening(self, deltas: list[ParsedDelta]) -> bool:
        if not self._format.opening:
            self._content_buffer.add(self._buffer, deltas)
            self._buffer = ""
            return False
        found = find_marker(self._buffer, (self._format.opening, *(self._format.section or ())))
        self._content_buffer.add(found.before, deltas)
        self._buffer = found.tail
        if found.marker is not None:
            self._handle_marker(found.marker, deltas)
        return found.marker is not None

    def _handle_marker(self, marker: str, deltas: list[ParsedDelta]) -> None:
        """A marker outside of a call. The end of a section without calls is content."""
        self._state = "content"
        if marker == self._format.opening:
            self._state, self._prefix = "opened", [marker]
        elif marker not in self._format.end_markers:
            self._state, self._prefix = "section", [marker]
        elif not self._content_buffer.after_call:
            self._content_buffer.add(marker, deltas)

    def _expect_call_in_section(self, deltas: list[ParsedDelta]) -> bool:
        """A call must follow."""
        bare = self._skip(WHITESPACE)
        opening = self._format.opening
        if bare.startswith(opening):
            self._prefix.append(opening)
            self._buffer, self._state = bare[len(opening) :], "opened"
        elif opening.startswith(bare):
            return False
        else:
            self._not_a_call("", deltas)
        return True

    def _expect_call(self, deltas: list[ParsedDelta]) -> bool:
        bare = self._skip(WHITESPACE)
        if not bare:
            return False
        if bare[0] == "{" and self._format.objects:
            self._start_object()
        elif bare[0] == "[" and self._format.lists:
            self._prefix.append("[")
            self._buffer, self._state = bare[1:], "list"
        elif self._format.header is not None:
            self._state = "name"
        else:
            self._not_a_call("", deltas)
        return True

    def _skip(self, separators: str) -> str:
        """The text without leading separators, which are kept in case no call follows."""
        bare = self._buffer.lstrip(separators)
        if self._prefix:
            self._prefix.append(self._buffer[: len(self._buffer) - len(bare)])
        self._buffer = bare
        return bare

    def _not_a_call(self, text: str, deltas: list[ParsedDelta]) -> None:
        """The text since the opening is content."""
        self._emit_content(text, deltas)
        self._state = "content"

    def _emit_content(self, text: str, deltas: list[ParsedDelta]) -> None:
        """`text` and the prefix before it, as content."""
        self._content_buffer.add("".join((*self._prefix, text)), deltas)
        self._prefix = []

    # -------------------------------------------------------------------------------------- a call

    def _start_object(self) -> None:
        self._state, self._call_parser = "object", CallObjectParser(self._call_count)
        self._state_after_call = "next" if self._format.closing else "list"

    def _next_in_list(self, deltas: list[ParsedDelta]) -> bool:
        bare = self._skip(WHITESPACE + ",")
        if not bare:
            return False
        if bare[0] == "{":
            self._start_object()
        elif self._prefix:  # nothing of the list was a call
            self._not_a_call("", deltas)
        else:  # the end of the list, or what does not belong there
            self._buffer = bare.removeprefix("]")
            self._state = "closing" if self._format.closing else "content"
        return True

    def _feed_object(self, deltas: list[ParsedDelta]) -> bool:
        """A marker within a string belongs to it; elsewhere the marker ends the object."""
        found = (
            find_marker(self._buffer, self._breaking_markers)
            if self._breaking_markers
            else MarkerMatch(self._buffer, None, "")
        )
        tail = self._feed_call_parser(found.before, deltas)
        if self._call_parser.state == "open" and found.marker is not None:
            if self._call_parser.in_string:
                self._buffer = self._feed_call_parser(found.marker, deltas) + found.tail
                return True
            self._call_parser.abort(deltas)
        self._buffer = tail + (found.marker or "") + found.tail
        if self._call_parser.state == "open":
            return False
        if self._call_parser.named:
            self._end_call()
        elif self._prefix or not self._format.closing:
            self._not_a_call(self._call_parser.consumed, deltas)
        else:
            self._suffix.append(self._call_parser.consumed)
            self._state = "closing"
        return True

    def _feed_call_parser(self, text: str, deltas: list[ParsedDelta]) -> str:
        """The part of `text` behind the object."""
        parsed, consumed = self._call_parser.feed(text)
        if self._call_parser.named and parsed:
            self._content_buffer.start_call()
            self._prefix = []
        deltas += parsed
        return text[consumed:]

    def _end_call(self) -> None:
        """A call has ended."""
        self._call_count += 1
        self._state, self._suffix = self._state_after_call, []

    def _parse_header(self, deltas: list[ParsedDelta]) -> bool:
        """Up to the arguments; where there are none, up to the closing."""
        head, closing = self._format.header, self._format.closing
        assert head is not None
        ends = [
            at for marker in ("{", closing) if marker and (at := self._buffer.find(marker)) >= 0
        ]
        at = min(ends, default=MAX_HEADER_CHARS)
        if at >= MAX_HEADER_CHARS and len(self._buffer) < MAX_HEADER_CHARS:
            return False
        parsed = self._buffer[:at]
        if closing and not self._buffer.startswith("{", at):
            parsed = _without_null_word(parsed)
        found = head.fullmatch(parsed) if at < MAX_HEADER_CHARS else None
        if found is None:
            self._not_a_call("", deltas)
            return True
        self._content_buffer.start_call()
        self._prefix = []
        deltas.append(ParsedDelta("call", found[1], self._call_count))
        self._buffer = self._buffer[at:]
        self._state, self._call_parser = "object", CallArgumentsParser(self._call_count)
        self._state_after_call = "next" if closing else "content"
        if not self._buffer.startswith("{"):
            deltas.append(ParsedDelta("arguments", "{}", self._call_count))
            self._end_call()
        return True

    def _finish_object(self, deltas: list[ParsedDelta]) -> None:
        """The output ends within an object. The begin of a marker is part of it only within a
        string.
        """
        if self._call_parser.in_string or not self._call_parser.named or not self._breaking_markers:
            deltas += self._call_parser.feed(self._buffer)[0]
        if not self._call_parser.named and self._prefix:
            self._emit_content(self._call_parser.consumed, deltas)
        elif not self._call_parser.named:
            self._emit_suffix(self._call_parser.consumed, deltas)

    # ------------------------------------------------------------------------------- behind a call

    def _after_object(self, _deltas: list[ParsedDelta]) -> bool:
        """Behind an object another one may stand between the same markers."""
        bare = self._buffer.lstrip(IGNORED_AFTER_CALL)
        self._suffix.append(self._buffer[: len(self._buffer) - len(bare)])
        self._buffer = bare
        if not bare:
            return False
        if bare[0] == "{" and self._format.objects:
            self._start_object()
        else:
            self._state = "closing"
        return True

    def _find_closing(self, deltas: list[ParsedDelta]) -> bool:
        """Looks for the closing marker and drops the text before it. If another call opens first,
        or the output ends, the closing marker was forgotten, and the text is content."""
        found = find_marker(self._buffer, self._markers)
        self._suffix.append(found.before)
        self._buffer = found.tail
        if found.marker is None:
            return False
        if found.marker in self._format.end_markers:
            self._state, self._suffix = "content", []
        else:
            self._emit_suffix("", deltas)
            self._handle_marker(found.marker, deltas)
        return True

    def _emit_suffix(self, text: str, deltas: list[ParsedDelta]) -> None:
        """Text behind a call that was not closed is content, unless only separators."""
        after = "".join((*self._suffix, text))
        self._suffix = []
        if after.strip(IGNORED_AFTER_CALL):
            self._content_buffer.add(after, deltas)


def _without_null_word(text: str) -> str:
    """The header of a call without arguments, without the word that stands in their place."""
    bare = text.rstrip(IGNORED_AFTER_CALL)
    word = next((word for word in NULL_WORDS if bare.endswith(word)), "")
    return bare.removesuffix(word)


PYTHON_TAG = "<|python_tag|>"
BETWEEN_CALLS = WHITESPACE + ";,}"  # calls; a brace too many is a slip


class Llama3Parser:
    """Calls of Llama 3: {"name": ..., "parameters": {...}} is all of the output.

    Several calls follow each other with semicolons between; <|python_tag|> may come first. Output
    that does not begin with a call of one of the tools `names` is content to its end.
    """

    def __init__(self, names: Container[str]) -> None:
        self._names = names
        self._state: Literal["begin", "call", "between", "content"] = "begin"
        self._buffer: str = ""
        self._prefix: list[str] = []  # of an object: what sets it apart, the tag
        self._tag_seen = False  # the tag is there
        self._call_count = 0
        self._call_parser = CallObjectParser(0, names)

    def feed(self, text: str) -> Sequence[ParsedDelta]:
        self._buffer += text
        deltas: list[ParsedDelta] = []
        steps = {
            "begin": self._expect_first_call,
            "call": self._feed_call,
            "between": self._expect_call,
            "content": self._emit_content,
        }
        while self._buffer and steps[self._state](deltas):
            pass
        return deltas

    def finish(self) -> Sequence[ParsedDelta]:
        tail = self._buffer
        if self._state == "begin":
            tail = self._with_prefix(tail)
        if self._state == "call" and not self._call_parser.named:
            tail = self._with_prefix(self._call_parser.consumed + tail)
        if self._state == "between":
            tail = ""
        self._buffer = ""
        return (ParsedDelta("content", tail),) if tail else ()

    def _expect_first_call(self, _deltas: list[ParsedDelta]) -> bool:
        if not self._skip_prefix(WHITESPACE):
            return False
        if self._buffer[0] == "{":
            self._state = "call"
        else:
            self._state, self._buffer = "content", self._with_prefix(self._buffer)
        return True

    def _skip_prefix(self, separators: str) -> bool:
        """Skips separators and the tag; False while there is nothing else."""
        if not self._tag_seen:
            self._strip(separators)
            if self._buffer.startswith(PYTHON_TAG):
                self._prefix.append(PYTHON_TAG)
                self._buffer, self._tag_seen = self._buffer[len(PYTHON_TAG) :], True
            elif PYTHON_TAG.startswith(self._buffer):
                return False
        if self._tag_seen:
            self._strip(WHITESPACE)
        return bool(self._buffer)

    def _strip(self, separators: str) -> None:
        bare = self._buffer.lstrip(separators)
        self._prefix.append(self._buffer[: len(self._buffer) - len(bare)])
        self._buffer = bare

    def _with_prefix(self, text: str) -> str:
        """`text` with what was skipped before it."""
        return "".join((*self._prefix, text))

    def _feed_call(self, deltas: list[ParsedDelta]) -> bool:
        parsed, consumed = self._call_parser.feed(self._buffer)
        deltas += parsed
        self._buffer = self._buffer[consumed:]
        if self._call_parser.state == "open":
            return False
        if self._call_parser.named:
            self._call_count += 1
            self._state, self._prefix, self._tag_seen = "between", [], False
        else:
            self._buffer = self._with_prefix(self._call_parser.consumed + self._buffer)
            self._state = "content"
        return True

    def _expect_call(self, _deltas: list[ParsedDelta]) -> bool:
        if not self._skip_prefix(BETWEEN_CALLS):
            return False
        if self._buffer[0] == "{":
            self._state, self._call_parser = "call", CallObjectParser(self._call_count, self._names)
            self._prefix = []
        else:
            self._state, self._buffer = (
                "content",
                self._with_prefix(self._buffer).lstrip(BETWEEN_CALLS),
            )
        return True

    def _emit_content(self, deltas: list[ParsedDelta]) -> bool:
        deltas.append(ParsedDelta("content", self._buffer))
        self._buffer = ""
        return False


# ------------------------------------------------------------------------------- grammars of calls


def hermes_grammar(request: GrammarRequest) -> str:
    """Objects between <tool_call> and </tool_call>."""
    closing = request.tag(HERMES.closing)
    bodies = [
        f'"\\n" {call_object(request, name, "arguments")} "\\n" {closing}'
        for name in request.schemas
    ]
    return tagged_calls(request, HERMES.opening, bodies, "", '"\\n"')


def llama3_grammar(request: GrammarRequest) -> str:
    """Objects with semicolons between, and nothing else."""
    calls = repeated(request, "call", '"; "')
    # Where an answer may be another object, what opens a call must be lexed as that object is.
    call = call_object if request.content_constraint is None else call_schema
    rules = [rule("call", [call(request, name, "parameters") for name in request.schemas])]
    if request.allow_content:
        calls = f"{calls} | text"
        rules += ["text: TEXT", f"TEXT: {ANY_TEXT} & ~/\\s*(<\\|python_tag\\|>\\s*)?\\{{(?s:.*)/"]
    return "\n".join((start_rule(request, f"({calls})"), *rules))


def mistral_grammar(request: GrammarRequest) -> str:
    """A list of objects; names and [ARGS] if the model has that token."""
    if "[ARGS]" not in (request.added_tokens or {}):
        return marked_list_grammar(MISTRAL)(request)
    args = request.tag("[ARGS]")
    bodies = [f"{quoted(n)} {args} {json_arguments(request, n)}" for n in request.schemas]
    return tagged_calls(request, MISTRAL.opening, bodies, "", "")


def marked_list_grammar(markers: JsonCallMarkers) -> CallGrammar:
    """A list of objects behind a marker, or between two."""

    def grammar(request: GrammarRequest) -> str:
        objects = [call_object(request, name, "arguments") for name in request.schemas]
        closing = f" {request.tag(markers.closing)}" if markers.closing else ""
        call_list = f'"[" {repeated(request, "object", quoted(", "))} "]"{closing}'
        once = replace(request, parallel=False)
        form = tagged_calls(once, markers.opening, [call_list], "", "")
        return "\n".join((form, rule("object", objects)))

    return grammar


def section_grammar(
    markers: JsonCallMarkers, *head: str, foot: str = "", between: str = ""
) -> CallGrammar:
    """Calls with their name before the arguments, all in one section.

    Arguments:
    - head: tags and texts before the arguments, in which {} is the name
    - foot: text behind the arguments
    - between: text between calls
    """

    def grammar(request: GrammarRequest) -> str:
        assert markers.section is not None
        begin, end = markers.section
        calls = [
            sequence(
                request.tag(markers.opening),
                *(request.tag(part.replace("{}", name)) for part in head),
                json_arguments(request, name),
                optional_text(foot),
                request.tag(markers.closing),
            )
            for name in request.schemas
        ]
        call_list = f"{repeated(request, 'object', optional_text(between))} {request.tag(end)}"
        form = tagged_calls(
            replace(request, parallel=False), begin, [call_list], markers.opening, ""
        )
        return "\n".join((form, rule("object", calls)))

    return grammar


def bare_list_grammar(request: GrammarRequest, key: str = "parameters") -> str:
    """A list of objects and nothing else. `key`: of the arguments."""
    call_list = f'"[" {repeated(request, "call", quoted(", "))} "]"'
    call = call_object if request.content_constraint is None else call_schema  # as in llama3
    rules = [rule("call", [call(request, name, key) for name in request.schemas])]
    if request.allow_content:
        call_list = f"({call_list}) | text"
        rules += ["text: TEXT", f"TEXT: {ANY_TEXT} & ~/\\s*\\[\\s*\\{{(?s:.*)/"]
    return "\n".join((start_rule(request, call_list), *rules))


def marked_object_grammar(markers: JsonCallMarkers) -> CallGrammar:
    """Objects, each behind a marker."""

    def grammar(request: GrammarRequest) -> str:
        bodies = [call_object(request, name, "arguments") for name in request.schemas]
        return tagged_calls(request, markers.opening, bodies, "", "")

    return grammar
