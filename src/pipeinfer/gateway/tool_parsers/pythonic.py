"""Tool calls as Python writes them, [name(key=value, ...), ...], and Python literals as JSON.

PythonicFormat says how a format writes the list. Nothing is evaluated: each character is looked
at once, a few more behind a quote. pythonic_grammar makes the grammar of such calls. Knows no
model.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import msgspec

from pipeinfer.gateway.tool_parsers.base import (
    INPUT_PARAMETER,
    WHITESPACE,
    ContentBuffer,
    ParsedDelta,
    find_marker,
    schema_types,
)
from pipeinfer.gateway.tool_parsers.grammars import (
    ANNOTATIONS,
    ANY_TEXT,
    JSON_ESCAPED_CHARS,
    CallGrammar,
    GrammarRequest,
    UnsupportedSchema,
    arguments_schema,
    input_regex,
    nested_grammar,
    parameter_schemas,
    quoted,
    repeated,
    rule,
    start_rule,
    tagged_calls,
)
from pipeinfer.params import JsonObject, JsonValue

MAX_BRACKET_DEPTH = 64  # brackets within brackets
LOOKAHEAD_CHARS = 256  # characters behind a quote that decide whether a string ends there

_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_WORDS = _PYTHON_WORDS | {word: word for word in _PYTHON_WORDS.values()}
_PREFIXES = {"r", "b", "u", "f", "rb", "br", "rf", "fr"}  # of texts
_CLOSERS = {"[": "]", "(": ")", "{": "}", "?": "}", "s": "}"}
_QUOTES = "'\""
_IN_TEXT = re.compile(r"[\\'\"]")
_IN_WORD = re.compile(r"[,:()\[\]{}'\"]")
_HEX = "[0-9a-fA-F]"
_ESCAPE = re.compile(
    rf"\\(?:x({_HEX}{{2}})|u({_HEX}{{4}})|U({_HEX}{{8}})|([0-7]{{1,3}})|(.))", re.DOTALL
)
_ESCAPE_BEGUN = re.compile(rf"\\(?:x{_HEX}?|u{_HEX}{{0,3}}|U{_HEX}{{0,7}}|[0-7]{{1,2}})?")
# Behind a backslash: what JSON writes for it.
_ESCAPES = {"a": "\\u0007", "v": "\\u000b", "'": "'", "\n": ""} | {
    char: "\\" + char for char in '"\\bfnrt'
}
_NUMBER = re.compile(r"([+-]?)(\d[\d_]*)?(\.[\d_]*)?([eE][+-]?\d+)?", re.ASCII)
_NON_DECIMAL = re.compile(r"[+-]?0(?:[xX][0-9a-fA-F]{1,16}|[oO][0-7]{1,16}|[bB][01]{1,16})")


class Lookahead(NamedTuple):
    """Patterns of the text that may stand behind a value.

    Attributes:
    - matches: where it matches, a quote before it has ended a string
    - partial: text that may become a match
    """

    matches: re.Pattern[str]
    partial: re.Pattern[str]


def _one_of(letters: str) -> Lookahead:
    return Lookahead(re.compile(rf"\s*[{re.escape(letters)}]"), re.compile(r"\s*"))


_AFTER_VALUE = {
    "[": _one_of(",]"), "(": _one_of(",)"), "{": _one_of(",}"), "s": _one_of(",}"),
    "?": _one_of(":,}"), ":": _one_of(":,}"),
}  # fmt: skip


class PythonLiteralParser:
    """Finds the end of a Python literal whose first character is not white space; encodes it as
    JSON.

    Strings, numbers, lists, tuples, sets, mappings, and true, false and null as Python or JSON
    write them. Anything else becomes a string. A quote with nothing behind it that may follow a
    string belongs to the string: some models do not escape quotes.

    Attributes:
    - done: the literal has ended
    - broken: it is nested too deep, or its brackets do not match
    - irregular: part of it is no literal
    """

    __slots__ = (
        "_after",
        "_after_comma",
        "_bracket_empty",
        "_brackets",
        "_mapping_part",
        "_open_quote",
        "_output",
        "_raw_string",
        "_string_empty",
        "_undecided",
        "_word",
        "_word_brackets",
        "broken",
        "done",
        "irregular",
    )  # fmt: skip

    def __init__(self, after: Lookahead | None = None) -> None:
        """`after`: what may stand behind the literal; None: anything."""
        self._after = after
        # Open brackets: "?" is a brace that may still be a dict or a set, "s" that of a set.
        self._brackets: list[str] = []
        self._bracket_empty = True  # nothing stands in the last one
        self._after_comma = False  # the last part was a comma
        self._mapping_part = ""  # of a mapping, which comes next: key, colon or value
        self._undecided: list[str] | None = None  # output within a "?"
        self._open_quote = ""  # of the string that has not ended
        self._raw_string = self._string_empty = False  # whether that string is raw, and empty
        self._word: list[str] = []  # a number, a name or text that is no literal
        self._word_brackets = 0
        self._output: list[str] = []
        self.done = self.broken = self.irregular = False

    def feed(self, text: str, start: int, last: bool = False) -> tuple[int, str]:
        """(index up to which `text` from `start` on certainly belongs to the literal, that part as
        JSON). The text from that index must be fed again, with more behind it. `last`: no more
        comes.
        """
        self._output = []
        at = start
        while at < len(text) and not (self.done or self.broken):
            if self._open_quote:
                end = self._string_char(text, at, last)
            elif self._word:
                end = self._word_char(text, at)
            else:
                end = self._structure_char(text, at)
            if end == at:
                break
            at = end
        return at, "".join(self._output)

    def finish(self) -> str:
        """No more comes: the rest of a number or word, as JSON."""
        self._output = []
        if self._word:
            self._end_word()
        return "".join(self._output)

    # --------------------------------------------------------------------------------- brackets

    def _structure_char(self, text: str, at: int) -> int:
        char = text[at]
        if char in WHITESPACE:
            return at + 1
        if char in _QUOTES:
            self._open_string(char)
        elif char in "([{":
            self._open_bracket(char)
        elif char in ")]}":
            return self._close_bracket(char, at)
        elif char == ",":
            return self._handle_comma(at)
        elif char == ":" and self._mapping_part == "colon":
            self._decide_brace("{")
            self._emit(": ")
            self._mapping_part = "value"
        else:
            self._word.append(char)
        return at + (not self.broken)

    def _open_bracket(self, char: str) -> None:
        if self._brackets and self._brackets[-1] == "?":
            self._decide_brace("s")
        key = self._brackets[-1:] == ["{"] and self._mapping_part != "value"
        if key or len(self._brackets) >= MAX_BRACKET_DEPTH:
            self.broken = True
            return
        self._start_value()
        self._bracket_empty, self._after_comma = True, False
        if char == "{":
            self._brackets.append("?")
            self._undecided, self._mapping_part = [], "key"
        else:
            self._brackets.append(char)
            self._mapping_part = ""
            self._emit("[")

    def _decide_brace(self, kind: str) -> None:
        """Whether the open brace is a mapping ("{") or a set ("s")."""
        if self._brackets[-1] != "?":
            return
        buffered = self._undecided or []
        self._undecided, self._brackets[-1] = None, kind
        self._emit("{" if kind == "{" else "[")
        for text in buffered:
            self._emit(text)
        if kind == "s":
            self._mapping_part = ""

    def _handle_comma(self, at: int) -> int:
        if not self._brackets:
            return self._emit_null(at)
        if self._brackets[-1] == "?" and not self._bracket_empty:
            self._decide_brace("s")
        self._complete_pair()
        self._after_comma = not self._bracket_empty
        return at + 1

    def _complete_pair(self) -> None:
        """Adds what the last pair of a mapping lacks."""
        if self._brackets[-1] != "{":
            return
        if self._mapping_part in ("colon", "value"):
            self._emit(": null" if self._mapping_part == "colon" else "null")
            self.irregular = True
        self._mapping_part = "key"

    def _close_bracket(self, char: str, at: int) -> int:
        if not self._brackets:
            return self._emit_null(at)
        if _CLOSERS[self._brackets[-1]] != char:
            self.broken = True
            return at
        self._decide_brace("{" if self._bracket_empty else "s")
        self._complete_pair()
        self._emit("}" if self._brackets.pop() == "{" else "]")
        self._bracket_empty = self._after_comma = False
        self._mapping_part = ""  # of the pair that it is the value of
        self.done = not self._brackets
        return at + 1

    def _emit_null(self, at: int) -> int:
        """There is no value."""
        self._emit("null")
        self.irregular = self.done = True
        return at

    def _start_value(self) -> None:
        """A value or a key begins."""
        if self._brackets and not self._bracket_empty and self._mapping_part != "value":
            self.irregular = self.irregular or not self._after_comma
            self._emit(", ")
            if self._brackets[-1] == "{":
                self._mapping_part = "key"
        self._bracket_empty = self._after_comma = False

    def _end_scalar(self) -> None:
        """A string, a word or a key is complete."""
        if not self._brackets:
            self.done = True
        elif self._brackets[-1] in "{?":
            self._mapping_part = "colon" if self._mapping_part == "key" else ""

    def _emit(self, text: str) -> None:
        (self._output if self._undecided is None else self._undecided).append(text)

    # ------------------------------------------------------------------------------------ words

    def _word_char(self, text: str, at: int) -> int:
        found = _IN_WORD.search(text, at)
        stop = len(text) if found is None else found.start()
        if stop > at:
            self._word.append(text[at:stop])
            return stop
        char = text[at]
        if self._word_ends(char):
            self._end_word(char)
            return at if self.done else self._structure_char(text, at)
        if char in _QUOTES and self._string_prefix():
            prefix, self._word = self._string_prefix(), []
            self._open_string(char)
            self._raw_string = "r" in prefix
            return at + 1
        self._word_brackets += (char in "([{") - (char in ")]}")
        self._word.append(char)
        return at + 1

    def _word_ends(self, char: str) -> bool:
        if self._word_brackets:
            return False
        return char in ",)]}" or (char == ":" and self._mapping_part == "key")

    def _string_prefix(self) -> str:
        """The prefix (r, b, ...) of a string; empty if the word is none."""
        if len(self._word) > 2:
            return ""
        word = "".join(self._word).lower()
        return word if word in _PREFIXES else ""

    def _end_word(self, following: str = "") -> None:
        """`following`: the character that follows."""
        word = "".join(self._word).strip(WHITESPACE)
        self._word = []
        self._start_value()
        chunk = _WORDS.get(word) or _number(word)
        if not chunk:
            self.irregular = True
            chunk = f'"{_json_chars(word)}"'
        elif self._mapping_part == "key" and (self._brackets[-1] == "{" or following == ":"):
            chunk = f'"{chunk}"'
        self._emit(chunk)
        self._end_scalar()

    # ------------------------------------------------------------------------------------ texts

    def _open_string(self, quote: str) -> None:
        self._start_value()
        self._emit('"')
        self._open_quote, self._raw_string, self._string_empty = quote, False, True

    def _string_char(self, text: str, at: int, last: bool) -> int:
        found = _IN_TEXT.search(text, at)
        stop = len(text) if found is None else found.start()
        char = text[at]
        if stop > at:
            return self._emit_string_chars(text[at:stop], at)
        if char == "\\":
            return self._escape(text, at, last)
        if char != self._open_quote[0]:
            return self._emit_string_chars(char, at)
        if len(self._open_quote) == 3:
            return self._end_triple_quoted(text, at, last)
        if self._string_empty and text[at + 1 : at + 2] == char:
            self._open_quote, self._string_empty = 3 * char, False
            return at + 2
        if self._string_empty and at + 1 == len(text) and not last:
            return at
        ends = self._string_ends(text, at + 1, last)
        if ends is None:
            return at
        if not ends:
            self.irregular = True
            return self._emit_string_chars(char, at)
        return self._end_string(at + 1)

    def _emit_string_chars(self, text: str, at: int) -> int:
        self._emit(_json_chars(text))
        self._string_empty = False
        return at + len(text)

    def _end_string(self, at: int) -> int:
        self._emit('"')
        self._open_quote = ""
        self._end_scalar()
        return at

    def _end_triple_quoted(self, text: str, at: int, last: bool) -> int:
        quotes = text[at : at + 3]
        if quotes == self._open_quote:
            return self._end_string(at + 3)
        if at + len(quotes) == len(text) and self._open_quote.startswith(quotes) and not last:
            return at
        return self._emit_string_chars(text[at], at)

    def _string_ends(self, text: str, at: int, last: bool) -> bool | None:
        """Whether the string ends before `at`; None while that is undecided."""
        following = self._after
        if self._brackets:
            key = self._brackets[-1] == "{" and self._mapping_part == "key"
            following = _AFTER_VALUE[":" if key else self._brackets[-1]]
        if following is None:
            return True
        ahead = text[at : at + LOOKAHEAD_CHARS]
        if following.matches.match(ahead):
            return True
        if len(ahead) < LOOKAHEAD_CHARS and following.partial.fullmatch(ahead):
            return True if last else None
        return False

    def _escape(self, text: str, at: int, last: bool) -> int:
        """From a backslash on. If it escapes nothing, it is a backslash, as in Python."""
        if self._raw_string:
            return self._raw_backslash(text, at, last)
        found = _ESCAPE.match(text, at)
        if found is None or _ESCAPE_BEGUN.fullmatch(text, at):
            return len(text) if last else at
        two, four, eight, octal, char = found.groups()
        if char is None:
            digits = two or four or eight
            self._emit(_char_json(int(digits, 16) if digits else int(octal, 8), digits or octal))
        elif char == "/" and self._open_quote[0] == '"':
            self._emit("/")  # as JSON has it
        else:
            self._emit(_ESCAPES.get(char, "\\\\" + _json_chars(char)))
        self._string_empty = False
        return found.end()

    def _raw_backslash(self, text: str, at: int, last: bool) -> int:
        """A backslash of a raw string, with the character that it keeps from ending the string."""
        if at + 1 == len(text) and not last:
            return at
        following = text[at + 1 : at + 2]
        return self._emit_string_chars(
            "\\" + following if following in ("\\", self._open_quote[0]) else "\\", at
        )


def _char_json(code: int, digits: str) -> str:
    """The JSON of the character with this code; if there is none, its digits."""
    if code > 0x10FFFF:
        return _json_chars(digits)
    return _json_chars(chr(code)) if not 0xD800 <= code < 0xE000 else f"\\u{code:04x}"


def _number(word: str) -> str:
    """A number as JSON; empty if it is none. Long numbers are not computed."""
    if _NON_DECIMAL.fullmatch(word):
        return str(int(word, 0))
    found = _NUMBER.fullmatch(word)
    if found is None or not (found[2] or (found[3] or "").strip("._")):
        return ""
    integer = (found[2] or "").replace("_", "").lstrip("0") or "0"
    fraction = (found[3] or "").replace("_", "")
    sign = "-" if found[1] == "-" else ""
    return f"{sign}{integer}{'.0' if fraction == '.' else fraction}{found[4] or ''}"


def _json_chars(text: str) -> str:
    return msgspec.json.encode(text).decode()[1:-1]


MAX_HEAD_CHARS = 256  # from a bracket to the first value
FUNCTION_NAME = r"[\w.-]{1,128}"
ARGUMENT_NAME = r"[^\s()\[\]{}<>,:;=\"'`]{1,128}"
BETWEEN_PYTHON_CALLS = WHITESPACE + ",;"  # characters between two calls

# Behind a parenthesis or comma: the end, or a name and the begin of its value.
_FIRST = rf"(?:(?P<end>\))|(?P<key>{ARGUMENT_NAME})\s*=\s*(?=[^=\s]))"
_HEAD = re.compile(rf"\s*(?P<name>{FUNCTION_NAME})\s*\(\s*{_FIRST}")
_HEAD_PARTIAL = re.compile(
    rf"\s*(?:{FUNCTION_NAME}(?:\s*(?:\(\s*(?:{ARGUMENT_NAME}\s*(?:=\s*)?)?)?)?)?"
)
_CALLED = re.compile(rf"\s*({FUNCTION_NAME})\s*\(")
_NEXT = re.compile(rf"\s*{_FIRST}")
_NEXT_PARTIAL = re.compile(rf"\s*(?:{ARGUMENT_NAME}\s*(?:=\s*)?)?")
# Behind the value of an argument. One letter would not be enough, since a text may hold quotes that
# are not escaped.
_AFTER_ARGUMENT = Lookahead(
    re.compile(rf"\s*(?:,\s*(?:{ARGUMENT_NAME}\s*=|\))|\)\s*(?:[,;\]<]|{FUNCTION_NAME}\s*\())"),
    re.compile(rf"\s*(?:,\s*(?:{ARGUMENT_NAME}\s*)?|\)\s*(?:{FUNCTION_NAME}\s*)?)?"),
)


@dataclass(frozen=True)
class PythonicFormat:
    """How a format writes its list of calls.

    Attributes:
    - tags: (opening, closing) around all calls; if empty, calls stand in a list whose first
      function is one of the tools
    - brackets: the calls stand in a list
    - separator: text between calls
    """

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
    """Parses calls of one format; `names`: of the tools.

    Text behind an opening that is no call is content, with the opening. A call whose arguments are
    no literals with names ends there, and its arguments are not closed.
    """

    def __init__(self, format: PythonicFormat, names: Container[str]) -> None:
        self._format = format
        self._names = names
        self._state: PythonicState = "content"
        self._buffer: str = ""
        self._finished = False  # no more text comes
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
        """A call that is cut off is not closed, so that its arguments are not taken for complete
        ones.
        """
        self._finished = True
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
        """The text since the opening is content."""
        self._content_buffer.add("".join((*self._prefix, text)), deltas)
        self._state, self._prefix = "content", []

    def _parse_head(self, deltas: list[ParsedDelta]) -> bool:
        """From a function's name to its first argument."""
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

    def _start_argument(
        self, found: re.Match[str], separator: str, deltas: list[ParsedDelta]
    ) -> None:
        self._buffer = self._buffer[found.end() :]
        if found["end"]:
            self._end_call(deltas)
            return
        self._emit_arguments(f"{separator}{msgspec.json.encode(found['key']).decode()}: ", deltas)
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
        end, chunk = self._value.feed(self._buffer, 0, self._finished)
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
        """Behind a call: another call, or the end of all calls."""
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


