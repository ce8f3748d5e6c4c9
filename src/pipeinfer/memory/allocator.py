"""Which KV pages are free.

Knows pages as numbers only: no request, no prefix tree and no tensor.
"""

from __future__ import annotations

import numpy as np

from pipeinfer.memory.errors import IntegrityError


class PageAllocator:
    """Hands out pages 1 .. pages-1, last freed first; page 0 is a dummy that nobody owns.

    `_stack[:free]` holds the free pages, the next one to be taken at the end:

        | free, oldest ... free, newest | rest is stale |
        0                               free            pages - 1
    """

    def __init__(self, pages: int) -> None:
        if pages < 2:
            raise ValueError(f"a pool needs at least 2 pages, not {pages}")
        self.num_pages = pages - 1
        self.reset()

    def reset(self) -> None:
        """Frees every page."""
        self._stack = np.arange(self.num_pages, 0, -1, dtype=np.int32)
        self._is_free = np.ones(self.num_pages + 1, dtype=bool)
        self._is_free[0] = False
        self.num_free = self.num_pages

    def allocate(self, count: int) -> np.ndarray:
        """`count` free pages, int32 [count]; raises IntegrityError if there are fewer."""
        if count > self.num_free:
            raise IntegrityError(f"{count} pages wanted, {self.num_free} of {self.num_pages} free")
        pages = self._stack[self.num_free - count : self.num_free][::-1].copy()
        self.num_free -= count
        self._is_free[pages] = False
        return pages

    def free(self, pages: np.ndarray) -> None:
        """Frees `pages`, int32 [n]; raises IntegrityError if one is free already or unknown."""
        count = len(pages)
        if count == 0:
            return
        self._check_freed(pages)
        self._is_free[pages] = True
        self._stack[self.num_free : self.num_free + count] = pages
        self.num_free += count

    def _check_freed(self, pages: np.ndarray) -> None:
        low, high = int(pages.min()), int(pages.max())
        if low < 1 or high > self.num_pages:
            raise IntegrityError(f"pages {low}..{high} given back, there are 1..{self.num_pages}")
        wrong = pages[self._is_free[pages]]
        if len(wrong):
            raise IntegrityError(f"pages {wrong.tolist()} given back are free already")
        if len(pages) + self.num_free > self.num_pages:
            raise IntegrityError(
                f"{len(pages)} pages given back, only {self.num_pages - self.num_free} are taken"
            )

    def free_pages(self) -> np.ndarray:
        """A copy of the free pages, int32 [free]; raises IntegrityError if one is there twice."""
        pages = self._stack[: self.num_free].copy()
        marked = int(np.count_nonzero(self._is_free))
        if marked != self.num_free or not self._is_free[pages].all():
            raise IntegrityError(f"{self.num_free} pages on the stack, {marked} marked free")
        return pages
