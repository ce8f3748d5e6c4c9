"""The memory of one group in counts: how many pages are free, and the server's own prefix cache.

Does what memory/manager.py does, plan by plan and in the same order, but for pages without names:
which page a token lies in changes neither time nor hits. Knows no policy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeinfer.memory.errors import IntegrityError
from pipeinfer.memory.prefix_cache import make_cache
from simulate.seats import Row, Seat


class PageCounts:
    """See memory/manager.py, MemoryManager. `clock` is the plan's number."""

    def __init__(self, pages: int, page_size: int, cache: str) -> None:
        self.page_size, self.total, self.free = page_size, pages, pages
        self.cache = make_cache(cache, page_size)
        self.evicted = 0
        self._names = np.zeros(pages, np.int32)  # for the cache, which wants pages with names
        self._prompts_done: tuple[list[Seat], list[Seat]] = [], []  # by the last two plans

    def begin(
        self, releases: Sequence[tuple[Seat, int]], lending: Sequence[Seat], clock: int
    ) -> None:
        """The first half of a plan: releases of (seat, outputs confirmed since its admission), then
        the prompts that were completed two plans before, and what there is of those that lend."""
        for seat, confirmed in releases:
            tokens = min(seat.computed, seat.known + confirmed)
            self._share(seat, seat.ids(tokens), clock)
            self.cache.unlock(seat.node)
            self.free += seat.held - seat.shared
            seat.gone = True
        done, later = self._prompts_done
        for seat in done:
            if not seat.gone:
                self._share(seat, seat.ids(seat.known), clock)
        self._prompts_done = later, []
        for seat in lending:
            self._share(seat, seat.ids(min(seat.computed, seat.known)), clock)

    def admit(self, seat: Seat, clock: int) -> int:
        """Locks the cached prefix of the seat's tokens; returns how many tokens it has."""
        node, pages = self.cache.match(seat.ids(seat.known - 1), "", clock)
        self.cache.lock(node)
        seat.node = node
        seat.shared = seat.held = len(pages)
        seat.computed = len(pages) * self.page_size
        return seat.computed

    def needed(self, rows: Sequence[Row]) -> int:
        """Fills in what each row computes; returns how many pages all of them need."""
        size, total = self.page_size, 0
        for row in rows:
            seat = row.seat
            row.start, left = seat.computed, seat.known - seat.computed
            if left > 0:
                row.count = min(left, row.count)
                row.prompt = True
            else:
                row.count = int(seat.computed + 2 <= seat.max_total and row.count > 0)
            row.pages = -(-(row.start + row.count) // size) - seat.held
            total += row.pages
        return total

    def defer(self, rows: Sequence[Row]) -> int:
        """Takes the rows that do not fit out of the step, in order; returns the pages needed."""
        left, total = self.free + self.cache.evictable, 0
        for row in rows:
            if row.pages and row.pages > left:
                row.deferred, row.count, row.pages = True, 0, 0
            left -= row.pages
            total += row.pages
        return total

    def advance(self, rows: Sequence[Row]) -> None:
        """Moves the seats of the rows forward; their pages were taken."""
        for row in rows:
            seat = row.seat
            seat.held += row.pages
            seat.computed = row.end
            row.samples = row.count > 0 and row.end >= seat.known
            if row.samples and row.prompt:
                self._prompts_done[1].append(seat)

    def fits(self, count: int) -> bool:
        """Whether so many pages are free or evictable."""
        return count <= self.free + self.cache.evictable

    def take(self, count: int) -> None:
        """So many pages are somebody's now. Raises IntegrityError if there are fewer."""
        missing = count - self.free
        if missing > 0:
            evicted = len(self.cache.evict(missing))
            self.evicted += evicted
            self.free += evicted
        if count > self.free:
            raise IntegrityError(f"{count} pages wanted, {self.free} of {self.total} free")
        self.free -= count

    def _share(self, seat: Seat, tokens: np.ndarray, clock: int) -> None:
        """Hands the whole pages of `tokens`, the seat's first and all computed, to the cache."""
        count, cache = len(tokens) // self.page_size, self.cache
        if count == 0:
            return
        before = cache.evictable + cache.locked
        node, _ = cache.insert(tokens[: count * self.page_size], self._names[:count], "", clock)
        if node is None:
            return
        # Pages of its own that the tree did not take are duplicates of what the tree has.
        self.free += count - seat.shared - (cache.evictable + cache.locked - before)
        seat.shared = count
        seat.held = max(seat.held, count)
        cache.lock(node)
        cache.unlock(seat.node)
        seat.node = node
