"""Steps that nobody asked for: to warm up, to measure, to capture. They write to the dummy page.

Knows arrays of a step; no device and no request.
"""

from __future__ import annotations

import numpy as np

from pipeinfer.engine.step import SamplingRows, Step

DECODE_CONTEXT, PROMPT_CONTEXT = 512, 4096  # tokens, of rows that are like those of a busy server


def artificial_step(
    counts: np.ndarray, page_size: int, top_k: int = 0, starts: np.ndarray | None = None
) -> Step:
    """Rows of these counts int32 (ones first) from `starts` int32 on, by default 0; all sample."""
    rows = len(counts)
    starts = np.zeros(rows, dtype=np.int32) if starts is None else starts
    ends = starts + counts
    sampling = SamplingRows(
        temperature=np.ones(rows, dtype=np.float32),
        top_k=np.full(rows, top_k, dtype=np.int32),
        top_p=np.ones(rows, dtype=np.float32),
        min_p=np.zeros(rows, dtype=np.float32),
        seeds=np.zeros(rows, dtype=np.uint64),
        positions=ends.astype(np.int64),
        suppress=np.zeros((0, 2), dtype=np.int64),
    )
    return Step(
        epoch=0,
        number=0,
        decodes=int((counts == 1).sum()),
        slots=np.arange(rows, dtype=np.int32),
        starts=starts,
        counts=counts,
        samples=np.ones(rows, dtype=bool),
        tokens=np.zeros(int(counts.sum()), dtype=np.int32),
        pages=np.zeros((rows, -(-int(ends.max(initial=0)) // page_size)), dtype=np.int32),
        sampling=sampling,
    )


def empty_step() -> Step:
    """A step of no rows, which packing for a graph fills up with padding rows."""
    return artificial_step(np.zeros(0, dtype=np.int32), 1)


def typical_step(decodes: int, tokens: int, longest: int, page_size: int) -> Step:
    """`decodes` rows, and one row with the rest of `tokens`, with contexts as they are in use but
    of at most `longest` tokens: what such a step takes is what requests will wait for."""
    counts = np.ones(decodes + (tokens > decodes), dtype=np.int32)
    starts = np.full(len(counts), min(DECODE_CONTEXT, longest) - 1, dtype=np.int32)
    if tokens > decodes:
        prompt = max(min(tokens - decodes, longest), 2)
        counts[-1] = prompt
        starts[-1] = max(min(PROMPT_CONTEXT, longest) - prompt, 0)
    return artificial_step(counts, page_size, starts=starts)
