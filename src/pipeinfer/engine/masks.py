"""Masks of requests with a grammar: one source of masks for each slot that has a grammar.

All state can be built again from the descriptions of new rows in a step. Called step by step, in
the order of steps, on the event loop. The cost of masks is counted now and then, and reported with
the result: the scheduler spreads costly rows over steps. Uses steps and grammars; no device and no
torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from llguidance import LLExecutor

from pipeinfer.grammars.bounds import COSTLY_MASK_UNITS, GrammarError
from pipeinfer.grammars.compiling import Grammar, GrammarStore, MaskCost, mask_cost
from pipeinfer.grammars.masks import (
    FailedSource,
    MaskSource,
    RowSource,
    ThinkingBudgetSource,
    UnconstrainedSource,
    fill_masks,
    make_source,
)
from pipeinfer.params import StructuredOutputs
from pipeinfer.step import Constrained, MaskRows, Sampled, Step

MAX_THREADS = 8  # threads that fill masks: more of them wait for each other
SLOW = 0.005  # seconds of a step's masks after which it is counted which rows they were of
EVERY = 16  # masks of a row; then it is counted in any case, because its lexer grows by them

# Source for rows of a step whose epoch is over: the result is dropped.
NO_REQUEST = RowSource(FailedSource("its request is gone"), 0)


@dataclass
class _Cost:
    """Mask cost of one row.

    Attributes:
    - counted: total cost when it was counted last
    - masks: masks since then
    - units: cost of one mask, as reported last
    """

    counted: MaskCost
    masks: int = 0
    units: int = COSTLY_MASK_UNITS  # so that the first mask is counted and reported


class Masks(Protocol):
    """The masks of rows with a grammar: GrammarMasks on rank 0, ReceivedMasks on other ranks."""

    def prepare(
        self,
        spec: StructuredOutputs,
        then: Callable[[str], None],
        slow: bool,
        released: Sequence[int],
        /,
    ) -> None:
        """Compiles a grammar, see GrammarStore.prepare; first frees the grammars in `released`
        slots, whose requests have ended.
        """
        ...

    def wait(self) -> None:
        """Waits for the vocabulary, see GrammarStore.wait."""
        ...

    def fill(self, step: Step, words: np.ndarray, /) -> dict[int, str]:
        """Writes the masks of the step's masked rows into `words` int32 [N, W]. Returns, by row of
        logits, the reason why nothing is allowed, for rows without an allowed id.
        """
        ...

    def take(self, step: Step, sampled: Sampled, /) -> Sampled:
        """Takes the ids that the step sampled, before the masks of the next step are filled.
        Returns `sampled` with the ids that grammars force after them.
        """
        ...

    def close(self) -> None:
        """Ends the threads of masks and grammars: no step follows."""
        ...


class GrammarMasks:
    """Masks of rank 0, whose grammars come from `store`. See Masks for the methods.

    - store: keeps and compiles the grammars
    - threads: threads that fill masks, at most MAX_THREADS
    """

    def __init__(self, store: GrammarStore, threads: int) -> None:
        self._store = store
        self._threads = max(min(threads, MAX_THREADS), 1)
        self._executor = LLExecutor(self._threads)
        self._sources: dict[int, RowSource] = {}
        self._grammars: dict[int, Grammar] = {}
        self._costs: dict[int, _Cost] = {}
        self._seconds = 0.0  # time of the step's masks so far

    def prepare(
        self,
        spec: StructuredOutputs,
        then: Callable[[str], None],
        slow: bool,
        released: Sequence[int],
    ) -> None:
        self._release(released)
        self._store.prepare(spec, then, slow)

    def wait(self) -> None:
        self._store.wait()

    def fill(self, step: Step, words: np.ndarray) -> dict[int, str]:
        assert step.masked is not None
        begun = time.perf_counter()
        self._leave(step)
        for new in step.masked.new:
            self._sources[new.slot] = self._row(new)
        for extended in step.masked.extended:
            self._sources[extended.slot].feed_from(extended.first, extended.ids.tolist())
        slots = step.masked.slots.tolist()
        troubles = fill_masks(
            self._executor, [self._sources.get(s, NO_REQUEST) for s in slots], words
        )
        for slot, why in zip(slots, troubles, strict=True):
            if why and slot in self._grammars:
                self._store.recompile(self._grammars[slot])
        self._seconds = time.perf_counter() - begun
        rows = step.masked.rows.tolist()
        return {row: why for row, why in zip(rows, troubles, strict=True) if why}

    def take(self, step: Step, sampled: Sampled) -> Sampled:
        if step.masked is None:
            if self._sources:
                self._leave(step)
            return sampled
        begun = time.perf_counter()
        forced: dict[int, list[int]] = {}
        for row, slot, ids in _given(step.masked, sampled):
            source = self._sources.get(slot, NO_REQUEST)
            # An error in the ids is reported by the next mask.
            if ids and not source.feed(ids) and (forced_ids := source.force()):
                forced[row] = forced_ids
        self._seconds += time.perf_counter() - begun
        if units := self._mask_costs(step.masked):
            sampled = replace(sampled, mask_units=units)
        return sampled.followed_by(forced) if forced else sampled

    def _mask_costs(self, masked: MaskRows) -> dict[int, int]:
        """Returns the mask costs to report, by row of logits."""
        costs: dict[int, int] = {}
        slow = self._seconds > SLOW
        for row, slot in zip(masked.rows.tolist(), masked.slots.tolist(), strict=True):
            cost, source = self._costs.get(slot), self._sources.get(slot, NO_REQUEST)
            matcher = source.matcher
            if cost is None or matcher is None:
                continue
            cost.masks += 1
            if slow or cost.units >= COSTLY_MASK_UNITS or cost.masks >= EVERY:
                counted = mask_cost(matcher)
                since = counted.since(cost.counted)
                if since.fuel > 0:  # below 0: it has moved to another lexer
                    self._store.on_mask_cost(self._grammars[slot], since.fuel)
                units = max(since.units, 0) // cost.masks
                if units >= COSTLY_MASK_UNITS or cost.units >= COSTLY_MASK_UNITS:
                    costs[row] = units
                cost.counted, cost.masks, cost.units = counted, 0, units
        return costs

    def _release(self, slots: Iterable[int]) -> None:
        """Frees the grammars in these slots, whose requests have ended."""
        for slot in slots:
            self._sources.pop(slot, None)
            self._costs.pop(slot, None)
            if grammar := self._grammars.pop(slot, None):
                grammar.num_rows -= 1

    def close(self) -> None:
        self._store.close()

    def _leave(self, step: Step) -> None:
        """Frees the grammars of slots whose requests have ended or that have new requests."""
        self._release(step.delta.dropped_grammars)
        self._release(step.delta.admitted.tolist())

    def _row(self, new: Constrained) -> RowSource:
        try:
            source = self._source(new)
        except GrammarError as error:
            source = FailedSource(str(error))
        return RowSource(source, new.begin + len(new.output), new.jumps)

    def _source(self, new: Constrained) -> MaskSource:
        source = self._by_grammar(new)
        if new.budget is None or new.reasoning is None:
            return source
        vocabulary, output = self._store.vocabulary(), new.output.tolist()
        return ThinkingBudgetSource(vocabulary, source, new.budget, new.reasoning, output)

    def _by_grammar(self, new: Constrained) -> MaskSource:
        if new.spec is None:
            return UnconstrainedSource(self._store.vocabulary())
        grammar = self._store.grammar(new.spec)
        self._grammars[new.slot] = grammar
        grammar.num_rows += 1
        if grammar.num_rows > 1:
            self._store.add_copies(grammar, self._threads)
        source = make_source(grammar, new.output.tolist(), new.reasoning, new.slot)
        matcher = source.matcher
        self._costs[new.slot] = _Cost(mask_cost(grammar.matcher() if matcher is None else matcher))
        return source


class ReceivedMasks:
    """Masks of a rank above 0: each step brings it the masks of rank 0 (Sampler.masks).

    A lexer's limits trip depending on what was kept in memory, on which row came first and on when
    a grammar was compiled anew. Ranks that filled masks by themselves would sometimes disagree on
    whether a row fails, and the row would sample from a part of the vocabulary.
    """

    def prepare(
        self,
        spec: StructuredOutputs,
        then: Callable[[str], None],
        slow: bool,
        released: Sequence[int],
    ) -> None:
        """Reports success at once: this rank needs no grammar."""
        then("")

    def wait(self) -> None:
        """Returns at once: this rank builds no vocabulary."""

    def fill(self, step: Step, words: np.ndarray) -> dict[int, str]:
        """Leaves `words` unchanged and refuses no row: only rank 0 decides which rows fail."""
        return {}

    def take(self, step: Step, sampled: Sampled) -> Sampled:
        """Returns `sampled`: only rank 0 adds forced ids."""
        return sampled

    def close(self) -> None:
        """Does nothing: this rank has no threads of masks."""


def _given(masked: MaskRows, sampled: Sampled) -> list[tuple[int, int, list[int]]]:
    """Returns (row of logits, slot, its new ids) of the masked rows."""
    ends = np.cumsum(sampled.num_sampled)
    begins, ids = (ends - sampled.num_sampled).tolist(), sampled.ids.tolist()
    ends = ends.tolist()
    return [
        (row, slot, ids[begins[row] : ends[row]])
        for row, slot in zip(masked.rows.tolist(), masked.slots.tolist(), strict=True)
    ]
