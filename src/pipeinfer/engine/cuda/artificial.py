"""Steps that nobody asked for: to warm up, to measure, to capture. They write to the dummy page.

Knows arrays of a step; no device and no request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pipeinfer.engine.fields import filled
from pipeinfer.steps.step import SamplingRows, Step

USUAL = {"temperature": 1.0}  # as most requests have it


def artificial_step(counts: np.ndarray, page_size: int, **fields: float) -> Step:
    """Rows of these counts int32 (ones first) from position 0 on, all sampling; `fields` of all
    rows, by the names of engine/fields.py."""
    rows = len(counts)
    values = filled(rows, **(USUAL | fields))
    sampling = SamplingRows(values, counts.astype(np.int64), np.zeros((0, 2), dtype=np.int64))
    return Step(
        epoch=0,
        number=0,
        decodes=int((counts == 1).sum()),
        slots=np.arange(rows, dtype=np.int32),
        starts=np.zeros(rows, dtype=np.int32),
        counts=counts,
        samples=np.ones(rows, dtype=bool),
        tokens=np.zeros(int(counts.sum()), dtype=np.int32),
        pages=np.zeros((rows, -(-int(counts.max(initial=0)) // page_size)), dtype=np.int32),
        sampling=sampling,
    )


def deep_decodes(rows: int, pages: int, page_size: int, slot: int) -> Step:
    """Decodes after `pages` full pages each, every row's own and none of them the dummy."""
    step = artificial_step(np.ones(rows, dtype=np.int32), page_size)
    table = np.zeros((rows, pages + 1), dtype=np.int32)  # the row's new token goes to the dummy
    table[:, :pages] = np.arange(1, rows * pages + 1, dtype=np.int32).reshape(rows, pages)
    starts = np.full(rows, pages * page_size, dtype=np.int32)
    return replace(step, starts=starts, pages=table, slots=_all_of(slot, rows))


def deep_prompts(
    decodes: int, prompts: Sequence[int], before: int, page_size: int, slot: int
) -> Step:
    """Decodes of nothing, and chunks of so many tokens (2 or more) of prompts, each after `before`
    tokens; everything lies in the dummy page.
    """
    counts = np.array([1] * decodes + [*prompts], dtype=np.int32)
    starts = np.where(counts > 1, before, 0).astype(np.int32)
    pages = -(-int((starts + counts).max()) // page_size)
    table = np.zeros((len(counts), pages), dtype=np.int32)
    step = artificial_step(counts, page_size)
    return replace(step, starts=starts, pages=table, slots=_all_of(slot, len(counts)))


def _all_of(slot: int, rows: int) -> np.ndarray:
    return np.full(rows, slot, dtype=np.int32)


def empty_step() -> Step:
    """A step of no rows, which packing for a graph fills up with padding rows."""
    return artificial_step(np.zeros(0, dtype=np.int32), 1)
