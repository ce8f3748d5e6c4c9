"""Translates regular expressions into the dialect of llguidance.

- Look-around is missing there. A look-ahead at the beginning of a pattern becomes patterns of their
  own, all of which must match. Common patterns have such look-aheads: pydantic's for decimal
  numbers, zod's for addresses, rules for passwords.
- `\\d` matches digits of all scripts there.
"""

from __future__ import annotations

import re

# One character, or a class of characters.
_ONE = r"(?P<one>\[(?:\\.|[^\]\\])+\]|\\[dDsSwW]|\\[^A-Za-z0-9]|[^\\.*+?()\[\]{}|^$])"
_ALL_OF = re.compile(rf"\^?{_ONE}[*+]\$")
_SOMEWHERE = re.compile(rf"\.\*{_ONE}")
_TWICE = re.compile(rf"\.\*{_ONE}(?P=one)")
_FIRST = re.compile(_ONE)
# An escaped character; the beginning of a class, with a "]" that is a member; the end of a class.
_DIGITS_AND_CLASSES = re.compile(r"\\.|\[\^?\]?|\]|[^\\\[\]]+|\\", re.DOTALL)
_LOOKS = re.compile(r"\(\?(?:=|!|<=|<!)")


def with_plain_digits(pattern: str) -> str:
    """`pattern` with 0 to 9 in place of `\\d`, also within classes. Within negated classes `\\d`
    stays: `[^\\d]` excludes digits of all scripts.
    """
    parts: list[str] = []
    negated: list[bool] = []  # for each class around the place
    for piece in _DIGITS_AND_CLASSES.findall(pattern):
        if piece == "\\d" and not any(negated):
            piece = "0-9" if negated else "[0-9]"
        elif piece[0] == "[":
            negated.append(piece.startswith("[^"))
        elif piece == "]" and negated:
            negated.pop()
        parts.append(piece)
    return "".join(parts)


def without_lookaround(pattern: str) -> tuple[list[str], bool]:
    """(patterns, exact): patterns without look-around that must all match, at least one.

    exact: whether together they mean the same as `pattern`. If not, they allow more.
    """
    if not _LOOKS.search(pattern):
        return [pattern], True
    found, whole, anchored = list[str](), True, pattern.startswith("^")
    at = int(anchored)
    while anchored and pattern.startswith(("(?=", "(?!"), at):
        end = _closing(pattern, at)
        if end < 0:
            break
        negative, body = pattern[at + 2] == "!", pattern[at + 3 : end]
        said = _never(body) if negative else f"^(?:{body.removeprefix('^')})"
        if said is None or _LOOKS.search(said):
            whole = False
        else:
            found.append(said)
        at = end + 1
    bare = _bare(pattern, at)
    whole = whole and len(bare) == len(pattern) - at
    return ["^" * anchored + bare, *found], whole


def _never(body: str) -> str | None:
    """A pattern for the texts at whose beginning `body` does not match; None: there is no rule for
    it.
    """
    if found := _ALL_OF.fullmatch(body):
        # `body` matches texts of such characters alone; with +, not the empty text.
        other = _other(found["one"])
        return other if "*$" in body[-2:] else f"^$|{other}"
    if found := _TWICE.fullmatch(body):
        one, other = found["one"], _other(found["one"])
        return f"^(?:{one}?{other})*{one}?$"
    if found := _SOMEWHERE.fullmatch(body):
        return f"^{_other(found['one'])}*$"
    if found := _FIRST.fullmatch(body):
        return f"^(?:$|{_other(found['one'])})"
    return None


def _other(one: str) -> str:
    """A class of all characters but those of `one`, a character or a class."""
    if one.startswith("[^"):
        return f"[{one[2:]}"
    if one.startswith("["):
        return f"[^{one[1:]}"
    return f"[^{one}]"


def _bare(pattern: str, at: int) -> str:
    """The pattern from position `at` on, without look-around; it may allow more."""
    parts: list[str] = []
    while found := _LOOKS.search(pattern, at):
        end = _closing(pattern, found.start())
        if end < 0:
            return ""
        parts.append(pattern[at : found.start()])
        at = end + 1
    return "".join((*parts, pattern[at:]))


def _closing(pattern: str, at: int) -> int:
    """The position of the bracket that closes the group at position `at`; -1: there is none."""
    level, inside, i = 0, False, at
    while i < len(pattern):
        letter = pattern[i]
        if letter == "\\":
            i += 1
        elif inside:
            inside = letter != "]"
        elif letter == "[":
            inside = True
        elif letter == "(":
            level += 1
        elif letter == ")":
            level -= 1
            if not level:
                return i
        i += 1
    return -1


# ----------------------------------------------------------------------------------------- dialects

_PIECE = re.compile(
    r"\[\^?\]?(?:\\.|[^\]\\])*\]|\\c[A-Za-z]|\\[pPux]\{[^}]*\}|\\.|\{\d+(?:,\d*)?\}|\(\?.|\{,\d|.",
    re.S,
)
# Not in the dialect: word boundaries, references to groups, atomic groups.
_UNKNOWN = re.compile(r"\\[1-9bBGkZ]|\(\?[>#(]|\{,\d")
_BEGINS = re.compile(r"(?:^|[(|]|\(\?:|\(\?P?<\w+>)$")
# Characters that are literal within classes of other dialects, but operators for the compiler,
# which has [a&&b] and [[a]b].
_CLASS = re.compile(
    r"(?<=.)(?:\\.|\[|&(?=&)|~(?=~)|-(?=-|\\[dDsSwW])|(?<=\\[dDsSwW])-(?!\]$))", re.S
)


def to_compiler_dialect(pattern: str) -> str | None:
    """A pattern without look-around in llguidance's dialect; None: it cannot be expressed there.

    Patterns of JSON Schema are those of ECMA-262; in practice they are often Python's or Go's.
    """
    parts: list[str] = []
    for found in _PIECE.finditer(pattern):
        piece = found[0]
        if len(piece) > 1 and piece[0] == "[":
            piece = _CLASS.sub(_in_class, piece)
        elif _UNKNOWN.match(piece):
            return None
        elif piece.startswith("\\c") and len(piece) > 2:
            piece = f"\\x{ord(piece[2]) % 32:02x}"
        elif piece == "\\0":
            piece = "\\x00"
        elif piece == "{":
            piece = "\\{"
        elif (piece == "^" and not _BEGINS.search(pattern[: found.start()])) or (
            piece == "$" and pattern[found.end() : found.end() + 1] not in ("", ")", "|")
        ):
            return None
        parts.append(piece)
    return "".join(parts)


def _in_class(found: re.Match[str]) -> str:
    piece = found[0]
    if piece[0] != "\\":
        return f"\\{piece}"
    return "\\x08" if piece == "\\b" else piece
