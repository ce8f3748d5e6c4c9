"""Lark grammars of clients as regular expressions, which can stand within a tool call.

A call has tags and escapes, and a compiler matches terminals greedily: a terminal that ends where
an escape begins would swallow the escape. One expression for the whole text avoids that. A
recursive grammar has no expression; for it the characters of its texts can be found.
Compiles nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

MAX_DEFINITION_CHARS = 64 * 1024  # letters
MAX_REGEX_CHARS = (
    32 * 1024
)  # of an expression: rules that are put in each other's places may multiply
MAX_EXPANDED_CHARS = 16 * MAX_REGEX_CHARS  # letters that are put together on the way
MAX_ATOMS = 1_000  # different letters and classes that are looked at
MAX_NESTING = 64  # of rules and brackets within each other
# A JSON string has these as escapes alone.
JSON_ESCAPED_CHARS = '"\\' + "".join(map(chr, range(32)))
_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|\#[^\n]*)
      | (?P<first>"(?:\\.|[^"\\\n])*")\s*\.\.\s*(?P<last>"(?:\\.|[^"\\\n])*")
      | (?P<string>"(?:\\.|[^"\\\n])*")(?P<fold>i?)
      | /(?P<regex>(?:\\.|[^/\\\n])+)/(?P<flags>[a-z]*)
      | %import\s+common\s*\.\s*(?P<common>\w+)(?:\s*->\s*(?P<alias>\w+))?
      | %import\s+common\s*\((?P<several>[\w\s,]*)\)
      | (?P<ignore>%ignore)
      | (?:[?!])?(?P<head>\b[A-Za-z_]\w*)\s*:
      | (?P<times>\{[\s\d,]*\}|~\s*\d+(?:\s*\.\.\s*\d+)?|[?*+])
      | (?P<name>[A-Za-z_]\w*)
      | (?P<named>->\s*\w+)
      | (?P<mark>[()\[\]|])
      | (?P<line>\s*\n\s*)
      | (?P<space>\s+)
      | (?P<other>[%@<]?[^\s]{1,40}|.)""",
    re.VERBOSE,
)
_TERMINALS = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": r"[+\-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "_EXP": r"[eE][+\-]?[0-9]+",
    "FLOAT": r"(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+\-]?[0-9]+)?|[0-9]+[eE][+\-]?[0-9]+)",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "ESCAPED_STRING": r'"(?:[^"\\]|\\.)*"',
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "SQL_COMMENT": r"--[^\n]*",
    "C_COMMENT": r"\/\*(?s:.)*?\*\/",
}
_TERMINALS["NUMBER"] = f"(?:{_TERMINALS['FLOAT']}|[0-9]+)"
_TERMINALS["SIGNED_FLOAT"] = rf"[+\-]?{_TERMINALS['FLOAT']}"
_TERMINALS["SIGNED_NUMBER"] = rf"[+\-]?{_TERMINALS['NUMBER']}"
_METACHARACTERS = re.compile(
    r"[\\.+*?()|\[\]{}^$#&~/-]"
)  # letters that mean something in an expression
_FLAGS = frozenset("imsux")


class UnsupportedGrammar(ValueError):
    """A grammar that is not converted; the message says why, for the client."""


class RecursiveGrammar(UnsupportedGrammar):
    """A grammar without an expression: a rule refers to itself."""


class _Token(NamedTuple):
    """`kind`: the name of its group in _TOKEN; texts and expressions are "regex" all."""

    kind: str
    text: str


def grammar_to_regex(definition: str) -> str:
    """One regular expression for all texts of the grammar. Raises RecursiveGrammar,
    UnsupportedGrammar.
    """
    return _Grammar(definition).expression()


def may_contain(definition: str, letters: str) -> bool:
    """Whether a text of the grammar may contain one of `letters` (ASCII); True when in doubt.
    Raises UnsupportedGrammar.
    """
    atoms: set[_Atom] = set()
    for tokens in _Grammar(definition).bodies():
        for token in tokens:
            atoms.update(_atoms(token.text) if token.kind == "regex" else ())
            if len(atoms) > MAX_ATOMS:
                return True
    return any(_matches_any(atom, letters) for atom in atoms)


