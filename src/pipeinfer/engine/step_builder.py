"""Builds the arrays of a step from what the memory decided.

Knows no policy and no torch. This is the hot path of the engine's host: nothing here loops over
decode rows, only over rows that compute admitted tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from pipeinfer.engine.requests import RequestTable
from pipeinfer.memory.manager import MemoryManager
from pipeinfer.memory.rows import Rows
from pipeinfer.memory.runs import common_runs
from pipeinfer.steps.step import (
    LAST_TOKEN,
    NOTHING,
    Delta,
    LogprobRows,
    ScoredChunk,
    Step,
)


class StepBuilder:
    """One plan after the other. Keeps the last step, of which most of the next one may be the
    same: its arrays are shared then, and nobody writes to them. shares: steps say what decodes
    begin with in common.
    """

    def __init__(self, memory: MemoryManager, requests: RequestTable, shares: bool = False) -> None:
        self._memory = memory
        self._shares = shares
        self._requests = requests
        self._last: tuple[Step, np.ndarray] | None = None
        self._unverified: list[np.ndarray] = []  # pages, since the last step that computes anything

    def build(self, epoch: int, rows: Rows) -> tuple[Step, np.ndarray]:
        """The step of the plan that the memory applied last, and where its sampled ids belong.

        The second, int64 [S], has for each row that samples, in the step's order, its row in the
        plan. Rows that compute nothing are left out; rows with one token come first. What changed
        in the slots waits for a step that computes something.
        """
        last = self._last
        if len(rows.unverified):
            self._unverified.append(rows.unverified)
        before = (-1, -1) if last is None else (last[0].epoch, last[0].number)
        if last is not None and rows.same_as_previous and before == (epoch, rows.number - 1):
            self._last = self._next(last[0], rows), last[1]
        else:
            self._last = self._whole(epoch, rows)
        return self._last

    def _whole(self, epoch: int, rows: Rows) -> tuple[Step, np.ndarray]:
        memory = self._memory
        order, decodes = _order(rows.counts)
        slots, samples = rows.slots[order], rows.samples[order]
        ends = rows.starts[order] + rows.counts[order]
        last = np.flatnonzero(samples)
        step = Step(
            epoch=epoch,
            number=rows.number,
            decodes=decodes,
            slots=slots,
            starts=rows.starts[order],
            counts=rows.counts[order],
            samples=samples,
            tokens=_tokens(rows, order, memory),
            fields=self._requests.fields(slots[last]),
            penalties=self._requests.penalties(slots[last]),
            delta=self._delta() if len(order) else NOTHING,
            logprobs=self._requests.logprobs(slots[last], ends[last]),
            prompts=tuple(self._prompts(rows, order)) if self._requests.scores else (),
            masked=self._requests.masked(slots[last]),
            # Where steps go on with the same rows, these only get pages of their own.
            runs=common_runs(memory.table, slots[:decodes], memory.page_size)
            if self._shares
            else None,
        )
        return step, order[last]

    def _next(self, last: Step, rows: Rows) -> Step:
        """`last`, one token further."""
        penalties = last.penalties
        if penalties is not None and penalties.new:
            penalties = replace(penalties, new=())
        masked = last.masked
        if masked is not None and (masked.new or masked.extended):
            masked = replace(masked, new=(), extended=())
        return Step(
            last.epoch,
            rows.number,
            last.decodes,
            last.slots,
            rows.starts,
            last.counts,
            last.samples,
            last.tokens,
            last.fields,
            penalties,
            self._delta(),
            self._again(last, rows),
            (),
            masked,
            last.runs,
        )

    def _again(self, last: Step, rows: Rows) -> LogprobRows | None:
        """As the last step's; what must not be sampled yet may be sampled now."""
        if last.logprobs is None or not last.logprobs.suppressed:
            return last.logprobs
        return self._requests.logprobs(rows.slots, rows.starts + rows.counts)

    def _prompts(self, rows: Rows, order: np.ndarray) -> Iterator[ScoredChunk]:
        """The rows that compute what comes before prompt tokens that are to be scored."""
        counts = rows.counts[order]
        begins = np.cumsum(counts) - counts
        for at in np.flatnonzero(rows.known[order]).tolist():
            row, slot = order[at], int(rows.slots[order[at]])
            start, count = int(rows.starts[row]), int(counts[at])
            wanted = self._requests.scored(slot, start + 1, start + count + 1)
            if wanted is not None:
                first, end, most = wanted
                ids = self._memory.slots.known_tokens(slot)[first:end]
                yield ScoredChunk(slot, first, ids, int(begins[at]) + first - start - 1, most)

    def _delta(self) -> Delta:
        """What changed since the last step that computes anything."""
        pages, requests = self._memory.table.changes(), self._requests.changes()
        delta = NOTHING if pages is None else Delta(*pages)
        if requests is not None:
            admitted, fields, edits = requests
            delta = replace(delta, admitted=admitted, fields=fields, edits=edits)
        if released := self._requests.take_released():
            delta = replace(delta, released=released)
        if self._unverified:
            delta = replace(delta, cleared=np.concatenate(self._unverified))
            self._unverified.clear()
        return delta


def _order(counts: np.ndarray) -> tuple[np.ndarray, int]:
    """Rows with one token, then rows with more, each in plan order; and how many the first are."""
    singles = np.flatnonzero(counts == 1)
    if len(singles) == len(counts):
        return singles, len(singles)
    return np.concatenate((singles, np.flatnonzero(counts > 1))), len(singles)


def _tokens(rows: Rows, order: np.ndarray, memory: MemoryManager) -> np.ndarray:
    """int32 [T]: the known ids of rows that have any left, LAST_TOKEN for decodes."""
    counts = rows.counts[order]
    ends = np.cumsum(counts)
    tokens = np.full(int(ends[-1]) if len(ends) else 0, LAST_TOKEN, dtype=np.int32)
    for at in np.flatnonzero(rows.known[order]).tolist():
        row, end, count = order[at], int(ends[at]), int(counts[at])
        start = int(rows.starts[row])
        known = memory.slots.known_tokens(int(rows.slots[row]))
        tokens[end - count : end] = known[start : start + count]
    return tokens
