"""Steps that nobody asked for: to warm up, to measure, to capture. They write to the dummy page,
and leave nothing in the first slots that anybody reads.

Knows arrays of a step; no device and no request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pipeinfer.engine.fields import filled
from pipeinfer.engine.rooms import LargestStep
from pipeinfer.packing import PART
from pipeinfer.params import MOST_LOGPROBS
from pipeinfer.steps.step import (
    CommonRuns,
    Delta,
    Edits,
    LogprobRows,
    MaskRows,
    PenaltyRows,
    Step,
)

USUAL = {"temperature": 1.0}  # as most requests have it
LARGE_TOP_K = 20


def artificial_step(
    counts: np.ndarray,
    page_size: int,
    starts: np.ndarray | None = None,
    own: bool = False,
    **fields: float,
) -> Step:
    """Rows of these counts int32 (ones first) after so many tokens `starts` int32, by default none,
    all sampling; `fields` of all rows, by the names of engine/fields.py.

    They lie in the first slots and compute into the dummy page. What is before it they read there,
    too, or, with `own`, in pages of which no two rows have one.
    """
    rows, values = len(counts), filled(len(counts), **(USUAL | fields))
    starts = np.zeros(rows, dtype=np.int32) if starts is None else starts
    slots, held = np.arange(rows, dtype=np.int32), -(-(starts + counts) // page_size)
    slot = np.repeat(slots, held)
    column = np.arange(len(slot), dtype=np.int32) - np.repeat(np.cumsum(held) - held, held)
    before = column < np.repeat(starts // page_size, held) if own else np.zeros(len(slot), bool)
    pages = np.where(before, np.cumsum(before), 0).astype(np.int32)
    return Step(
        epoch=0,
        number=0,
        decodes=int((counts == 1).sum()),
        slots=slots,
        starts=starts,
        counts=counts,
        samples=np.ones(rows, dtype=bool),
        tokens=np.zeros(int(counts.sum()), dtype=np.int32),
        fields=values,
        delta=Delta(slot, column.astype(np.int32), pages, admitted=slots, fields=values),
    )


def largest_step(largest: LargestStep, page_size: int, max_model_len: int) -> Step:
    """All rows and all tokens; everything lies in the dummy page. Every row samples, and asks for
    all that sampling can be asked for: so its kernels are loaded then, and its memory is known. To
    be finished with `allow_all`."""
    rows = min(largest.rows, largest.tokens)
    counts = np.ones(rows, dtype=np.int32)
    left = largest.tokens - rows
    for row in range(rows - 1, -1, -1):
        counts[row] += min(left, max_model_len - 1)
        left -= int(counts[row]) - 1
    step = artificial_step(counts, page_size, top_k=LARGE_TOP_K, top_p=0.9, min_p=0.01)
    every, most = np.arange(rows), np.full(rows, MOST_LOGPROBS, dtype=np.int32)
    nothing, raised = np.zeros(1, dtype=np.int32), np.ones(1, dtype=np.float32)
    edits = tuple(Edits(slot, nothing, raised, nothing) for slot in range(rows))
    return replace(
        step,
        delta=replace(step.delta, edits=edits),
        penalties=PenaltyRows(every, every, np.full((rows, 3), 1.5, dtype=np.float32)),
        logprobs=LogprobRows(every, most, suppressed=True),
        masked=MaskRows(every, step.slots),
    )


def allow_all(words: np.ndarray) -> dict[int, str]:
    """Masks int32 [N, W] that forbid nothing."""
    words.fill(-1)
    return {}


def deep_decodes(rows: int, pages: int, page_size: int) -> Step:
    """Decodes after `pages` full pages each, every row's own and none of them the dummy."""
    starts = np.full(rows, pages * page_size, dtype=np.int32)
    return artificial_step(np.ones(rows, dtype=np.int32), page_size, starts, own=True)


def alike_decodes(rows: int, prompts: int, page_size: int) -> Step:
    """Decodes that all begin with the dummy page, beside so many prompts of two tokens."""
    counts = np.array([1] * rows + [2] * prompts, dtype=np.int32)
    starts = np.where(counts > 1, 0, page_size).astype(np.int32)
    ranks, one_page = np.arange(rows, dtype=np.int32), np.ones(rows, dtype=np.int32)
    step = artificial_step(counts, page_size, starts)
    return replace(step, runs=CommonRuns(one_page, ranks * PART + rows))


def deep_prompts(decodes: int, prompts: Sequence[int], before: int, page_size: int) -> Step:
    """Decodes of nothing, and chunks of so many tokens (2 or more) of prompts, each after `before`
    tokens; everything lies in the dummy page.
    """
    counts = np.array([1] * decodes + [*prompts], dtype=np.int32)
    starts = np.where(counts > 1, before, 0).astype(np.int32)
    return artificial_step(counts, page_size, starts)


def empty_step() -> Step:
    """A step of no rows, which packing for a graph fills up with padding rows."""
    return artificial_step(np.zeros(0, dtype=np.int32), 1)
