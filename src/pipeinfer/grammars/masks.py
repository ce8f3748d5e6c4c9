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

from pipeinfer.grammars.compiling import Grammar, GrammarVocabulary, error_message
from pipeinfer.params import Thoughts, ThoughtState

# Ids that are read again where a row moves to another copy: a millisecond for eight rows.
MAX_REFED_IDS = 64
MAX_FORCED_IDS = 1024  # ids at a time: what is left is forced again
MAX_SPACE_TOKENS = (
    4  # tokens before a form: a model that says them without end would not come to it
)


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
    rows apart, so that they spread over the grammar's copies."""

    def __init__(self, grammar: Grammar, ids: Sequence[int] = (), place: int = 0) -> None:
        self._grammar = grammar
        self._vocabulary = grammar.vocabulary
        self._row = place
        self._fed = array("i")
        self._generation = grammar.generation
        self._copy: int = place % grammar.num_copies
        self._matcher = grammar.matcher(place)
        self.error = ""
        self.feed(ids)

    @property
    def matcher(self) -> LLMatcher | None:
        return None if self.error else self._matcher

    def feed(self, ids: Sequence[int]) -> str:
        if self.error:
            return self.error
        real = [i for i in ids if i not in self._vocabulary.end_ids]
        taken = self._matcher.try_consume_tokens(real) if real else 0
        self.error = error_message(self._matcher) if self._matcher.is_error() else ""
        if not self.error and taken < len(real):
            self.error = f"the grammar does not allow token {real[taken]}"
        self._fed.extend(real)
        self._switch_copy()
        return self.error

    def allows(self, token: int) -> bool:
        """Whether the grammar allows it next."""
        return not self.error and self._matcher.validate_tokens([token]) == 1

    def _switch_copy(self) -> None:
        """To its own copy, once all are there, unless it has read too much; and to that of a
        renewed grammar."""
        grammar, generation = self._grammar, self._grammar.generation
        copy, renewed = self._row % grammar.num_copies, self._generation != generation
        widened = grammar.has_all_copies and copy != self._copy and len(self._fed) <= MAX_REFED_IDS
        if not (widened or renewed) or self.error:
            return
        matcher, self._generation = grammar.matcher(self._row), generation
        if matcher.try_consume_tokens(self._fed.tolist()) == len(self._fed):
            self._matcher, self._copy = matcher, copy

    def force(self) -> list[int]:
        if self.error or self._matcher.is_stopped():
            return []
        ids = self._matcher.compute_ff_tokens()[:MAX_FORCED_IDS]
        ids = ids[: self._vocabulary.count_known(ids)] if ids else ids
        return ids if ids and not self.feed(ids) else []

    def check(self, words: np.ndarray) -> str:
        if self._matcher.is_error():  # its mask is that of an ordinary end
            self.error = self.error or error_message(self._matcher)
        if not self.error:
            words &= self._vocabulary.sampled_mask
            if not words.view(np.uint32).max():  # ten times as fast as any()
                self.error = "the grammar allows no token of this model"
        if self.error:
            words[:] = 0
        return self.error


