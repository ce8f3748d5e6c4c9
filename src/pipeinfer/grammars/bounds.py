"""How large a grammar may be, checked on its text before anybody compiles it.

What passes may still be refused by the compiler. Imports no compiler, so that a gateway may check.
"""

from __future__ import annotations

import re

import msgspec

from pipeinfer.json_values import JsonObject, JsonValue
from pipeinfer.params import StructuredOutputs

# Chains of references recurse in the compiler, and no limit of its own counts them. So much text
# holds chains of a few thousand, which STACK in compiling.py survives.
MAX_GRAMMAR_BYTES = 64 * 1024
# Levels of brackets outside of strings in a JSON schema, and of any brackets in the other forms.
# The compiler refuses objects that are nested 62 deep; each level of objects takes two here.
MAX_GRAMMAR_DEPTH = 128
MAX_GBNF_LETTERS = 16 * 1024  # letters; its translation takes 0.4 s, and grows with the square
# Why an engine does not take a grammar now, which another time it may.
NO_GRAMMAR_MEMORY = "the grammars in use leave no memory for another one; try again later"
# Of the stack that a validation has; an engine's thread has twice as much (compiling.py).
VALIDATION_STACK_BYTES = 32 * 1024 * 1024
FORMS = ("json", "regex", "choice", "grammar")
# Units of work (work.py) from which on a mask is costly: engines report it, and schedulers count
# it. Of ambiguous rules so many take 0.05 to 0.3 ms, of a lexer that is being built about 10 ms.
COSTLY_MASK_UNITS = 1_000

# What a JSON schema within a grammar would tell the compiler, which would let white space go on
# without end. Of schemas by themselves it is replaced.
COMPILER_OPTIONS = "x-guidance"
_ESCAPES = re.compile(r"\\u([0-9a-fA-F]{4})")

_OPEN, _CLOSE = "[{(", "]})"


class VocabularySetup(msgspec.Struct, frozen=True, array_like=True):
    """What the vocabulary is made of, see compiling.GrammarVocabulary; `stack`: bytes, to compile
    with."""

    tokenizer: str
    width: int
    end_ids: tuple[int, ...]
    known_ids: tuple[int, ...]
    stack: int = VALIDATION_STACK_BYTES


class GrammarError(ValueError):
    """A grammar that is not served; the text says why, for the client."""


def form_of(spec: StructuredOutputs) -> str:
    """Which of FORMS is given. GrammarError unless it is exactly one."""
    given = [form for form in FORMS if getattr(spec, form) is not None]
    if len(given) != 1:
        said = " and ".join(given) or "none"
        raise GrammarError(f"exactly one of {', '.join(FORMS)} must be given, not {said}")
    return given[0]


def check(spec: StructuredOutputs) -> str:
    """The form of a grammar that is not too large; else GrammarError."""
    form = form_of(spec)
    if form == "choice":
        return _check_choice(spec.choice or ())
    text = getattr(spec, form)
    _check_bytes(form, len(text.encode()))
    if form == "grammar":
        if "::=" in text and len(text) > MAX_GBNF_LETTERS:
            raise GrammarError(f"a GBNF grammar may have at most {MAX_GBNF_LETTERS} letters")
        if COMPILER_OPTIONS in _ESCAPES.sub(_unescaped, text):
            raise GrammarError(f"{COMPILER_OPTIONS} is the server's: a grammar must not have it")
    depth = _depth(text, strings=form == "json")
    if depth > MAX_GRAMMAR_DEPTH:
        raise GrammarError(f"{form} is nested deeper than {MAX_GRAMMAR_DEPTH} levels")
    return form


def schema_of(text: str) -> JsonObject | bool:
    """What the text of a JSON schema says. GrammarError unless that may be a schema."""
    try:
        schema: JsonValue = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise GrammarError(f"the schema is not valid JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise GrammarError("a schema must be an object")
    return schema


def _check_choice(choice: tuple[str, ...]) -> str:
    if not choice or not all(choice):
        raise GrammarError("choice must have at least one text, and none of them empty")
    _check_bytes("choice", sum(len(text.encode()) for text in choice))
    return "choice"


def _unescaped(found: re.Match[str]) -> str:
    return chr(int(found.group(1), 16))


def _check_bytes(form: str, size: int) -> None:
    if size > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"{form} has {size} bytes, at most {MAX_GRAMMAR_BYTES} are served")


def _depth(text: str, strings: bool) -> int:
    """The deepest level of brackets. `strings`: what stands between quotes does not count."""
    level = deepest = 0
    inside = escaping = False
    for letter in text:
        if inside:
            inside = escaping or letter != '"'
            escaping = letter == "\\" and not escaping
        elif letter == '"' and strings:
            inside = True
        elif letter in _OPEN:
            level += 1
            deepest = max(deepest, level)
        elif letter in _CLOSE:
            level = max(0, level - 1)
    return deepest
