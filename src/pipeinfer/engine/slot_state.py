"""What devices keep of the requests in their slots, on the host: page table and edits of logits.

Follows step by step what memory decided, without reading it: what runs steps may be behind. Knows
arrays of a step; no plan, no request and no torch.
"""

from __future__ import annotations

import numpy as np

from pipeinfer.steps.step import Delta, Edits, Step


class SlotState:
    """table: int32 [slots, columns], which grows as it must; edits: of the slots that have some.

    What is left of former requests stays; nobody reads it.
    """

    def __init__(self, slots: int) -> None:
        self.table = np.zeros((slots, 1), dtype=np.int32)
        self.edits: dict[int, Edits] = {}

    def apply(self, delta: Delta) -> None:
        """Before the step that has it, and in the order of steps."""
        if len(delta.slots):
            needed, columns = int(delta.columns.max()) + 1, self.table.shape[1]
            if needed > columns:
                more = max(needed - columns, columns)
                self.table = np.pad(self.table, ((0, 0), (0, more)))
            self.table[delta.slots, delta.columns] = delta.pages
        for slot in delta.admitted.tolist():
            self.edits.pop(slot, None)
        self.edits.update((edits.slot, edits) for edits in delta.edits)

    def pages(self, step: Step, page_size: int) -> np.ndarray:
        """int32 [R, P], a copy: position p of row r lies in page pages[r, p // page_size]."""
        longest = int((step.starts + step.counts).max(initial=0))
        return self.table[step.slots, : -(-longest // page_size)]

    def edited(self, logits: np.ndarray, step: Step, first_id: int) -> np.ndarray:
        """Float [S, ids], those from `first_id` on, with the edits of the rows that sample: a copy
        where there are any."""
        if not self.edits:
            return logits
        edited, positions = None, step.sampling.positions.tolist()
        for row, slot in enumerate(step.slots[step.samples].tolist()):
            edits = self.edits.get(slot)
            if edits is None:
                continue
            column, never = edits.ids.astype(np.int64) - first_id, positions[row] < edits.until
            held = (column >= 0) & (column < logits.shape[1]) & (never | (edits.values != 0))
            if not held.any():
                continue
            if edited is None:
                edited = logits.copy()
            edited[row, column[held]] += edits.values[held]
            edited[row, column[held & never]] = -np.inf
        return logits if edited is None else edited
