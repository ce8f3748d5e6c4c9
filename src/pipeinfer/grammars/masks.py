"""Which tokens each row of a step may sample: one mask a row, a function of the row's ids alone.

A row's source is transient: it can be rebuilt from the ids at any time, and gives the same masks.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par

from pipeinfer.grammars.compiling import Grammar, Vocabulary, complaint
from pipeinfer.grammars.thoughts import ThoughtReader
from pipeinfer.params import Thoughts

# Ids that are read again where a row moves to another lane: a millisecond for eight rows.
MOST_READ = 64
MOST_FORCED = 1024  # ids at a time: what is left is forced again
MOST_SPACES = 4  # tokens before a form: a model that says them without end would not come to it


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

    def takes(self, token: int) -> bool:
        """Whether the grammar allows it next."""
        return not self.error and self._matcher.validate_tokens([token]) == 1

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
    """By a grammar that begins behind thoughts, amid which all is free except an end, which would
    leave the grammar's text out. Before them only the opening tag, where it is one token, and a
    little white space are free: anything else is the grammar's first token."""

    def __init__(
        self, grammar: Grammar, thoughts: Thoughts, ids: Sequence[int] = (), place: int = 0
    ) -> None:
        self._grammar = grammar
        self._vocabulary = grammar.vocabulary
        self._place = place
        self._thoughts = ThoughtReader(self._vocabulary, thoughts)
        opening = self._vocabulary.spelled(thoughts.opening)
        self._opening = self._vocabulary.mask(opening) if len(opening) == 1 else None
        self._source = GrammarSource(grammar, place=place)
        self._spaces = MOST_SPACES if grammar.padded else 0  # that may still come before it
        self.feed(ids)

    @property
    def matcher(self) -> LLMatcher | None:
        return None if self._thoughts.where == "open" else self._source.matcher

    def feed(self, ids: Sequence[int]) -> str:
        for at, token in enumerate(ids):
            if self._thoughts.where == "over":
                return self._source.feed(ids[at:])
            if error := self._read(token):
                return error
        return ""

    def _read(self, token: int) -> str:
        """The next one of an answer whose thoughts are not over."""
        thoughts, before = self._thoughts, self._thoughts.where
        thoughts.read(token)
        if before == "before" and thoughts.where == "open":  # what came before was not the form
            self._source = GrammarSource(self._grammar, place=self._place)
        elif before == "before" and not self._pads(token):
            self._spaces = 0
            return self._source.feed([token])
        if thoughts.where == "over" and (rest := thoughts.rest.lstrip()):
            return self._source.feed(self._vocabulary.tokens.tokenize_bytes(rest))
        return ""

    def _pads(self, token: int) -> bool:
        """Whether it is white space that the grammar has not got."""
        padding = self._spaces > 0 and self._thoughts.blank and not self._source.takes(token)
        self._spaces -= padding
        return padding

    def force(self) -> list[int]:
        return self._source.force() if self._thoughts.where == "over" else []

    def check(self, words: np.ndarray) -> str:
        where = self._thoughts.where
        if where == "open":
            words[:] = self._vocabulary.no_end
            unfit = self._thoughts.unfit()
            if unfit is not None:
                words &= ~unfit
            return ""
        error = self._source.check(words)
        if not error and self._thoughts.blank:
            if self._opening is not None:
                words |= self._opening
            if self._spaces > 0:
                words |= self._vocabulary.spaces
        return error


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
    """As the one `behind` it, but after `budget` tokens of thoughts their closing tag comes,
    whatever the model thinks. `output` was read by the one behind."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        behind: MaskSource,
        budget: int,
        thoughts: Thoughts,
        output: Sequence[int] = (),
    ) -> None:
        self._closing = vocabulary.spelled(thoughts.closing)
        self._behind = behind
        self._thoughts = ThoughtReader(vocabulary, thoughts)
        self._left = budget
        self._said = 0  # of the closing tag, since the budget is spent
        self._count(output)

    @property
    def matcher(self) -> LLMatcher | None:
        return None if self._spent else self._behind.matcher

    @property
    def _spent(self) -> bool:
        return self._thoughts.where == "open" and self._left <= 0

    def feed(self, ids: Sequence[int]) -> str:
        self._count(ids)
        return self._behind.feed(ids)

    def force(self) -> list[int]:
        ids = [] if self._thoughts.where == "open" else self._behind.force()
        self._count(ids)
        return ids

    def check(self, words: np.ndarray) -> str:
        if not self._spent:
            return self._behind.check(words)
        _only(self._closing[self._said % len(self._closing)], words)
        return ""

    def _count(self, ids: Sequence[int]) -> None:
        for token in ids:
            self._said += self._spent
            amid = self._thoughts.where == "open"
            self._thoughts.read(token)
            self._left -= amid and self._thoughts.where == "open"


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
    grammar: Grammar, output: Sequence[int], thoughts: Thoughts | None, place: int = 0
) -> MaskSource:
    """Of a request with so much `output`, ids: a grammar begins behind the thoughts, if there may
    be any."""
    if thoughts is None or thoughts.state == "over":
        return GrammarSource(grammar, output, place)
    return LaterSource(grammar, thoughts, output, place)


def fill_all(executor: LLExecutor, sources: Sequence[MaskSource], masks: np.ndarray) -> list[str]:
    """Fills row i of `masks` int32 [R, W] for source i, all in one parallel call; what went wrong
    for each, or "". A row that failed allows nothing; the others are not touched by it."""
    by_grammar = [(m, i) for i, source in enumerate(sources) if (m := source.matcher) is not None]
    if by_grammar:
        fill_next_token_bitmask_par(executor, by_grammar, masks)
    return [source.check(masks[i]) for i, source in enumerate(sources)]
