"""Builds the arrays of a step from what the memory decided.

Knows no policy and no torch. This is the hot path of the engine's host: nothing here loops over
decode rows, only over rows that compute admitted tokens.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pipeinfer.engine.requests import RequestTable
from pipeinfer.memory.applied import Applied, Rows
from pipeinfer.memory.manager import MemoryManager
from pipeinfer.steps.step import LAST_TOKEN, Growth, SamplingRows, Step


class StepBuilder:
    """One plan after the other. Keeps the last step, of which most of the next one may be the
    same: its arrays are shared then, and nobody writes to them.
    """

    def __init__(self, memory: MemoryManager, requests: RequestTable) -> None:
        self._memory, self._requests = memory, requests
        self._last: tuple[Step, np.ndarray] | None = None
        self._unseen: list[np.ndarray] = []  # pages, since the last step that computes anything

    def build(self, epoch: int, applied: Applied) -> tuple[Step, np.ndarray]:
        """The step of the plan that the memory applied last, and where its sampled ids belong.

        The second, int64 [S], has for each row that samples, in the step's order, its row in the
        plan. Rows that compute nothing are left out; rows with one token come first.
        """
        growth, last = applied.rows.growth, self._last
        before = (-1, -1) if last is None else (last[0].epoch, last[0].number)
        if growth is None or last is None or before != (epoch, applied.number - 1):
            self._last = self._whole(epoch, applied)
        else:
            self._last = self._next(last[0], applied, growth), last[1]
        return self._last if not (len(applied.unseen) or self._unseen) else self._clearing(applied)

    def _clearing(self, applied: Applied) -> tuple[Step, np.ndarray]:
        """The last step, which zeroes what was freed unseen, if it computes anything."""
        assert self._last is not None
        step, sampled = self._last
        self._unseen.append(applied.unseen)
        if not len(step.slots):
            return self._last
        cleared, self._unseen = np.concatenate(self._unseen), []
        return replace(step, cleared=cleared), sampled

    def _whole(self, epoch: int, applied: Applied) -> tuple[Step, np.ndarray]:
        rows = applied.rows
        order, decodes = _order(rows.counts)
        slots, starts, counts = rows.slots[order], rows.starts[order], rows.counts[order]
        samples = rows.samples[order]
        last = np.flatnonzero(samples)
        positions = (starts[last] + counts[last]).astype(np.int64)
        step = Step(
            epoch=epoch,
            number=applied.number,
            decodes=decodes,
            slots=slots,
            starts=starts,
            counts=counts,
            samples=samples,
            tokens=_tokens(rows, order, self._memory),
            pages=self._memory.table.gather(slots),
            sampling=self._requests.sampling_rows(slots[last], positions),
        )
        return step, order[last]

    def _next(self, last: Step, applied: Applied, growth: Growth) -> Step:
        """`last`, one token further."""
        starts, sampling = applied.rows.starts, last.sampling
        positions = sampling.positions + 1
        suppress = sampling.suppress
        if len(suppress):  # else all are past where anything was
            suppress = self._requests.suppressed(last.slots, positions)
        penalties = sampling.penalties
        if penalties is not None and penalties.new:
            penalties = replace(penalties, new=())
        return Step(
            last.epoch, applied.number, last.decodes, last.slots, starts, last.counts,
            last.samples, last.tokens, self._pages(last, starts, growth),
            SamplingRows(sampling.fields, positions, suppress, penalties),
            growth,
        )  # fmt: skip

    def _pages(self, last: Step, starts: np.ndarray, growth: Growth) -> np.ndarray:
        columns = starts[growth.rows] // self._memory.page_size
        if len(columns) and int(columns.max()) >= last.pages.shape[1]:
            return self._memory.table.gather(last.slots)
        pages = last.pages.copy()  # steps in flight read theirs
        pages[growth.rows, columns] = growth.pages
        return pages


def _order(counts: np.ndarray) -> tuple[np.ndarray, int]:
    """Rows with one token, then rows with more, each in plan order; and how many the first are."""
    singles = np.flatnonzero(counts == 1)
    if len(singles) == len(counts):
        return singles, len(singles)
    return np.concatenate((singles, np.flatnonzero(counts > 1))), len(singles)


def _tokens(rows: Rows, order: np.ndarray, memory: MemoryManager) -> np.ndarray:
    """int32 [T]: the admitted ids of prefill rows, LAST_TOKEN for decodes."""
    counts = rows.counts[order]
    ends = np.cumsum(counts)
    tokens = np.full(int(ends[-1]) if len(ends) else 0, LAST_TOKEN, dtype=np.int32)
    for at in np.flatnonzero(rows.known[order]).tolist():
        row, end, count = order[at], int(ends[at]), int(counts[at])
        start = int(rows.starts[row])
        known = memory.slots.known_tokens(int(rows.slots[row]))
        tokens[end - count : end] = known[start : start + count]
    return tokens
