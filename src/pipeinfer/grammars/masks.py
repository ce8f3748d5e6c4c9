"""Which tokens each row of a step may sample: one mask a row, a function of the row's ids alone.

A row's source is transient: it can be rebuilt from the ids at any time, and gives the same masks.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par

from pipeinfer.grammars.compiling import Grammar, Vocabulary, complaint
from pipeinfer.params import CLOSING, OPENING

# Ids that are read again where a row moves to another lane: a millisecond for eight rows.
MOST_READ = 64
MOST_FORCED = 1024  # ids at a time: what is left is forced again


class MaskSource(Protocol):
    """What decides on the next token of one row."""

    @property
    def matcher(self) -> LLMatcher | None:
        """What fills the next mask, among those of other rows; None: nobody need do so."""
        ...

    def feed(self, ids: Sequence[int], /) -> str:
        """The row's next output ids; "" or what is wrong with them."""
        ...

    def force(self) -> list[int]:
        """Ids that come next whatever the model says, as far as that is known; they count as fed
        from now on."""
        ...

    def check(self, words: np.ndarray, /) -> str:
        """Sets the bits of allowed ids in `words` int32 [W], which the matcher has filled in; "" or
        why there are none."""
        ...


class GrammarSource:
    """By a grammar. Ids that end a request are not fed: the grammar is over by then. `place` tells
    rows apart, so that they spread over the grammar's lanes."""

    def __init__(self, grammar: Grammar, ids: Sequence[int] = (), place: int = 0) -> None:
        self._grammar = grammar
        self._vocabulary = grammar.vocabulary
        self._place = place
        self._read = array("i")
        self._generation = grammar.generation
        self._lane: int = place % grammar.lanes
        self._matcher = grammar.matcher(place)
        self.error = ""
        self.feed(ids)

    @property
    def matcher(self) -> LLMatcher | None:
        return None if self.error else self._matcher

    def feed(self, ids: Sequence[int]) -> str:
        if self.error:
            return self.error
        real = [i for i in ids if i not in self._vocabulary.ends]
        taken = self._matcher.try_consume_tokens(real) if real else 0
        self.error = complaint(self._matcher) if self._matcher.is_error() else ""
        if not self.error and taken < len(real):
            self.error = f"the grammar does not allow token {real[taken]}"
        self._read.extend(real)
        self._move()
        return self.error

    def _move(self) -> None:
        """To its own lane, once all are there, unless it has read too much; and to that of a
        renewed grammar."""
        grammar, generation = self._grammar, self._grammar.generation
        lane, renewed = self._place % grammar.lanes, self._generation != generation
        widened = grammar.settled and lane != self._lane and len(self._read) <= MOST_READ
        if not (widened or renewed) or self.error:
            return
        matcher, self._generation = grammar.matcher(self._place), generation
        if matcher.try_consume_tokens(self._read.tolist()) == len(self._read):
            self._matcher, self._lane = matcher, lane

    def force(self) -> list[int]:
        if self.error or self._matcher.is_stopped():
            return []
        ids = self._matcher.compute_ff_tokens()[:MOST_FORCED]
        ids = ids[: self._vocabulary.known(ids)] if ids else ids
        return ids if ids and not self.feed(ids) else []

    def check(self, words: np.ndarray) -> str:
        if self._matcher.is_error():  # its mask is that of an ordinary end
            self.error = self.error or complaint(self._matcher)
        if not self.error:
            words &= self._vocabulary.sampled
            if not words.view(np.uint32).max():  # ten times as fast as any()
                self.error = "the grammar allows no token of this model"
        if self.error:
            words[:] = 0
        return self.error


class LaterSource:
    """By a grammar that begins behind a token. All else is free before it, except an end, which
    would leave the grammar's text out."""

    def __init__(self, grammar: Grammar, ids: Sequence[int] = (), place: int = 0) -> None:
        self._free: np.ndarray = grammar.vocabulary.no_end
        self._after = grammar.after
        self._source = GrammarSource(grammar, place=place)
        self._begun = False
        self.feed(ids)

    @property
    def matcher(self) -> LLMatcher | None:
        return self._source.matcher if self._begun else None

    def feed(self, ids: Sequence[int]) -> str:
        for at, token in enumerate(ids):
            if self._begun:
                return self._source.feed(ids[at:])
            self._begun = token == self._after
        return ""

    def force(self) -> list[int]:
        return self._source.force() if self._begun else []

    def check(self, words: np.ndarray) -> str:
        if self._begun:
            return self._source.check(words)
        words[:] = self._free
        return ""


class FreeSource:
    """All that the model has."""

    matcher = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def feed(self, ids: Sequence[int]) -> str:
        return ""

    def force(self) -> list[int]:
        return []

    def check(self, words: np.ndarray) -> str:
        words[:] = self._vocabulary.sampled
        return ""


