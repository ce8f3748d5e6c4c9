"""Builds the arrays of a step from what the memory decided.

Knows no policy and no torch. This is the hot path of the engine's host: nothing here loops over
decode rows, only over rows that compute admitted tokens.
"""

from __future__ import annotations

import numpy as np

from pipeinfer.engine.requests import RequestTable
from pipeinfer.engine.step import LAST_TOKEN, Step
from pipeinfer.memory.applied import Applied, Rows
from pipeinfer.memory.manager import MemoryManager


def build_step(
    epoch: int, applied: Applied, memory: MemoryManager, requests: RequestTable
) -> tuple[Step, np.ndarray]:
    """The step of the plan that `memory` applied last, and where its sampled ids belong.

    The second, int64 [S], has for each row that samples, in the step's order, its row in the plan.
    Rows that compute nothing are left out; rows with one token come first.
    """
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
        tokens=_tokens(rows, order, memory),
        pages=memory.table.gather(slots),
        sampling=requests.sampling_rows(slots[last], positions),
    )
    return step, order[last]


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
