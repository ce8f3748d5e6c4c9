"""Which tokens each row of a step may sample: one mask a row, a function of the row's ids alone.

A row's source is transient: it can be rebuilt from the ids at any time, and gives the same masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par

from pipeinfer.grammars.compiling import Grammar


class MaskSource(Protocol):
    """What decides on the next token of one row."""

    def feed(self, ids: Sequence[int], /) -> str:
        """The row's next output ids; "" or what is wrong with them."""
        ...

    def fill(self, words: np.ndarray, /) -> str:
        """Sets the bits of allowed ids in `words` int32 [W]; "" or why there are none."""
        ...


class GrammarSource:
    """By a grammar. Ids that end a request are not fed: the grammar is over by then."""

    def __init__(self, grammar: Grammar, ids: Sequence[int] = ()) -> None:
        self._vocabulary = grammar.vocabulary
        self.matcher: LLMatcher = grammar.matcher()
        self.error = ""
        self.feed(ids)

    def feed(self, ids: Sequence[int]) -> str:
        if self.error:
            return self.error
        real = [i for i in ids if i not in self._vocabulary.ends]
        taken = self.matcher.try_consume_tokens(real) if real else 0
        self.error = self.matcher.get_error() if self.matcher.is_error() else ""
        if not self.error and taken < len(real):
            self.error = f"the grammar does not allow token {real[taken]}"
        return self.error

    def fill(self, words: np.ndarray) -> str:
        return fill_all(LLExecutor(1), [self], words[None])[0]

    def check(self, words: np.ndarray) -> str:
        """Of what the matcher has just filled in; leaves what may be sampled at all."""
        if self.matcher.is_error():  # its mask is that of an ordinary end
            self.error = self.error or self.matcher.get_error()
        if not self.error:
            words &= self._vocabulary.sampled
            if not words.any():
                self.error = "the grammar allows no token of this model"
        if self.error:
            words[:] = 0
        return self.error


def fill_all(
    executor: LLExecutor, sources: Sequence[GrammarSource], masks: np.ndarray
) -> list[str]:
    """Fills row i of `masks` int32 [R, W] for source i, all in one parallel call; what went wrong
    for each, or "". A row that failed allows nothing; the others are not touched by it."""
    whole = [(source.matcher, i) for i, source in enumerate(sources) if not source.error]
    if whole:
        fill_next_token_bitmask_par(executor, whole, masks)
    return [source.check(masks[i]) for i, source in enumerate(sources)]
