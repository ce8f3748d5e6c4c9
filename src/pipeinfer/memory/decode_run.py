"""Plan after plan with the same decode rows: what each of them adds to the one before.

Between two arrivals or ends every plan is of this kind, and NumPy's calls cost more than what they
compute; this takes a third of those of the general way, to the same effect. Knows no cache.
"""

from __future__ import annotations

import numpy as np

from pipeinfer.memory.page_table import PageTable
from pipeinfer.memory.rows import Rows
from pipeinfer.memory.slot_arrays import SlotArrays
from pipeinfer.messages import Plan

_ONE = np.array([1], dtype="<i4").tobytes()
_STEP = np.ones((), dtype=np.int32)  # made once: making a scalar takes as long as adding it


class DecodeRun:
    """The rows of `plan`, which computed one token of each; `left`: plans until one has no room.

    room: int32 [R], the first position of each row that lies in none of its pages.
    """

    def __init__(
        self, plan: Plan, rows: Rows, slots: SlotArrays, table: PageTable, page: int
    ) -> None:
        self._slot_bytes = plan.slots
        self._count_bytes = plan.counts
        self._page = page
        self.slots = rows.slots
        self.starts = rows.starts + rows.counts
        self.room = table.held[rows.slots] * np.int32(page)
        # A row may decode position p while p + 2 tokens are within its limit.
        self.left = int((slots.max_total[rows.slots] - self.starts).min()) - 1
        self._ones = rows.counts
        self._yes = rows.samples
        self._no = rows.deferred

    @staticmethod
    def begins(plan: Plan, rows: Rows) -> bool:
        """Whether `rows`, the outcome of `plan`, are decodes and nothing else."""
        count = len(rows.slots)
        return (
            count > 0
            and plan.counts == _ONE * count
            and not rows.known.any()
            and bool(rows.samples.all())
        )

    def goes_on(self, plan: Plan) -> bool:
        """Whether `plan` decodes the same rows again and does nothing else."""
        return (
            self.left > 0
            and plan.slots == self._slot_bytes
            and plan.counts == self._count_bytes
            and not plan.releases
            and not plan.admits
            and not plan.extends
            and not plan.shares
            and not plan.reset
        )

    def growing(self) -> np.ndarray:
        """int64 [G]: rows that need a page for the next position."""
        return np.flatnonzero(self.starts == self.room)

    def advance(self, growing: np.ndarray) -> Rows:
        """The next position of every row, when those of `growing()` have got their pages."""
        starts = self.starts
        self.starts = starts + _STEP
        self.left -= 1
        if len(growing):
            self.room[growing] += self._page
        ones, yes, no = self._ones, self._yes, self._no
        return Rows(self.slots, starts, ones, yes, no, no, same_as_previous=True)
