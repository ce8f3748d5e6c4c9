"""Steps that nobody asked for: to warm up, to measure, to capture. They write to the dummy page.

Knows arrays of a step; no device and no request.
"""

from __future__ import annotations

import numpy as np

from pipeinfer.engine.step import SamplingRows, Step


def artificial_step(counts: np.ndarray, page_size: int, top_k: int = 0) -> Step:
    """Rows of these counts int32 (ones first) from position 0 on, all sampling."""
    rows = len(counts)
    sampling = SamplingRows(
        temperature=np.ones(rows, dtype=np.float32),
        top_k=np.full(rows, top_k, dtype=np.int32),
        top_p=np.ones(rows, dtype=np.float32),
        min_p=np.zeros(rows, dtype=np.float32),
        seeds=np.zeros(rows, dtype=np.uint64),
        positions=counts.astype(np.int64),
        suppress=np.zeros((0, 2), dtype=np.int64),
    )
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


def empty_step() -> Step:
    """A step of no rows, which packing for a graph fills up with padding rows."""
    return artificial_step(np.zeros(0, dtype=np.int32), 1)
