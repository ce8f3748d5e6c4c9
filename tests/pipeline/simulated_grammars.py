"""Grammars of the simulation: what may come next is a function of all output ids so far.

A grammar is its kind and a number of tokens, written as a regular expression `KIND{TOKENS}`: behind
so many tokens only an end is allowed. What becomes of it depends on the kind:

- `w`: it is served;
- `dead`: it is served, but behind its tokens it allows nothing, not even an end;
- `odd`: only engines of odd incarnation can have it, whatever the trial said;
- `huge`: no engine can have it, though its trial went well;
- `wrong`: its trial says no.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from pipeinfer.params import StructuredOutputs
from scheduler.model_engine import VOCABULARY, next_token

ENDS = (3, 11)
WRONG = "this is no grammar"
HUGE = "the grammar is too large"
DEAD = "the grammar allows nothing"


class Grammar(NamedTuple):
    """One that was read."""

    kind: str
    tokens: int


def spec_of(kind: str, tokens: int) -> StructuredOutputs:
    return StructuredOutputs(regex=f"{kind}{{{tokens}}}")


def grammar_of(spec: StructuredOutputs) -> Grammar:
    found = re.fullmatch(r"(\w+)\{(\d+)\}", spec.regex or "")
    assert found, spec
    return Grammar(found[1], int(found[2]))


def trial(spec: StructuredOutputs) -> str:
    """What the tokenizer's trial says of it; "" if nothing."""
    return WRONG if grammar_of(spec).kind == "wrong" else ""


def compiled(spec: StructuredOutputs, incarnation: int) -> str:
    """What an engine says of it; "" if nothing."""
    kind = grammar_of(spec).kind
    return HUGE if kind == "huge" or (kind == "odd" and incarnation % 2 == 0) else ""


class Matcher:
    """Of one row, whose output so far is `ids`."""

    def __init__(self, spec: StructuredOutputs, ids: list[int]) -> None:
        self._grammar = grammar_of(spec)
        self._read = 0
        self._sum = 0
        self.feed(ids)

    def feed(self, ids: list[int]) -> None:
        for token in ids:
            self._read += 1
            self._sum += self._read * token

    def choose(self, token: int) -> int | None:
        """The id that is sampled where `token` would be without it; None: nothing is allowed."""
        if self._read < self._grammar.tokens:
            while token in ENDS or (self._sum + token) % 3 == 0:
                token = (token + 1) % VOCABULARY
            return token
        return None if self._grammar.kind == "dead" else ENDS[self._sum % len(ENDS)]


def expected_outputs(
    prompt: list[int], max_tokens: int, noise: list[int], spec: StructuredOutputs
) -> list[int]:
    """What an undisturbed request with a grammar produces."""
    outputs: list[int] = []
    matcher = Matcher(spec, [])
    while len(outputs) < max_tokens and not (outputs and outputs[-1] in ENDS):
        token = matcher.choose(next_token([*prompt, *outputs, *noise]))
        if token is None:
            break
        matcher.feed([token])
        outputs.append(token)
    return outputs


def dies(spec: StructuredOutputs, max_tokens: int) -> bool:
    """Whether nothing is allowed before the request has all of its tokens."""
    grammar = grammar_of(spec)
    return grammar.kind == "dead" and grammar.tokens < max_tokens