class _Grammar:
    """Rules and terminals by name, each as its tokens."""

    def __init__(self, definition: str) -> None:
        self._rules: dict[str, list[_Token]] = {}
        self._ignored: list[list[_Token]] = []
        self._regex_by_rule: dict[str, str] = {}
        self._expanded_chars = 0  # letters, in all
        self._open_rules: list[str] = []  # rules that are being put together
        if len(definition) > MAX_DEFINITION_CHARS:
            raise UnsupportedGrammar(
                f"it has {len(definition)} letters, at most {MAX_DEFINITION_CHARS} are read"
            )
        self._parse(definition)
        self._ignored_regex = ""

    def bodies(self) -> Iterator[list[_Token]]:
        """The tokens of all rules and of what is ignored."""
        yield from self._rules.values()
        yield from self._ignored

    def expression(self) -> str:
        """The expression of `start`."""
        ignored = [self._expand(tokens, within=False) for tokens in self._ignored]
        self._ignored_regex = f"(?:{'|'.join(ignored)})*" if ignored else ""
        return self._expand_rule("start") + self._ignored_regex

    def _parse(self, definition: str) -> None:
        body: list[_Token] = []
        for found in _TOKEN.finditer(definition):
            kind = found.lastgroup or ""
            if found["head"]:
                body = self._rules[found["head"]] = []
            elif found["ignore"]:
                body = []
                self._ignored.append(body)
            elif found["common"]:
                self._import(found["common"], found["alias"] or found["common"])
            elif found["several"] is not None:
                for name in found["several"].replace(",", " ").split():
                    self._import(name, name)
            elif found["other"]:
                raise UnsupportedGrammar(
                    f"{found['other'][:40]!r} in it cannot be held within a call"
                )
            elif (expression := _expression(found)) is not None:
                body.append(_Token("regex", expression))
            elif kind in ("times", "name", "mark"):
                body.append(_Token(kind, found[0]))

    def _import(self, name: str, alias: str) -> None:
        if name not in _TERMINALS:
            raise UnsupportedGrammar(f"there is no common.{name[:100]}")
        self._rules[alias] = [_Token("regex", _TERMINALS[name])]

    def _expand_rule(self, name: str) -> str:
        if name in self._open_rules:
            raise RecursiveGrammar(f"its rule {name[:100]} refers to itself")
        if name not in self._rules:
            raise UnsupportedGrammar(f"it has no rule {name[:100]}")
        if name not in self._regex_by_rule:
            self._open_rules.append(name)
            self._regex_by_rule[name] = self._expand(self._rules[name], within=not name.isupper())
            self._open_rules.pop()
        return self._regex_by_rule[name]

    def _expand(self, tokens: list[_Token], within: bool) -> str:
        expanded, at = self._expand_choice(tokens, 0, within, 0)
        if at < len(tokens):
            raise UnsupportedGrammar(f"a bracket {tokens[at].text} closes none")
        return expanded

    def _expand_choice(
        self, tokens: list[_Token], at: int, within: bool, level: int
    ) -> tuple[str, int]:
        """(alternatives from `at` on, where they end). `within`: a rule, in which what is ignored
        may stand before terminals."""
        if level + len(self._open_rules) > MAX_NESTING:
            raise UnsupportedGrammar(f"its rules are nested deeper than {MAX_NESTING} levels")
        choices: list[list[str]] = [[]]
        while at < len(tokens) and tokens[at].text not in (")", "]"):
            token = tokens[at]
            if token == _Token("mark", "|"):
                choices.append([])
            elif token.kind == "mark":
                expanded, at = self._expand_choice(tokens, at + 1, within, level + 1)
                if at == len(tokens) or tokens[at].text != {"(": ")", "[": "]"}[token.text]:
                    raise UnsupportedGrammar(f"a bracket {token.text} is not closed")
                choices[-1].append(expanded + "?" * (token.text == "["))
            elif token.kind == "times":
                if not choices[-1]:
                    raise UnsupportedGrammar(f"{token.text} repeats nothing")
                choices[-1][-1] = f"(?:{choices[-1][-1]}){_times(token.text)}"
            elif token.kind == "regex":
                choices[-1].append(f"{self._ignored_regex if within else ''}{token.text}")
            else:
                ignored = self._ignored_regex if within and token.text.isupper() else ""
                choices[-1].append(ignored + self._expand_rule(token.text))
            at += 1
            self._count_chars(len(choices[-1][-1]) if choices[-1] else 1)
        parts = ["".join(choice) for choice in choices]
        expanded = parts[0] if len(parts) == 1 and level == 0 else f"(?:{'|'.join(parts)})"
        self._count_chars(len(expanded))
        return expanded, at

    def _count_chars(self, letters: int) -> None:
        """Adds characters to the work done. Raises UnsupportedGrammar beyond the limits."""
        self._expanded_chars += letters
        if letters > MAX_REGEX_CHARS or self._expanded_chars > MAX_EXPANDED_CHARS:
            raise UnsupportedGrammar("it is too large when its rules are put together")


def _expression(found: re.Match[str]) -> str | None:
    """The expression of a string, a range of letters or a regex; None for any other token."""
    if found["first"]:
        return f"[{_quoted(_text(found['first']))}-{_quoted(_text(found['last']))}]"
    if found["string"]:
        expanded = _quoted(_text(found["string"]))
        return f"(?i:{expanded})" if found["fold"] else f"(?:{expanded})"
    if not found["regex"]:
        return None
    flags = found["flags"]
    if set(flags) - _FLAGS:
        raise UnsupportedGrammar(f"the flags {flags} of /{found['regex'][:100]}/ are not known")
    return f"(?{flags}:{found['regex']})"