class AfterThoughtsSource:
    """By a grammar that begins behind thoughts, amid which all is free except an end, which would
    leave the grammar's text out. Before them only the opening tag, where it is one token, and a
    little white space are free: anything else is the grammar's first token."""

    def __init__(
        self, grammar: Grammar, thoughts: Thoughts, ids: Sequence[int] = (), place: int = 0
    ) -> None:
        self._grammar = grammar
        self._vocabulary = grammar.vocabulary
        self._place = place
        self._thoughts = ThoughtTracker(self._vocabulary, thoughts)
        opening = self._vocabulary.tokens_of_text(thoughts.opening)
        self._opening = self._vocabulary.mask(opening) if len(opening) == 1 else None
        self._source = GrammarSource(grammar, place=place)
        self._spaces = (
            MAX_SPACE_TOKENS if grammar.allows_leading_space else 0
        )  # that may still come before it
        self.feed(ids)

    @property
    def matcher(self) -> LLMatcher | None:
        return None if self._thoughts.state == "open" else self._source.matcher

    def feed(self, ids: Sequence[int]) -> str:
        for at, token in enumerate(ids):
            if self._thoughts.state == "over":
                return self._source.feed(ids[at:])
            if error := self._read(token):
                return error
        return ""

    def _read(self, token: int) -> str:
        """The next one of an answer whose thoughts are not over."""
        thoughts, before = self._thoughts, self._thoughts.state
        thoughts.read(token)
        if before == "before" and thoughts.state == "open":  # what came before was not the form
            self._source = GrammarSource(self._grammar, place=self._place)
        elif before == "before" and not self._pads(token):
            self._spaces = 0
            return self._source.feed([token])
        if thoughts.state == "over" and (rest := thoughts.text_after_closing.lstrip()):
            return self._source.feed(self._vocabulary.tokens.tokenize_bytes(rest))
        return ""

    def _pads(self, token: int) -> bool:
        """Whether it is white space that the grammar has not got."""
        padding = (
            self._spaces > 0 and self._thoughts.only_white_space and not self._source.allows(token)
        )
        self._spaces -= padding
        return padding

    def force(self) -> list[int]:
        return self._source.force() if self._thoughts.state == "over" else []

    def check(self, words: np.ndarray) -> str:
        where = self._thoughts.state
        if where == "open":
            words[:] = self._vocabulary.no_end_mask
            unfit = self._thoughts.closing_and_more()
            if unfit is not None:
                words &= ~unfit
            return ""
        error = self._source.check(words)
        if not error and self._thoughts.only_white_space:
            if self._opening is not None:
                words |= self._opening
            if self._spaces > 0:
                words |= self._vocabulary.space_mask
        return error


class UnconstrainedSource:
    """All that the model has."""

    matcher = None

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self._vocabulary = vocabulary

    def feed(self, ids: Sequence[int]) -> str:
        return ""

    def force(self) -> list[int]:
        return []

    def check(self, words: np.ndarray) -> str:
        words[:] = self._vocabulary.sampled_mask
        return ""


class ThinkingBudgetSource:
    """As the one `behind` it, but after `budget` tokens of thoughts their closing tag comes,
    whatever the model thinks. `output` was read by the one behind."""

    def __init__(
        self,
        vocabulary: GrammarVocabulary,
        behind: MaskSource,
        budget: int,
        thoughts: Thoughts,
        output: Sequence[int] = (),
    ) -> None:
        self._closing = vocabulary.tokens_of_text(thoughts.closing)
        self._inner = behind
        self._thoughts = ThoughtTracker(vocabulary, thoughts)
        self._budget_left = budget
        self._closing_tokens = 0  # of the closing tag, since the budget is spent
        self._count(output)

    @property
    def matcher(self) -> LLMatcher | None:
        return None if self._spent else self._inner.matcher

    @property
    def _spent(self) -> bool:
        return self._thoughts.state == "open" and self._budget_left <= 0

    def feed(self, ids: Sequence[int]) -> str:
        self._count(ids)
        return self._inner.feed(ids)

    def force(self) -> list[int]:
        ids = [] if self._thoughts.state == "open" else self._inner.force()
        self._count(ids)
        return ids

    def check(self, words: np.ndarray) -> str:
        if not self._spent:
            return self._inner.check(words)
        _allow_only(self._closing[self._closing_tokens % len(self._closing)], words)
        return ""

    def _count(self, ids: Sequence[int]) -> None:
        for token in ids:
            self._closing_tokens += self._spent
            amid = self._thoughts.state == "open"
            self._thoughts.read(token)
            self._budget_left -= amid and self._thoughts.state == "open"


