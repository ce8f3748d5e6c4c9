"""Which pages each slot's tokens lie in.

Knows no token id and no plan. The table is on the host; devices have copies, which follow by what
was changed.
"""

from __future__ import annotations

import numpy as np


class PageTable:
    """int32 [max_slots, max_pages_per_sequence] and two counts per slot. A row's regions:

        | the prefix cache's, locked | the request's own | 0 (the dummy page) ... |
        0                            shared              held

    shared, held: int32 [max_slots]. owned: pages that requests own, the sum of held - shared.
    """

    def __init__(self, max_slots: int, max_pages_per_sequence: int) -> None:
        self._rows = np.zeros((max_slots, max_pages_per_sequence), dtype=np.int32)
        self.num_pages = np.zeros(max_slots, dtype=np.int32)
        self.num_shared = np.zeros(max_slots, dtype=np.int32)
        self.num_owned = 0
        self._changed: list[tuple[np.ndarray, np.ndarray]] = []  # slots and columns

    def reset(self) -> None:
        """Empties every row; who follows need not know what was in them."""
        self._changed.clear()
        for slot in np.flatnonzero(self.num_pages):
            self._rows[slot, : self.num_pages[slot]] = 0
        self.num_pages[:] = 0
        self.num_shared[:] = 0
        self.num_owned = 0

    def set_prefix(self, slot: int, pages: np.ndarray) -> None:
        """Makes `pages`, which the prefix cache owns, the beginning of the row."""
        count = len(pages)
        columns = np.flatnonzero(self._rows[slot, :count] != pages)
        self._changed.append((np.full(len(columns), slot), columns))
        self._rows[slot, :count] = pages
        held, shared = int(self.num_pages[slot]), int(self.num_shared[slot])
        self.num_shared[slot] = count
        self.num_pages[slot] = max(count, held)
        self.num_owned += max(count, held) - count - (held - shared)

    def append(self, slots: np.ndarray, needs: np.ndarray, pages: np.ndarray) -> None:
        """Gives each of the distinct `slots` [n] the next `needs` [n] pages out of `pages`."""
        if len(pages) == np.count_nonzero(needs):  # decodes: one page each
            self.append_one(slots[needs > 0], pages)
            return
        row = np.repeat(slots, needs)
        offset = np.arange(len(pages)) - np.repeat(np.cumsum(needs) - needs, needs)
        columns = self.num_pages[row] + offset
        self._changed.append((row, columns))
        self._rows[row, columns] = pages
        self.num_pages[slots] += needs
        self.num_owned += len(pages)

    def append_one(self, slots: np.ndarray, pages: np.ndarray) -> None:
        """Gives each of the distinct `slots` [n] the next of its pages, out of `pages` [n]."""
        held = self.num_pages[slots]
        self._changed.append((slots, held))
        self._rows[slots, held] = pages
        self.num_pages[slots] = held + np.int32(1)
        self.num_owned += len(pages)

    def pages_of(self, slot: int) -> np.ndarray:
        """A copy of the slot's pages, int32 [held]."""
        return self._rows[slot, : self.num_pages[slot]].copy()

    def columns(self, slots: np.ndarray, begin: int, end: int) -> np.ndarray:
        """A copy of these columns of the rows `slots` int32 [n]: int32 [n, end - begin]."""
        return self._rows[slots, begin:end]

    def owned_pages(self, slot: int) -> np.ndarray:
        """A copy of the pages that the slot's request owns, int32 [held - shared]."""
        return self._rows[slot, self.num_shared[slot] : self.num_pages[slot]].copy()

    def clear(self, slot: int) -> None:
        """Empties the row."""
        self._rows[slot, : self.num_pages[slot]] = 0
        self.num_owned -= int(self.num_pages[slot]) - int(self.num_shared[slot])
        self.num_pages[slot] = 0
        self.num_shared[slot] = 0

    def take_changes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Slots, columns and pages, int32 [n] each, of all that was written since it was asked
        last, as it is now (so a place that stands twice has the same page); None if nothing was.
        Rows that were emptied count for nothing.
        """
        if not self._changed:
            return None
        slots, columns = self._changed[0]
        if len(self._changed) > 1:
            both = zip(*self._changed, strict=True)
            slots, columns = (np.concatenate(parts) for parts in both)
        self._changed.clear()
        pages = self._rows[slots, columns]
        return slots.astype(np.int32, copy=False), columns.astype(np.int32, copy=False), pages