# ------------------------------------------------------------------------------- grammars of calls

_CALL_START = r"\[\s*[\w.-]+\s*\("  # in Python's notation


def pythonic_grammar(call_format: PythonicFormat) -> CallGrammar:
    """Calls as Python writes them, with arguments in the order of the schema."""

    def grammar(request: GrammarRequest) -> str:
        python = _PythonicRules(request)
        calls = {name: python.call(name, f"p{i}") for i, name in enumerate(request.schemas)}
        whole = [f"{quoted(name + '(')} {call}" for name, call in calls.items()]
        opening, end = call_format.tags
        call_list = repeated(request, "called", quoted(call_format.separator))
        if call_format.brackets:
            call_list = f'"[" {call_list} "]"'
        rules = ["", rule("called", whole), *python.rules]
        if opening:
            call_list = f"{call_list} {request.tag(end)}"
            form = tagged_calls(replace(request, parallel=False), opening, [call_list], "", "")
        elif not request.allow_content:
            form = start_rule(request, call_list, _CALL_START)
        else:
            form = _first_in_list(request, call_format, calls)
        return form + "\n".join(rules)

    return grammar


def _first_in_list(
    request: GrammarRequest, call_format: PythonicFormat, calls: Mapping[str, str]
) -> str:
    """Content around calls without an opening tag: it holds nothing that begins like a list of
    calls.
    """
    more = f" ({quoted(call_format.separator)} called)*" if request.parallel else ""
    rules = [
        f'start: (first{more} "]"){"*" if request.parallel else "?"} rest',
        rule("first", [f"f{i} {call}" for i, call in enumerate(calls.values())]),
        f"rest: TEXT\nTEXT: {ANY_TEXT} & ~/(?s:.*){_CALL_START}(?s:.*)/",
    ]
    for i, name in enumerate(calls):
        # Brackets are counted, in texts as well: the remark closes those of the suffix.
        rules.append(f"f{i}[suffix={quoted(f'[{name}(')}]: TEXT // )]")
    return "\n".join(rules)


