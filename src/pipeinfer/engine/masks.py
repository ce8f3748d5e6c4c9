"""What requests with a grammar may sample next: one source of masks for each slot that has one.

All of it can be built again from what a step says of its new rows. Called step by step, in the
order of steps, on the event loop. Knows steps and grammars; no device and no torch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from llguidance import LLExecutor

from pipeinfer.grammars.bounds import GrammarError
from pipeinfer.grammars.compiling import Grammar
from pipeinfer.grammars.masks import (
    FreeSource,
    MaskSource,
    NoSource,
    RowSource,
    ThinkingSource,
    fill_all,
    source_of,
)
from pipeinfer.grammars.store import GrammarStore
from pipeinfer.params import StructuredOutputs
from pipeinfer.steps.step import Constrained, MaskRows, Sampled, Step

MOST_THREADS = 8  # that fill masks: more of them wait for each other


class Masks:
    """Of one rank; its grammars come from `store`."""

    def __init__(self, store: GrammarStore, threads: int, alone: bool = True) -> None:
        """alone: there are no other ranks, which would have to get new lanes at the same time: a
        limit that trips depends on who shares a lexer."""
        self._store = store
        threads = max(min(threads, MOST_THREADS), 1)
        self._executor = LLExecutor(threads)
        self._lanes = threads if alone else 1
        self._sources: dict[int, RowSource] = {}
        self._grammars: dict[int, tuple[StructuredOutputs, Grammar]] = {}

    def prepare(
        self, spec: StructuredOutputs, then: Callable[[str], None], slow: bool = False
    ) -> None:
        """See GrammarStore."""
        self._store.prepare(spec, then, slow)

    def wait(self) -> None:
        """See GrammarStore."""
        self._store.wait()

    def fill(self, step: Step, words: np.ndarray) -> dict[int, str]:
        """The masks of the step's masked rows into `words` int32 [N, W]. Returns the rows that
        sample, by number, for which nothing is allowed, with the reason."""
        assert step.masked is not None
        self._leave(step)
        for new in step.masked.new:
            self._sources[new.slot] = self._row(new)
        for told in step.masked.extended:
            self._sources[told.slot].told(told.first, told.ids.tolist())
        slots = step.masked.slots.tolist()
        troubles = fill_all(self._executor, [self._sources[slot] for slot in slots], words)
        for slot, why in zip(slots, troubles, strict=True):
            if why and slot in self._grammars:
                self._store.renew(*self._grammars[slot])
        rows = step.masked.rows.tolist()
        return {row: why for row, why in zip(rows, troubles, strict=True) if why}

    def take(self, step: Step, sampled: Sampled) -> Sampled:
        """What the step gave; before the masks of the next one are filled. Returned with what
        grammars force behind it."""
        if step.masked is None:
            if self._sources:
                self._leave(step)
            return sampled
        forced: dict[int, list[int]] = {}
        for row, slot, ids in _given(step.masked, sampled):
            source = self._sources[slot]
            # What is wrong with them is said of the next mask.
            if ids and not source.feed(ids) and (more := source.force()):
                forced[row] = more
        return sampled.followed_by(forced) if forced else sampled

    def close(self) -> None:
        """No step follows."""
        self._store.close()

    def _leave(self, step: Step) -> None:
        """Slots that have new requests."""
        for slot in step.delta.admitted.tolist():
            self._sources.pop(slot, None)
            self._grammars.pop(slot, None)

    def _row(self, new: Constrained) -> RowSource:
        try:
            source = self._source(new)
        except GrammarError as error:
            source = NoSource(str(error))
        return RowSource(source, new.begin + len(new.output), new.jumps)

    def _source(self, new: Constrained) -> MaskSource:
        source = self._by_grammar(new)
        if new.budget is None:
            return source
        vocabulary, tail, output = self._store.vocabulary(), new.tail, new.output
        return ThinkingSource(vocabulary, source, new.budget, tail.tolist(), output.tolist())

    def _by_grammar(self, new: Constrained) -> MaskSource:
        if new.spec is None:
            return FreeSource(self._store.vocabulary())
        grammar = self._store.grammar(new.spec)
        self._grammars[new.slot] = new.spec, grammar
        if sum(one is grammar for _, one in self._grammars.values()) > 1:
            self._store.widen(grammar, self._lanes)
        return source_of(grammar, new.output.tolist(), new.tail.tolist(), new.slot)


def _given(masked: MaskRows, sampled: Sampled) -> list[tuple[int, int, list[int]]]:
    """(row, slot, its new ids) of the masked rows."""
    ends = np.cumsum(sampled.counts)
    begins, ids = (ends - sampled.counts).tolist(), sampled.ids.tolist()
    ends = ends.tolist()
    return [
        (row, slot, ids[begins[row] : ends[row]])
        for row, slot in zip(masked.rows.tolist(), masked.slots.tolist(), strict=True)
    ]
