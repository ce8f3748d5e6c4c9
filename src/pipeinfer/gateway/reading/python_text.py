"""Python literals that come in pieces, as JSON: models that saw Python write {'a': None, 'b': [1]}.

Each character is looked at once. Knows no model and no call.
"""

from __future__ import annotations

import msgspec

from pipeinfer.gateway.pieces import SPACE

_WORDS = {"True": "true", "False": "false", "None": "null"}
# Behind a backslash: what JSON writes for it, and how many hexadecimal digits follow.
_ESCAPES = {"a": "\\u0007", "v": "\\u000b", "0": "\\u0000", "'": "'", "\n": ""} | {
    char: "\\" + char for char in '"\\bfnrt'
}
_DIGITS = {"x": 2, "u": 4, "U": 8}


class PythonValue:
    """Finds the end of one literal whose first character is not white space, and writes it in JSON.

    Texts, numbers, lists, tuples, mappings, and the words for true, false and null. Anything else
    is written as it came.
    """

    __slots__ = ("_comma", "_depth", "_digits", "_left", "_quote", "_said", "_word", "done")

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""  # of the text that it is amid
        self._digits: str | None = None  # of an escape; empty behind the backslash
        self._left = 0  # digits to come
        self._word = ""  # a number, or the begin of a word
        self._comma = False  # one that a value must follow
        self._said: list[str] = []
        self.done = False

    def take(self, text: str, start: int) -> tuple[int, str]:
        """(up to where `text` from `start` on belongs to the value, that part of it in JSON)."""
        self._said = []
        at = start
        while at < len(text) and not self.done:
            char = text[at]
            if self._quote:
                self._in_text(char)
            elif self._ends(char):
                break
            else:
                self._outside(char)
            at += 1
        return at, "".join(self._said)

    def end(self) -> str:
        """No more of it comes: the rest of a number or word."""
        self._said = []
        self._end_word()
        return "".join(self._said)

    def _ends(self, char: str) -> bool:
        """Whether a number or word ends before `char`, and all of the value with it."""
        if self._depth or (char not in ",)]}" and (char not in SPACE or not self._word)):
            return False
        self._end_word()
        self.done = True
        return True

    def _end_word(self) -> None:
        if self._word:
            self._say(_WORDS.get(self._word, self._word))
        self._word = ""

    def _say(self, text: str) -> None:
        if self._comma:
            self._comma = False
            text = ", " + text
        self._said.append(text)

    def _outside(self, char: str) -> None:
        if char in SPACE:
            self._end_word()
        elif char in "'\"":
            self._end_word()
            self._say('"')
            self._quote = char
        elif char in "([{":
            self._end_word()
            self._say("{" if char == "{" else "[")
            self._depth += 1
        elif char in ")]}":
            self._end_word()
            self._comma = False  # Python may have one before the end
            self._say("}" if char == "}" else "]")
            self._depth -= 1
            self.done = self._depth <= 0
        elif char == ",":
            self._end_word()
            self._comma = True
        elif char == ":":
            self._end_word()
            self._say(": ")
        else:
            self._word += char

    def _in_text(self, char: str) -> None:
        if self._digits is not None:
            self._escaped(char)
        elif char == "\\":
            self._digits = ""
        elif char == self._quote:
            self._said.append('"')
            self._quote = ""
            self.done = self._depth == 0
        else:
            self._said.append(_json(char))

    def _escaped(self, char: str) -> None:
        """Behind a backslash. What escapes nothing is a backslash and a letter in Python, too."""
        if not self._left:
            self._left = _DIGITS.get(char, 0)
            if not self._left:
                self._digits = None
                self._said.append(_ESCAPES.get(char, "\\\\" + _json(char)))
            return
        self._digits = (self._digits or "") + char
        self._left -= 1
        if not self._left:
            self._said.append(_letter(self._digits))
            self._digits = None


def _letter(digits: str) -> str:
    """In JSON, the letter of that number; where it is none, nothing is lost but the backslash."""
    try:
        number = int(digits, 16)
        return _json(chr(number)) if not 0xD800 <= number < 0xE000 else f"\\u{number:04x}"
    except (ValueError, OverflowError):
        return _json(digits)


def _json(char: str) -> str:
    return msgspec.json.encode(char).decode()[1:-1]
