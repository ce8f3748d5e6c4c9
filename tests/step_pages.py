"""Steps by hand say whole rows of the page table; import it as `from step_pages import ...`."""

from __future__ import annotations

import numpy as np

from page_mirror import PageMirror
from pipeinfer.step import Step, StepDelta


def all_pages(slots, pages) -> StepDelta:
    """That `pages` [n, P] stand in the rows `slots` [n], from the first column on."""
    pages = np.asarray(pages, dtype=np.int32)
    count, width = pages.shape
    return StepDelta(
        np.repeat(np.asarray(slots, dtype=np.int32), width),
        np.tile(np.arange(width, dtype=np.int32), count),
        pages.reshape(-1),
    )


def pages_of(step: Step, page_size: int) -> np.ndarray:
    """int32 [R, P] of a step whose delta says all of it."""
    state = PageMirror(int(step.slots.max(initial=0)) + 1)
    state.apply(step.delta)
    return state.pages(step, page_size)