class _PythonicRules:
    """Functions with their arguments in parentheses. rules: those that the functions refer to."""

    def __init__(self, request: GrammarRequest) -> None:
        self._request = request
        self.rules = [f'pair: /{ARGUMENT_NAME}/ "=" %json {{}}']
        self._values: dict[str, str] = {}  # the names of their rules

    def call(self, name: str, prefix: str) -> str:
        """The rule from behind the opening parenthesis. Raises UnsupportedSchema."""
        if not re.fullmatch(FUNCTION_NAME, name):
            raise UnsupportedSchema(f"{name[:100]!r} cannot be called in this model's form")
        text = self._request.input_grammars.get(name)
        regex = None if text is None else input_regex(name, text, JSON_ESCAPED_CHARS)
        if text is not None and regex is None:
            return f'{quoted(INPUT_PARAMETER + "=" + chr(34))} {nested_grammar(text)} "\\")"'
        schema = arguments_schema(self._request, name, regex)
        if schema is None:
            return '(pair (", " pair)*)? ")"'
        return f'{self._arguments(name, prefix, schema)} ")"'.lstrip()

    def _arguments(self, name: str, prefix: str, given: JsonObject) -> str:
        """The grammar of a call's arguments: required ones, and others, in their order. Each
        argument up to the first required one may be the first of the call; it has two rules then,
        since it stands in two places."""
        properties, required, shared = parameter_schemas(name, given, ARGUMENT_NAME)
        values = [self._value(value, shared) for value in properties.values()]
        heads = [f"{key}=" for key in properties]
        optional = [key not in required for key in properties]
        ahead = optional.index(False) if False in optional else len(heads)
        behind = ""
        for i in reversed(range(ahead + 1, len(heads))):
            more = f"{quoted(', ' + heads[i])} {values[i]}"
            behind = f"({more})? {behind}" if optional[i] else f"{more} {behind}"
        rest = '""'
        if ahead < len(heads):
            self.rules.append(
                f"{prefix}b{ahead}: {quoted(', ' + heads[ahead])} {values[ahead]} {behind}"
            )
            rest = f"{quoted(heads[ahead])} {values[ahead]} {behind}"
        for i in reversed(range(ahead)):
            # b: behind others; f: as the first one, or none.
            after = f"{prefix}b{i + 1}" if i + 1 < len(heads) else ""
            self.rules += [
                f"{prefix}b{i}: ({quoted(', ' + heads[i])} {values[i]})? {after}",
                f"{prefix}f{i}: {quoted(heads[i])} {values[i]} {after} | {rest}",
            ]
            rest = f"{prefix}f{i}"
        return rest if heads else ""

    def _value(self, schema: JsonValue, shared: JsonObject) -> str:
        """In a rule that all values of such a schema share."""
        value = _python_value(schema, shared)
        if value not in self._values:
            self._values[value] = f"v{len(self._values)}"
            self.rules.append(f"{self._values[value]}: {value}")
        return self._values[value]


def _python_value(schema: JsonValue, shared: JsonObject) -> str:
    """The grammar of a value, written as JSON; booleans and null that are all of a value may be
    written as in Python."""
    own = schema if isinstance(schema, dict) else {}
    if not set(own) - ANNOTATIONS - {"type"}:
        if schema_types(own) == frozenset(("boolean",)):
            return '("True" | "False" | "true" | "false")'
        if schema_types(own) == frozenset(("null",)):
            return '("None" | "null")'
    return f"%json {msgspec.json.encode({**own, **shared}).decode()}"