def _times(text: str) -> str:
    """A repetition as expressions write it."""
    bare = re.sub(r"[\s{}~]", "", text)
    return bare if bare in ("?", "*", "+") else f"{{{bare.replace('..', ',')}}}"


def _text(literal: str) -> str:
    try:
        return json.loads(literal, strict=False)
    except ValueError:
        raise UnsupportedGrammar(f"the text {literal[:100]} is not written as in JSON") from None


def _quoted(text: str) -> str:
    """An expression that matches exactly this text."""
    return _METACHARACTERS.sub(r"\\\g<0>", text).replace("\n", "\\n")


# ---------------------------------------------------------------------- letters of an expression

_GROUP = re.compile(r"\((?:\?(?:P?<\w+>|(?P<flags>[a-z-]*)(?P<alone>[:)])))?")
_CLASS_NAMES = {  # of POSIX, in ASCII
    "alpha": "a-zA-Z", "digit": "0-9", "alnum": "a-zA-Z0-9", "upper": "A-Z", "lower": "a-z",
    "word": r"\w", "xdigit": "0-9a-fA-F", "space": r"\s", "blank": r" \t", "cntrl": r"\x00-\x1f",
    "punct": r"!-\/:-@\[-`{-~", "graph": "!-~", "print": " -~", "ascii": r"\x00-\x7f",
}  # fmt: skip
_IN_CLASS = re.compile(r"\[:(\w+):\]|\\x\{([0-9a-fA-F]{1,6})\}")
_ESCAPE = re.compile(
    r"\\(?:[pP](?:\{[^{}]*\}|\w)|[xuU]\{[0-9a-fA-F]*\}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}"
    r"|U[0-9a-fA-F]{8}|.)"
)
_TIMES = re.compile(r"\{\d*,?\d*\}")


class _Atom(NamedTuple):
    """Part of an expression that matches one letter. `dotall`: a dot matches a line end."""

    text: str
    dotall: bool


def _matches_any(atom: _Atom, letters: str) -> bool:
    """Whether the atom may match one of `letters`."""
    text = atom.text
    if text == ".":
        return atom.dotall or letters != "\n"
    if text[0] == "[":
        text = _IN_CLASS.sub(_in_python, text)
        if re.search(r"&&|--|~~|(?<!\\)\[|\\[pPuU]\{|\\[pP]", text[1:]):
            return True
    elif text[:2] in (r"\p", r"\P") or text[1:3] in ("x{", "u{", "U{"):
        return True
    try:
        return re.search(text, letters, re.ASCII) is not None
    except re.error:
        return True


def _in_python(found: re.Match[str]) -> str:
    if found[2]:
        return rf"\U{int(found[2], 16):08x}"
    return _CLASS_NAMES.get(found[1], r"\x00-\x7f")


def _atoms(body: str) -> Iterator[_Atom]:
    """The atoms of an expression, in order."""
    dotall, at = False, 0
    outside: list[bool] = []
    while at < len(body):
        text = letter = body[at]
        if letter == "(":
            group = _GROUP.match(body, at)
            if group is None:
                raise UnsupportedGrammar(
                    f"{body[at : at + 100]} in an expression cannot be held within a call"
                )
            on, _, off = (group["flags"] or "").partition("-")
            if group["alone"] != ")":
                outside.append(dotall)
            dotall = ("s" in on or dotall) and "s" not in off
            text = group[0]
        elif letter == ")":
            dotall = outside.pop() if outside else dotall
        elif letter == "{" and (times := _TIMES.match(body, at)):
            text = times[0]
        elif letter == "[":
            text = body[at : _class_end(body, at)]
            yield _Atom(text, dotall)
        elif letter == "\\":
            escape = _ESCAPE.match(body, at)
            text = escape[0] if escape else letter
            yield _Atom(text, dotall)
        elif letter == ".":
            yield _Atom(letter, dotall)
        elif letter not in "|*+?^$":
            yield _Atom(re.escape(letter), dotall)
        at += len(text)


def _class_end(body: str, at: int) -> int:
    """Index behind the bracket that closes the class that opens at `at`."""
    depth, i = 0, at
    while i < len(body):
        if body[i] == "[":
            depth += 1
            i += 1 + body.startswith("^", i + 1)
            i += body.startswith("]", i)  # the first one is a letter
            continue
        if body[i] == "]":
            depth -= 1
            if not depth:
                return i + 1
        i += 1 + (body[i] == "\\")
    raise UnsupportedGrammar(f"the class {body[at : at + 100]} has no end")
