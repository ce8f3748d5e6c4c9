"""The page table as a step's deltas make it, for tests: what devices have, without a device.

Import it as `from page_mirror import PageMirror`.
"""

from __future__ import annotations

import numpy as np

from pipeinfer.step import Step, StepDelta


class PageMirror:
    """table: int32 [slots, columns], which grows as it must. What is left of former requests stays;
    nobody reads it. That nothing else is needed to follow the memory is what tests show with it.
    """

    def __init__(self, slots: int) -> None:
        self.table = np.zeros((slots, 1), dtype=np.int32)

    def apply(self, delta: StepDelta) -> None:
        """Before the step that has it, and in the order of steps."""
        if len(delta.slots):
            needed, columns = int(delta.columns.max()) + 1, self.table.shape[1]
            if needed > columns:
                more = max(needed - columns, columns)
                self.table = np.pad(self.table, ((0, 0), (0, more)))
            self.table[delta.slots, delta.columns] = delta.pages

    def pages(self, step: Step, page_size: int) -> np.ndarray:
        """int32 [R, P], a copy: position p of row r lies in page pages[r, p // page_size]."""
        longest = int((step.starts + step.counts).max(initial=0))
        return self.table[step.slots, : -(-longest // page_size)]
