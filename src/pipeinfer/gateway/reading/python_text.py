"""Python literals that come in pieces, as JSON: models that saw Python write {'a': None, 'b': [1]}.

Each character is looked at once, but for a few behind a quote. Nothing is evaluated. Knows no model
and no call.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from pipeinfer.gateway.pieces import SPACE

MOST_DEPTH = 64  # brackets within brackets
AHEAD = 256  # letters behind a quote that may tell whether a text ends there

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
_OTHER_BASE = re.compile(r"[+-]?0(?:[xX][0-9a-fA-F]{1,16}|[oO][0-7]{1,16}|[bB][01]{1,16})")


class Behind(NamedTuple):
    """What stands behind a value. `whole`: where it matches, a quote before it has ended a text.
    `begun`: what may become that."""

    whole: re.Pattern[str]
    begun: re.Pattern[str]


def _one_of(letters: str) -> Behind:
    return Behind(re.compile(rf"\s*[{re.escape(letters)}]"), re.compile(r"\s*"))


_BEHIND = {
    "[": _one_of(",]"), "(": _one_of(",)"), "{": _one_of(",}"), "s": _one_of(",}"),
    "?": _one_of(":,}"), ":": _one_of(":,}"),
}  # fmt: skip


class PythonValue:
    """Finds the end of one literal whose first character is not white space, and writes it in JSON.

    Texts, numbers, lists, tuples, sets, mappings, and the words for true, false and null, Python's
    and JSON's. What is none of these is a text as it stands, and `strange` is true. A quote that
    nothing follows which may stand behind a text belongs to the text: some models escape none.

    `done`: it has ended. `broken`: it is nested too deep, or its brackets do not match.
    """

    __slots__ = (
        "_behind", "_brackets", "_empty", "_follows", "_fresh", "_held", "_place", "_quote", "_raw",
        "_said", "_word", "_word_depth", "broken", "done", "strange",
    )  # fmt: skip

    def __init__(self, behind: Behind | None = None) -> None:
        """`behind`: what may stand behind it; None: anything."""
        self._behind = behind
        # Open ones: "?" is a brace of which nobody knows yet whether it holds a set, "s".
        self._brackets: list[str] = []
        self._fresh = True  # nothing stands in the last one
        self._follows = False  # a comma came
        self._place = ""  # in a mapping: key, colon or value come next
        self._held: list[str] | None = None  # what is said within a "?"
        self._quote = ""  # of the text that it is amid
        self._raw = self._empty = False  # that text
        self._word: list[str] = []  # a number, a name or what is no literal
        self._word_depth = 0
        self._said: list[str] = []
        self.done = self.broken = self.strange = False

    def take(self, text: str, start: int, last: bool = False) -> tuple[int, str]:
        """(up to where `text` from `start` on belongs to the value for certain, that part of it in
        JSON). What is behind has to come again, with more. `last`: nothing more comes."""
        self._said = []
        at = start
        while at < len(text) and not (self.done or self.broken):
            if self._quote:
                end = self._in_text(text, at, last)
            elif self._word:
                end = self._in_word(text, at)
            else:
                end = self._outside(text, at)
            if end == at:
                break
            at = end
        return at, "".join(self._said)

    def end(self) -> str:
        """No more of it comes: the rest of a number or word."""
        self._said = []
        if self._word:
            self._end_word()
        return "".join(self._said)

    # --------------------------------------------------------------------------------- brackets

    def _outside(self, text: str, at: int) -> int:
        char = text[at]
        if char in SPACE:
            return at + 1
        if char in _QUOTES:
            self._open_text(char)
        elif char in "([{":
            self._open(char)
        elif char in ")]}":
            return self._close(char, at)
        elif char == ",":
            return self._comma(at)
        elif char == ":" and self._place == "colon":
            self._settle("{")
            self._say(": ")
            self._place = "value"
        else:
            self._word.append(char)
        return at + (not self.broken)

    def _open(self, char: str) -> None:
        if self._brackets and self._brackets[-1] == "?":
            self._settle("s")
        key = self._brackets[-1:] == ["{"] and self._place != "value"
        if key or len(self._brackets) >= MOST_DEPTH:
            self.broken = True
            return
        self._begin()
        self._fresh, self._follows = True, False
        if char == "{":
            self._brackets.append("?")
            self._held, self._place = [], "key"
        else:
            self._brackets.append(char)
            self._place = ""
            self._say("[")

    def _settle(self, kind: str) -> None:
        """What a brace opened: a mapping or a set."""
        if self._brackets[-1] != "?":
            return
        held = self._held or []
        self._held, self._brackets[-1] = None, kind
        self._say("{" if kind == "{" else "[")
        for text in held:
            self._say(text)
        if kind == "s":
            self._place = ""

    def _comma(self, at: int) -> int:
        if not self._brackets:
            return self._nothing(at)
        if self._brackets[-1] == "?" and not self._fresh:
            self._settle("s")
        self._complete()
        self._follows = not self._fresh
        return at + 1

    def _complete(self) -> None:
        """The last pair of a mapping, where it lacks something."""
        if self._brackets[-1] != "{":
            return
        if self._place in ("colon", "value"):
            self._say(": null" if self._place == "colon" else "null")
            self.strange = True
        self._place = "key"

    def _close(self, char: str, at: int) -> int:
        if not self._brackets:
            return self._nothing(at)
        if _CLOSERS[self._brackets[-1]] != char:
            self.broken = True
            return at
        self._settle("{" if self._fresh else "s")
        self._complete()
        self._say("}" if self._brackets.pop() == "{" else "]")
        self._fresh = self._follows = False
        self._place = ""  # of the pair that it is the value of
        self.done = not self._brackets
        return at + 1

    def _nothing(self, at: int) -> int:
        """There is no value."""
        self._say("null")
        self.strange = self.done = True
        return at

    def _begin(self) -> None:
        """A value, or a key, begins."""
        if self._brackets and not self._fresh and self._place != "value":
            self.strange = self.strange or not self._follows
            self._say(", ")
            if self._brackets[-1] == "{":
                self._place = "key"
        self._fresh = self._follows = False

    def _ended(self) -> None:
        """A text or word that stands there, or a key."""
        if not self._brackets:
            self.done = True
        elif self._brackets[-1] in "{?":
            self._place = "colon" if self._place == "key" else ""

    def _say(self, text: str) -> None:
        (self._said if self._held is None else self._held).append(text)

    # ------------------------------------------------------------------------------------ words

    def _in_word(self, text: str, at: int) -> int:
        found = _IN_WORD.search(text, at)
        stop = len(text) if found is None else found.start()
        if stop > at:
            self._word.append(text[at:stop])
            return stop
        char = text[at]
        if self._ends_word(char):
            self._end_word(char)
            return at if self.done else self._outside(text, at)
        if char in _QUOTES and self._prefix():
            prefix, self._word = self._prefix(), []
            self._open_text(char)
            self._raw = "r" in prefix
            return at + 1
        self._word_depth += (char in "([{") - (char in ")]}")
        self._word.append(char)
        return at + 1

    def _ends_word(self, char: str) -> bool:
        if self._word_depth:
            return False
        return char in ",)]}" or (char == ":" and self._place == "key")

    def _prefix(self) -> str:
        """Of a text; empty if the word is none."""
        if len(self._word) > 2:
            return ""
        word = "".join(self._word).lower()
        return word if word in _PREFIXES else ""

    def _end_word(self, behind: str = "") -> None:
        """`behind`: the letter that follows."""
        word = "".join(self._word).strip(SPACE)
        self._word = []
        self._begin()
        said = _WORDS.get(word) or _number(word)
        if not said:
            self.strange = True
            said = f'"{_json(word)}"'
        elif self._place == "key" and (self._brackets[-1] == "{" or behind == ":"):
            said = f'"{said}"'
        self._say(said)
        self._ended()

    # ------------------------------------------------------------------------------------ texts

    def _open_text(self, quote: str) -> None:
        self._begin()
        self._say('"')
        self._quote, self._raw, self._empty = quote, False, True

    def _in_text(self, text: str, at: int, last: bool) -> int:
        found = _IN_TEXT.search(text, at)
        stop = len(text) if found is None else found.start()
        char = text[at]
        if stop > at:
            return self._literal(text[at:stop], at)
        if char == "\\":
            return self._escape(text, at, last)
        if char != self._quote[0]:
            return self._literal(char, at)
        if len(self._quote) == 3:
            return self._end_long(text, at, last)
        if self._empty and text[at + 1 : at + 2] == char:
            self._quote, self._empty = 3 * char, False
            return at + 2
        if self._empty and at + 1 == len(text) and not last:
            return at
        ends = self._text_ends(text, at + 1, last)
        if ends is None:
            return at
        if not ends:
            self.strange = True
            return self._literal(char, at)
        return self._end_text(at + 1)

    def _literal(self, text: str, at: int) -> int:
        self._say(_json(text))
        self._empty = False
        return at + len(text)

    def _end_text(self, at: int) -> int:
        self._say('"')
        self._quote = ""
        self._ended()
        return at

    def _end_long(self, text: str, at: int, last: bool) -> int:
        many = text[at : at + 3]
        if many == self._quote:
            return self._end_text(at + 3)
        if at + len(many) == len(text) and self._quote.startswith(many) and not last:
            return at
        return self._literal(text[at], at)

    def _text_ends(self, text: str, at: int, last: bool) -> bool | None:
        """Whether it ends before `at`; None while nobody knows."""
        behind = self._behind
        if self._brackets:
            key = self._brackets[-1] == "{" and self._place == "key"
            behind = _BEHIND[":" if key else self._brackets[-1]]
        if behind is None:
            return True
        ahead = text[at : at + AHEAD]
        if behind.whole.match(ahead):
            return True
        if len(ahead) < AHEAD and behind.begun.fullmatch(ahead):
            return True if last else None
        return False

    def _escape(self, text: str, at: int, last: bool) -> int:
        """From a backslash on. What escapes nothing is a backslash and a letter in Python, too."""
        if self._raw:
            return self._unescaped(text, at, last)
        found = _ESCAPE.match(text, at)
        if found is None or _ESCAPE_BEGUN.fullmatch(text, at):
            return len(text) if last else at
        two, four, eight, octal, char = found.groups()
        if char is None:
            digits = two or four or eight
            self._say(_letter(int(digits, 16) if digits else int(octal, 8), digits or octal))
        elif char == "/" and self._quote[0] == '"':
            self._say("/")  # as JSON has it
        else:
            self._say(_ESCAPES.get(char, "\\\\" + _json(char)))
        self._empty = False
        return found.end()

    def _unescaped(self, text: str, at: int, last: bool) -> int:
        """A backslash of a raw text, and what it keeps from ending the text."""
        if at + 1 == len(text) and not last:
            return at
        behind = text[at + 1 : at + 2]
        return self._literal("\\" + behind if behind in ("\\", self._quote[0]) else "\\", at)


def _letter(code: int, digits: str) -> str:
    """In JSON, the letter of that number; where it is none, its digits."""
    if code > 0x10FFFF:
        return _json(digits)
    return _json(chr(code)) if not 0xD800 <= code < 0xE000 else f"\\u{code:04x}"


def _number(word: str) -> str:
    """In JSON; empty if it is none. Long ones are not computed."""
    if _OTHER_BASE.fullmatch(word):
        return str(int(word, 0))
    found = _NUMBER.fullmatch(word)
    if found is None or not (found[2] or (found[3] or "").strip("._")):
        return ""
    whole = (found[2] or "").replace("_", "").lstrip("0") or "0"
    fraction = (found[3] or "").replace("_", "")
    sign = "-" if found[1] == "-" else ""
    return f"{sign}{whole}{'.0' if fraction == '.' else fraction}{found[4] or ''}"


def _json(text: str) -> str:
    return msgspec.json.encode(text).decode()[1:-1]
