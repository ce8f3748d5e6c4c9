"""Masks of the tokens that each row of a step may sample: a row's mask is a function of its ids
alone.

A row has a MaskSource. It is transient: it can be built again from the row's ids at any time, and
gives the same masks then.

- GrammarSource: by a grammar.
- AfterReasoningSource: by a grammar that begins after the reasoning.
- ThinkingBudgetSource: ends the reasoning after a number of tokens.
- UnconstrainedSource, FailedSource: allow everything, nothing.
- RowSource: around one of the others, with tokens that are forced ahead (jump-forward decoding).
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
from pipeinfer.params import ReasoningContext, ReasoningState

# A row moves to another compiled copy only if the copy has at most so many ids to read, which takes
# a millisecond for eight rows.
MAX_REFED_IDS = 64
MAX_FORCED_IDS = 1024  # the most ids of one `force`; the next call returns the rest
# The most tokens of white space in front of a grammar's text: a model could repeat them for ever.
MAX_SPACE_TOKENS = 4


class MaskSource(Protocol):
    """Decides which tokens one row may sample next."""

    @property
    def matcher(self) -> LLMatcher | None:
        """The matcher that fills the next mask, in parallel with those of other rows; None: `check`
        makes the whole mask.
        """
        ...

    def feed(self, ids: Sequence[int], /) -> str:
        """Takes the row's next output ids. Returns the error in them; "": none."""
        ...

    def force(self) -> list[int]:
        """The ids that must come next, as far as they are known, without any choice of the model.
        They count as fed.
        """
        ...

    def check(self, words: np.ndarray, /) -> str:
        """Completes a mask.

        - words: int32 [W], as the matcher has filled it; holds the allowed ids' bits afterwards

        Returns the reason why no id is allowed; "": some are.
        """
        ...


class GrammarSource:
    """Allows the tokens that a grammar allows. Ids that end a request are not fed to the grammar,
    which has ended then.

    Arguments:
    - grammar: decides which tokens are allowed
    - ids: the row's output so far
    - row: the number of the row, which decides which compiled copy it uses

    Attributes:
    - error: error in the ids; "": none
    """

    def __init__(self, grammar: Grammar, ids: Sequence[int] = (), row: int = 0) -> None:
        self._grammar = grammar
        self._vocabulary = grammar.vocabulary
        self._row = row
        self._fed = array("i")
        self._generation = grammar.generation
        self._copy: int = row % grammar.num_copies
        self._matcher = grammar.matcher(row)
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
        """Whether the grammar allows `token` next."""
        return not self.error and self._matcher.validate_tokens([token]) == 1

    def _switch_copy(self) -> None:
        """Moves the row to another compiled copy: to the row's own, once all are made and unless
        the row has read too much; to the new one, if the grammar was compiled again.
        """
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
        if self._matcher.is_error():  # the mask of an ordinary end
            self.error = self.error or error_message(self._matcher)
        if not self.error:
            words &= self._vocabulary.sampled_mask
            if not words.view(np.uint32).max():  # ten times as fast as any()
                self.error = "the grammar allows no token of this model"
        if self.error:
            words[:] = 0
        return self.error


class AfterReasoningSource:
    """Allows the tokens that a grammar allows after the reasoning.

    - Within the reasoning all tokens are allowed except those that end the request, and those that
      complete the closing tag and go on with more than white space.
    - Before the reasoning, these are allowed: the opening tag, if it is one token; a little white
      space, if it is harmless in front of the grammar's text; the grammar's first tokens.

    Arguments:
    - grammar, ids, row: as for GrammarSource
    - reasoning: tags of the reasoning, and its state after the prompt
    """

    def __init__(
        self, grammar: Grammar, reasoning: ReasoningContext, ids: Sequence[int] = (), row: int = 0
    ) -> None:
        self._grammar = grammar
        self._vocabulary = grammar.vocabulary
        self._row = row
        self._reasoning = ReasoningTracker(self._vocabulary, reasoning)
        opening = self._vocabulary.tokens_of_text(reasoning.opening)
        self._opening = self._vocabulary.mask(opening) if len(opening) == 1 else None
        self._source = GrammarSource(grammar, row=row)
        self._spaces = (
            MAX_SPACE_TOKENS if grammar.allows_leading_space else 0
        )  # tokens of white space that may still come before the grammar's text
        self.feed(ids)

    @property
    def matcher(self) -> LLMatcher | None:
        return None if self._reasoning.state == "open" else self._source.matcher

    def feed(self, ids: Sequence[int]) -> str:
        for at, token in enumerate(ids):
            if self._reasoning.state == "over":
                return self._source.feed(ids[at:])
            if error := self._read(token):
                return error
        return ""

    def _read(self, token: int) -> str:
        """Takes the next token while the reasoning has not ended. Returns an error or ""."""
        reasoning, before = self._reasoning, self._reasoning.state
        reasoning.read(token)
        if before == "before" and reasoning.state == "open":  # the grammar begins anew behind them
            self._source = GrammarSource(self._grammar, row=self._row)
        elif before == "before" and not self._pads(token):
            self._spaces = 0
            return self._source.feed([token])
        if reasoning.state == "over" and (rest := reasoning.text_after_closing.lstrip()):
            return self._source.feed(self._vocabulary.tokens.tokenize_bytes(rest))
        return ""

    def _pads(self, token: int) -> bool:
        """Whether `token` is white space in front of the grammar's text that the grammar does not
        allow.
        """
        padding = (
            self._spaces > 0 and self._reasoning.only_white_space and not self._source.allows(token)
        )
        self._spaces -= padding
        return padding

    def force(self) -> list[int]:
        return self._source.force() if self._reasoning.state == "over" else []

    def check(self, words: np.ndarray) -> str:
        where = self._reasoning.state
        if where == "open":
            words[:] = self._vocabulary.no_end_mask
            unfit = self._reasoning.closing_and_more()
            if unfit is not None:
                words &= ~unfit
            return ""
        error = self._source.check(words)
        if not error and self._reasoning.only_white_space:
            if self._opening is not None:
                words |= self._opening
            if self._spaces > 0:
                words |= self._vocabulary.space_mask
        return error


