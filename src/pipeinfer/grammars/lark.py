"""Texts of grammars: llama.cpp's form made the compiler's, and JSON schemas within.

Runs where grammars are compiled, and nowhere else.
"""

from __future__ import annotations

import json
import re

from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from pipeinfer.grammars.bounds import GrammarError
from pipeinfer.json_values import JsonObject

# Strings, regular expressions and comments, in which %json is a text like any other. One that has
# no end is taken up to its line's: searching again behind each escaped quote takes a square's time.
_SCHEMA = re.compile(
    r'"(?:\\.|[^"\\\n])*"?|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/?|(?P<json>%json\s*)(?=\{)'
)
_decode = json.JSONDecoder().raw_decode


def as_lark(text: str) -> str:
    """`text`, translated if it is GBNF (`root ::= ...`). GrammarError."""
    if "::=" not in text or is_lark_syntax(text):
        return text
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # the library raises bare Exception
        said = str(error).partition("\n")[0] or "it is nested too deeply"
        raise GrammarError(f"the grammar is no GBNF: {said}") from None


def with_options(text: str, options: JsonObject) -> str:
    """With `options` for the compiler in each schema that stands behind %json."""
    parts: list[str] = []
    at = 0
    while (found := _SCHEMA.search(text, at)) is not None:
        parts.append(text[at : found.end()])
        at = found.end()
        if found["json"]:
            try:
                schema, at = _decode(text, at)
            except (ValueError, RecursionError):
                continue  # the compiler says what is wrong with it
            parts.append(json.dumps({**schema, "x-guidance": options}))
    return "".join((*parts, text[at:]))
