"""A prefix cache that keeps nothing: every request computes its whole prompt.

For comparison and for debugging. Knows no page.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeinfer.memory.errors import IntegrityError
from pipeinfer.memory.prefix_cache import CachedPath, PrefixMatch

_NO_PAGES = np.empty(0, dtype=np.int32)
_NOTHING = PrefixMatch(None, _NO_PAGES)


class NaiveCache:
    """See PrefixCache; nothing matches, nothing is taken."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.num_evictable = 0
        self.num_locked = 0

    def match(self, tokens: np.ndarray, salt: str, clock: int) -> PrefixMatch:
        """Nothing."""
        return _NOTHING

    def largest(self, count: int, max_ids: int) -> list[CachedPath]:
        """None."""
        return []

    def lock(self, node: object) -> None:
        """Nothing to lock."""

    def unlock(self, node: object) -> None:
        """Nothing to unlock."""

    def insert(self, tokens: np.ndarray, pages: np.ndarray, salt: str, clock: int) -> PrefixMatch:
        """Takes nothing."""
        return _NOTHING

    def evict(self, count: int) -> np.ndarray:
        """Has nothing to give up."""
        return _NO_PAGES

    def remove(self, tokens: np.ndarray, salt: str) -> np.ndarray:
        """Has nothing to give up."""
        return _NO_PAGES

    def reset(self) -> None:
        """Nothing to forget."""

    def check_integrity(self, holders: Sequence[object]) -> np.ndarray:
        """Nobody can hold a lock here."""
        if len(holders):
            raise IntegrityError(f"{len(holders)} locks on a cache without nodes")
        return _NO_PAGES