class UnconstrainedSource:
    """Allows all tokens that the tokenizer has."""

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
    """Forces the closing tag after a number of tokens of reasoning; otherwise allows the tokens
    that `answer` allows.

    Arguments:
    - answer: the source for all other tokens; has read `output` already
    - budget: tokens of reasoning
    - reasoning: tags of the reasoning, and its state after the prompt
    - output: the row's output ids so far
    """

    def __init__(
        self,
        vocabulary: GrammarVocabulary,
        answer: MaskSource,
        budget: int,
        reasoning: ReasoningContext,
        output: Sequence[int] = (),
    ) -> None:
        self._closing = vocabulary.tokens_of_text(reasoning.closing)
        self._inner = answer
        self._reasoning = ReasoningTracker(vocabulary, reasoning)
        self._budget_left = budget
        self._closing_tokens = 0  # tokens of the closing tag since the budget was used up
        self._count(output)

    @property
    def matcher(self) -> LLMatcher | None:
        return None if self._spent else self._inner.matcher

    @property
    def _spent(self) -> bool:
        return self._reasoning.state == "open" and self._budget_left <= 0

    def feed(self, ids: Sequence[int]) -> str:
        self._count(ids)
        return self._inner.feed(ids)

    def force(self) -> list[int]:
        ids = [] if self._reasoning.state == "open" else self._inner.force()
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
            amid = self._reasoning.state == "open"
            self._reasoning.read(token)
            self._budget_left -= amid and self._reasoning.state == "open"


class FailedSource:
    """Allows nothing: the row's grammar does not compile any more. error: the reason."""

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
    """The source of one row, with tokens forced ahead of sampling.

    Attributes:
    - source: decides which tokens are allowed, or forced
    - at: the position of the next output id
    - jumps: whether ids may be forced ahead. Once ids are forced, `feed` must get them before any
      other id, whether they were sampled or passed by the scheduler
    """

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
        """Takes the next output ids. Returns the error in them; "": none."""
        self._position += len(ids)
        said = min(len(self._forced), len(ids))
        for token in ids[:said]:
            if token != self._forced.popleft():
                self._error = f"the grammar forces another token than {token}"
        return self._error or (self._source.feed(ids[said:]) if said < len(ids) else "")

    def feed_from(self, first: int, ids: Sequence[int]) -> str:
        """Takes `ids`, the output from position `first` on; skips ids that were fed already."""
        return self.feed(ids[self._position - first :])

    def force(self) -> list[int]:
        """Ids that are forced ahead from now on; none while earlier ones are left, or if the row
        may not jump.
        """
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
    """Makes `words` int32 [W] the mask of `token` alone."""
    words[:] = 0
    words.view(np.uint32)[token >> 5] = 1 << (token & 31)


def make_source(
    grammar: Grammar, output: Sequence[int], reasoning: ReasoningContext | None, row: int = 0
) -> MaskSource:
    """Returns the source of a request with a grammar.

    - grammar: decides which tokens are allowed
    - output: the request's output ids so far
    - reasoning: the grammar begins after it; None: there is no reasoning
    - row: as for GrammarSource
    """
    if reasoning is None or reasoning.state == "over":
        return GrammarSource(grammar, output, row)
    return AfterReasoningSource(grammar, reasoning, output, row)


def fill_masks(executor: LLExecutor, sources: Sequence[MaskSource], masks: np.ndarray) -> list[str]:
    """Fills the masks of all rows in one parallel call.

    - sources: of R rows
    - masks: int32 [R, W], row i for source i

    Returns the error of each row; "": none. A row with an error allows nothing; the other rows are
    not affected.
    """
    by_grammar = [(m, i) for i, source in enumerate(sources) if (m := source.matcher) is not None]
    if by_grammar:
        fill_next_token_bitmask_par(executor, by_grammar, masks)
    return [source.check(masks[i]) for i, source in enumerate(sources)]


class ReasoningTracker:
    """Follows the reasoning of one answer, token by token.

    Attributes:
    - state: "before", "open" or "over", as ReasoningState
    - text_after_closing: bytes behind the closing tag, in the token that completed the tag
    """

    def __init__(self, vocabulary: GrammarVocabulary, reasoning: ReasoningContext) -> None:
        self._vocabulary = vocabulary
        self._opening, self._closing = reasoning.opening.encode(), reasoning.closing.encode()
        # End of the text so far. "before": all of it; "open": a possible start of the closing tag.
        self._tail = b""
        self.state: ReasoningState = reasoning.state
        self.text_after_closing = b""

    def read(self, token: int) -> None:
        """Takes the answer's next token."""
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
        """Whether the reasoning has not begun, and the answer has only white space so far."""
        return self.state == "before" and not self._tail.strip()

    def closing_and_more(self) -> np.ndarray | None:
        """A mask int32 [words] of the tokens that would complete the closing tag and go on with
        more than white space; None: there are none.
        """
        begun = next(n for n in range(len(self._closing), -1, -1) if self._ends_with(n))
        return self._vocabulary.tokens_completing(self._closing, begun)

    def _ends_with(self, many: int) -> bool:
        """Whether the text ends with the first `many` bytes of the closing tag."""
        return self._tail.endswith(self._closing[:many]) if many else True
