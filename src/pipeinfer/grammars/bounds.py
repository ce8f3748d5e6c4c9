"""Bounds on the size of a grammar, checked on its text before it is compiled.

The compiler may still refuse what passes here. Imports no compiler, so the gateway can check a
request.
"""

from __future__ import annotations

import re

import msgspec

from pipeinfer.params import JsonObject, JsonValue, StructuredOutputs

# Chains of references recurse in the compiler, which has no limit for them. A text of this length
# has room for chains of about 5,900, for which COMPILE_STACK_BYTES in compiling.py suffices.
MAX_GRAMMAR_BYTES = 64 * 1024
# Levels of nested brackets; brackets in strings count except in a JSON schema. The compiler refuses
# objects that are nested 62 deep, and each level of objects takes two levels of brackets.
MAX_GRAMMAR_DEPTH = 128
# Characters. Translating so much GBNF takes 0.4 s, and the time grows with the square.
MAX_GBNF_LETTERS = 16 * 1024
# The error if an engine has no memory for a grammar now; a later request may succeed.
NO_GRAMMAR_MEMORY = "the grammars in use leave no memory for another one; try again later"
# Bytes of stack for compiling in a validation; an engine's thread has twice as much (compiling.py).
VALIDATION_STACK_BYTES = 32 * 1024 * 1024
FORMS = ("json", "regex", "choice", "grammar")
# A mask of at least so many units (MaskCost in compiling.py) is costly: engines report it, and
# schedulers count it. In ambiguous rules so many units take 0.05 to 0.3 ms, in a lexer that is
# being built about 10 ms.
COSTLY_MASK_UNITS = 1_000

# The key of compiler options in a JSON schema; they could allow endless white space. Lark and GBNF
# grammars must not have it; in a grammar that is a JSON schema it is overwritten.
COMPILER_OPTIONS = "x-guidance"
_ESCAPES = re.compile(r"\\u([0-9a-fA-F]{4})")

_OPEN, _CLOSE = "[{(", "]})"


class VocabularySetup(msgspec.Struct, frozen=True, array_like=True):
    """What a GrammarVocabulary is built from.

    tokenizer: tokenizer.json as text.
    width: of the logits.
    end_ids: ids that end a request.
    known_ids: ids that the tokenizer has.
    stack: bytes of stack to compile with in a validation.
    """

    tokenizer: str
    width: int
    end_ids: tuple[int, ...]
    known_ids: tuple[int, ...]
    stack: int = VALIDATION_STACK_BYTES


class GrammarError(ValueError):
    """A grammar is not served. The message says why, for the client."""


def form_of(spec: StructuredOutputs) -> str:
    """Which of FORMS `spec` has. Raises GrammarError unless it has exactly one."""
    given = [form for form in FORMS if getattr(spec, form) is not None]
    if len(given) != 1:
        said = " and ".join(given) or "none"
        raise GrammarError(f"exactly one of {', '.join(FORMS)} must be given, not {said}")
    return given[0]


def check(spec: StructuredOutputs) -> str:
    """The form of a grammar. Raises GrammarError if the grammar is too large or nested too
    deeply.
    """
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
    """The JSON schema in `text`. Raises GrammarError unless it is a JSON object or boolean."""
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
    """The deepest level of brackets in `text`. strings: whether brackets between quotes are
    ignored.
    """
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
