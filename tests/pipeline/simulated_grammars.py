"""Grammars of the simulation: what may come next is a function of all output ids so far.

A grammar is its kind and a number of tokens, written as a regular expression `KIND{TOKENS}`: behind
so many tokens only an end is allowed. What becomes of it depends on the kind:

- `w`: it is served;
- `dead`: it is served, but behind its tokens it allows nothing, not even an end;
- `odd`: only engines of odd incarnation can have it, whatever the trial said;
- `huge`: no engine can have it, though its trial went well;
- `wrong`: its trial says no.

At some of its tokens only one is allowed, and that is known before: it is forced.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from pipeinfer.params import StructuredOutputs
from scheduler.model_engine import VOCABULARY, next_token

ENDS = (3, 11)
FORCED = (4, 5, 6)  # numbers of tokens, modulo 7, behind which the next one is
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
    """Of one row, whose output so far is `ids`; see grammars/masks.py:MaskSource."""

    matcher = None

    def __init__(self, spec: StructuredOutputs, ids: list[int]) -> None:
        self._grammar = grammar_of(spec)
        self._read = 0
        self._sum = 0
        self.feed(ids)

    def feed(self, ids: list[int]) -> str:
        for token in ids:
            self._read += 1
            self._sum += self._read * token
        return ""

    def force(self) -> list[int]:
        ids: list[int] = []
        while self._forced:
            ids += self.allowed()
            self.feed(ids[-1:])
        return ids

    @property
    def _forced(self) -> bool:
        return self._read < self._grammar.tokens and self._read % 7 in FORCED

    def allowed(self) -> list[int]:
        """What may come next."""
        if self._read < self._grammar.tokens:
            every = [t for t in range(VOCABULARY) if t not in ENDS and (self._sum + t) % 3]
            return [every[self._sum % len(every)]] if self._forced else every
        return [] if self._grammar.kind == "dead" else [ENDS[self._sum % len(ENDS)]]

    def check(self, words: np.ndarray) -> str:
        bits = np.zeros(32 * len(words), dtype=bool)
        bits[self.allowed()] = True
        words[:] = np.packbits(bits, bitorder="little").view("<i4")
        return "" if bits.any() else DEAD


WORDS = VOCABULARY // 32 + 1  # int32, of a mask


def choice(token: int, words: np.ndarray) -> int:
    """The id that is sampled where `token` would be without the mask: the next one in it."""
    allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    later = allowed[allowed >= token]
    return int(later[0] if len(later) else allowed[0])


def expected_outputs(
    prompt: list[int], max_tokens: int, noise: list[int], spec: StructuredOutputs
) -> list[int]:
    """What an undisturbed request with a grammar produces."""
    outputs: list[int] = []
    matcher = Matcher(spec, [])
    while len(outputs) < max_tokens and not (outputs and outputs[-1] in ENDS):
        words = np.zeros(WORDS, dtype=np.int32)
        if matcher.check(words):
            break
        token = choice(next_token([*prompt, *outputs, *noise]), words)
        matcher.feed([token])
        outputs.append(token)
    return outputs


def dies(spec: StructuredOutputs, max_tokens: int) -> bool:
    """Whether nothing is allowed before the request has all of its tokens."""
    grammar = grammar_of(spec)
    return grammar.kind == "dead" and grammar.tokens < max_tokens