class FailedSource:
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
        self._position = at
        self._may_jump = jumps
        self._forced: deque[int] = deque()
        self._error = ""

    @property
    def matcher(self) -> LLMatcher | None:
        return None if self._forced else self._source.matcher

    def feed(self, ids: Sequence[int]) -> str:
        """The next output ids; "" or what is wrong with them."""
        self._position += len(ids)
        said = min(len(self._forced), len(ids))
        for token in ids[:said]:
            if token != self._forced.popleft():
                self._error = f"the grammar forces another token than {token}"
        return self._error or (self._source.feed(ids[said:]) if said < len(ids) else "")

    def feed_from(self, first: int, ids: Sequence[int]) -> str:
        """The output has `ids` from position `first` on, of which some have been fed."""
        return self.feed(ids[self._position - first :])

    def force(self) -> list[int]:
        """What is said ahead from now on; empty if it is not the time."""
        if self._forced or not self._may_jump:
            return []
        ids = self._source.force()
        self._forced.extend(ids)
        return ids

    def check(self, words: np.ndarray) -> str:
        if self._error:
            words[:] = 0
        elif self._forced:
            _allow_only(self._forced[0], words)
        else:
            return self._source.check(words)
        return self._error


def _allow_only(token: int, words: np.ndarray) -> None:
    """Makes `words` int32 [W] the mask of that one."""
    words[:] = 0
    words.view(np.uint32)[token >> 5] = 1 << (token & 31)


def make_source(
    grammar: Grammar, output: Sequence[int], thoughts: Thoughts | None, place: int = 0
) -> MaskSource:
    """Of a request with so much `output`, ids: a grammar begins behind the thoughts, if there may
    be any."""
    if thoughts is None or thoughts.state == "over":
        return GrammarSource(grammar, output, place)
    return AfterThoughtsSource(grammar, thoughts, output, place)


def fill_masks(executor: LLExecutor, sources: Sequence[MaskSource], masks: np.ndarray) -> list[str]:
    """Fills row i of `masks` int32 [R, W] for source i, all in one parallel call; what went wrong
    for each, or "". A row that failed allows nothing; the others are not touched by it."""
    by_grammar = [(m, i) for i, source in enumerate(sources) if (m := source.matcher) is not None]
    if by_grammar:
        fill_next_token_bitmask_par(executor, by_grammar, masks)
    return [source.check(masks[i]) for i, source in enumerate(sources)]


class ThoughtTracker:
    """Of one answer. `where`: its thoughts. `rest`: bytes behind the closing tag, of the token that
    ended it."""

    def __init__(self, vocabulary: GrammarVocabulary, thoughts: Thoughts) -> None:
        self._vocabulary = vocabulary
        self._opening, self._closing = thoughts.opening.encode(), thoughts.closing.encode()
        self._tail = b""  # before: all of it; open: what the closing tag may begin with
        self.state: ThoughtState = thoughts.state
        self.text_after_closing = b""

    def read(self, token: int) -> None:
        """The next one of the answer."""
        if self.state == "over":
            return
        self._tail += self._vocabulary.bytes_of(token)
        if self.state == "before":
            bare = self._tail.lstrip()
            if bare.startswith(self._opening):
                self.state, self._tail = "open", bare[len(self._opening) :]
            elif not self._opening.startswith(bare):
                self.state = "over"
        if self.state == "open":
            _, closed, rest = self._tail.partition(self._closing)
            if closed:
                self.state, self.text_after_closing = "over", rest
            else:
                self._tail = self._tail[max(len(self._tail) - len(self._closing) + 1, 0) :]

    @property
    def only_white_space(self) -> bool:
        """Whether nothing but white space has come so far."""
        return self.state == "before" and not self._tail.strip()

    def closing_and_more(self) -> np.ndarray | None:
        """Tokens that would end the thoughts and go on with something else at once: int32 [words]
        of a mask. None if there are none."""
        begun = next(n for n in range(len(self._closing), -1, -1) if self._ends_with(n))
        return self._vocabulary.tokens_completing(self._closing, begun)

    def _ends_with(self, many: int) -> bool:
        """Whether the text ends with so many bytes of the closing tag."""
        return self._tail.endswith(self._closing[:many]) if many else True
