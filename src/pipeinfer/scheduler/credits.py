"""How many pages the scheduler may still promise.

Knows counts only, no page. The engine reports what is free or evictable after a plan; what was
planned since is taken off without counting on cache hits. Being wrong is harmless: the engine
defers what it cannot allocate.
"""

from __future__ import annotations

from collections import deque


class Credits:
    """Pages of one group. `page_size` in tokens, `pages` in the whole pool."""

    def __init__(self, page_size: int, pages: int) -> None:
        self.page_size = page_size
        self.pages = pages
        self._reported = pages
        self._number = -1  # of the plan after which that many were there
        self._planned: deque[tuple[int, int]] = deque()  # (plan number, pages it may take)

    def between(self, start: int, end: int) -> int:
        """Pages that a request takes as it grows from `start` to `end` computed tokens."""
        size = self.page_size
        return (end + size - 1) // size - (start + size - 1) // size

    def report(self, number: int, free: int, evictable: int) -> bool:
        """The engine's counts after it applied plan `number`. False, and nothing changes, if it has
        told of a later plan: what was admitted by that one it says before the results of those in
        flight, which name the pages that there were then."""
        if number < self._number:
            return False
        self._number = number
        while self._planned and self._planned[0][0] <= number:
            self._planned.popleft()
        self._reported = free + evictable
        return True

    def plan(self, number: int, pages: int) -> None:
        """Plan `number` may take that many pages."""
        self._planned.append((number, pages))

    @property
    def available(self) -> int:
        """Pages that a new plan may take."""
        return self._reported - sum(pages for _, pages in self._planned)


class Allowance:
    """Pages that one plan may take of the `credits`, and of the `released` ones that it gives back.

    taken: what it takes so far, net of what it gives back. left: what it may still take.
    """

    def __init__(self, credits: Credits, released: int = 0) -> None:
        self.page_size = credits.page_size
        self.between = credits.between
        self.taken = -released
        self.left = credits.available + released

    def room(self, start: int) -> int:
        """Tokens for which there is room behind `start` computed ones: the rest of the page that
        these have begun, which is theirs already, and the pages that are left."""
        return -start % self.page_size + max(self.left, 0) * self.page_size

    def take(self, pages: int) -> None:
        """So many more; below 0 they are given back."""
        self.taken += pages
        self.left -= pages
