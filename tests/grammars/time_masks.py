"""What masks cost in units of work and in milliseconds.

`python tests/grammars/time_masks.py MODEL`. On one thread; each row is filled and fed twice, first
by a new grammar, then by one whose lexer knows the text.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
from llguidance import LLExecutor
from tokenizers import Tokenizer

from pipeinfer.checkpoint.source import resolve_model
from pipeinfer.grammars.compiling import Grammar, GrammarVocabulary, mask_cost
from pipeinfer.grammars.masks import GrammarSource, fill_masks
from pipeinfer.params import StructuredOutputs
from pipeinfer.text import grammar_setup

TEXT = {"type": "string"}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": TEXT,
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}},
        "address": {
            "type": "object",
            "properties": {"street": TEXT, "zip": {"type": "string", "pattern": "[0-9]{5}"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
FILLED = {"name": "Ada Lovelace", "age": 36, "tags": ["a", "b"]}
FILLED["address"] = {"street": "Main Street 1", "zip": "12345"}


def ambiguous(rules: int) -> str:
    """Each letter may go on with, or begin, any of so many rules."""
    names = " | ".join(f"t{i}" for i in range(rules))
    bodies = [f"t{i}: /[a-z]{{1,{i + 1}}}/ t{i * 7 % rules}?" for i in range(rules)]
    return "\n".join(["start: r+", f"r: {names}", *bodies])


WORDS = "thequickbrownfoxjumpsoverthelazydog"
CASES = {
    "a regular expression": ({"regex": "[a-f]{14,20}-[0-9]{2}"}, "abcdefabcdefab-12"),
    "a JSON schema": ({"json": json.dumps(SCHEMA)}, json.dumps(FILLED)),
    "10 ambiguous rules": ({"grammar": ambiguous(10)}, WORDS),
    "60 ambiguous rules": ({"grammar": ambiguous(60)}, WORDS),
}


def cost(grammar: Grammar, ids: list[int]) -> tuple[int, float]:
    """Units and milliseconds of a mask and the token behind it, on average."""
    executor, source = LLExecutor(1), GrammarSource(grammar)
    words = np.zeros((1, grammar.vocabulary.words), dtype=np.int32)
    matcher = source.matcher
    assert matcher is not None
    before, begun = mask_cost(matcher), time.perf_counter()
    for token in ids:
        why = fill_masks(executor, [source], words)[0] or source.feed([token])
        assert not why, why
    seconds = time.perf_counter() - begun
    return mask_cost(matcher).since(before).units // len(ids), 1e3 * seconds / len(ids)


def main(model: str) -> None:
    setup = grammar_setup(Path(resolve_model(model, "")))
    vocabulary = GrammarVocabulary(setup.tokenizer, setup.width, setup.end_ids, setup.known_ids)
    tokenizer = Tokenizer.from_str(setup.tokenizer)
    print(f"{setup.width:,} ids\n| form | units | ms | ms, known text |\n| --- | --- | --- | --- |")
    for name, (form, text) in CASES.items():
        grammar = Grammar(vocabulary, StructuredOutputs(**form))
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        (units, first), (_, again) = cost(grammar, ids), cost(grammar, ids)
        print(f"| {name} | {units:,} | {first:.2f} | {again:.2f} |")


if __name__ == "__main__":
    main(sys.argv[1])