class ThinkingSource:
    """As the one `behind` it, but after `budget` tokens between OPENING and CLOSING the latter
    comes, whatever the model thinks. A prompt that ends with the ids `tail` may have opened the
    thoughts; `output` was read by the one behind. GrammarError where the model has no such tokens.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        behind: MaskSource,
        budget: int,
        tail: Sequence[int] = (),
        output: Sequence[int] = (),
    ) -> None:
        self._vocabulary = vocabulary
        self._opening, self._closing = map(vocabulary.token, (OPENING, CLOSING))
        self._behind = behind
        self._where: Literal["before", "amid", "after"] = "before"
        self._left = 0
        self._count(tail)
        self._left = budget
        self._count(output)

    @property
    def matcher(self) -> LLMatcher | None:
        return None if self._spent else self._behind.matcher

    @property
    def _spent(self) -> bool:
        return self._where == "amid" and self._left <= 0

    def feed(self, ids: Sequence[int]) -> str:
        self._count(ids)
        return self._behind.feed(ids)

    def force(self) -> list[int]:
        ids = [] if self._where == "amid" else self._behind.force()
        self._count(ids)
        return ids

    def check(self, words: np.ndarray) -> str:
        if not self._spent:
            return self._behind.check(words)
        _only(self._closing, words)
        return ""

    def _count(self, ids: Sequence[int]) -> None:
        for token in ids:
            if token == self._closing:
                self._where = "after"
            elif self._where == "amid":
                self._left -= 1
            elif token == self._opening and self._where == "before":
                self._where = "amid"


class NoSource:
    """In place of one whose grammar does not compile any more."""

    matcher = None

    def __init__(self, error: str) -> None:
        self._error = error

    def feed(self, ids: Sequence[int]) -> str:
        return self._error

    def force(self) -> list[int]:
        return []

    def check(self, words: np.ndarray) -> str:
        words[:] = 0
        return self._error


class RowSource:
    """Of one row, by `source`. What is forced may be said ahead, where the row `jumps`: then
    nothing else is allowed until the row has it, sampled or told. `at`: the position of the next
    output id."""

    def __init__(self, source: MaskSource, at: int, jumps: bool = True) -> None:
        self._source = source
        self._at = at
        self._jumps = jumps
        self._ahead: deque[int] = deque()
        self._error = ""

    @property
    def matcher(self) -> LLMatcher | None:
        return None if self._ahead else self._source.matcher

    def feed(self, ids: Sequence[int]) -> str:
        """The next output ids; "" or what is wrong with them."""
        self._at += len(ids)
        said = min(len(self._ahead), len(ids))
        for token in ids[:said]:
            if token != self._ahead.popleft():
                self._error = f"the grammar forces another token than {token}"
        return self._error or (self._source.feed(ids[said:]) if said < len(ids) else "")

    def told(self, first: int, ids: Sequence[int]) -> str:
        """The output has `ids` from position `first` on, of which some have been fed."""
        return self.feed(ids[self._at - first :])

    def force(self) -> list[int]:
        """What is said ahead from now on; empty if it is not the time."""
        if self._ahead or not self._jumps:
            return []
        ids = self._source.force()
        self._ahead.extend(ids)
        return ids

    def check(self, words: np.ndarray) -> str:
        if self._error:
            words[:] = 0
        elif self._ahead:
            _only(self._ahead[0], words)
        else:
            return self._source.check(words)
        return self._error


def _only(token: int, words: np.ndarray) -> None:
    """Makes `words` int32 [W] the mask of that one."""
    words[:] = 0
    words.view(np.uint32)[token >> 5] = 1 << (token & 31)


def source_of(
    grammar: Grammar, output: Sequence[int], tail: Sequence[int], place: int = 0
) -> MaskSource:
    """Of a request with so much `output`, ids, whose prompt ends with the ids `tail`: where that
    has the token behind which the grammar begins, the grammar begins at once."""
    if grammar.after is None or grammar.after in tail:
        return GrammarSource(grammar, output, place)
    return LaterSource(grammar, output, place)


def fill_all(executor: LLExecutor, sources: Sequence[MaskSource], masks: np.ndarray) -> list[str]:
    """Fills row i of `masks` int32 [R, W] for source i, all in one parallel call; what went wrong
    for each, or "". A row that failed allows nothing; the others are not touched by it."""
    by_grammar = [(m, i) for i, source in enumerate(sources) if (m := source.matcher) is not None]
    if by_grammar:
        fill_next_token_bitmask_par(executor, by_grammar, masks)
    return [source.check(masks[i]) for i, source in enumerate(sources)]
