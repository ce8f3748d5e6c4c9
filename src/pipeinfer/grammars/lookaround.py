"""Regular expressions that look ahead, as several that do not and must all match.

The compiler of grammars knows no look-around. Patterns of the wild have it at their beginning:
pydantic's of decimal numbers, zod's of addresses, rules for passwords.
"""

from __future__ import annotations

import re

# One letter or class of letters, at the end of a look-ahead's body.
_ONE = r"(?P<one>\[(?:\\.|[^\]\\])+\]|\\[dDsSwW]|\\[^A-Za-z0-9]|[^\\.*+?()\[\]{}|^$])"
_ALL_OF = re.compile(rf"\^?{_ONE}[*+]\$")
_SOMEWHERE = re.compile(rf"\.\*{_ONE}")
_TWICE = re.compile(rf"\.\*{_ONE}(?P=one)")
_FIRST = re.compile(_ONE)
_LOOKS = re.compile(r"\(\?(?:=|!|<=|<!)")


def without_lookaround(pattern: str) -> tuple[list[str], bool]:
    """(patterns that must all match, whether together they say all that `pattern` says: else they
    allow more). At least one pattern."""
    if not _LOOKS.search(pattern):
        return [pattern], True
    found, whole, rest = list[str](), True, pattern
    anchored = rest.startswith("^")
    rest = rest.removeprefix("^")
    while anchored and rest.startswith(("(?=", "(?!")):
        end = _closing(rest, 0)
        if end < 0:
            break
        negative, body, rest = rest[2] == "!", rest[3:end], rest[end + 1 :]
        said = _never(body) if negative else f"^(?:{body.removeprefix('^')})"
        if said is None or _LOOKS.search(said):
            whole = False
        else:
            found.append(said)
    bare = _bare(rest)
    whole = whole and bare == rest
    return [("^" if anchored else "") + bare, *found], whole


def _never(body: str) -> str | None:
    """A pattern of the texts at whose beginning `body` does not match."""
    if found := _ALL_OF.fullmatch(body):
        # Of texts that have such letters alone; with + the empty one is none of them.
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
    """A class of all letters but those of `one`."""
    if one.startswith("[^"):
        return f"[{one[2:]}"
    if one.startswith("["):
        return f"[^{one[1:]}"
    return f"[^{one}]"


def _bare(pattern: str) -> str:
    """Without what looks around, which allows more."""
    while found := _LOOKS.search(pattern):
        end = _closing(pattern, found.start())
        if end < 0:
            return ""
        pattern = pattern[: found.start()] + pattern[end + 1 :]
    return pattern


def _closing(pattern: str, at: int) -> int:
    """Where the group ends that begins `at`; -1 if it does not."""
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
