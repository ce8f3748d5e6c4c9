"""A running hash of decisions, by which the ranks of a group notice that they disagree.

Knows no plan and no page.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np


class RunningDigest:
    """Chained BLAKE2b over integer arrays; `value` is the last 64-bit link."""

    def __init__(self) -> None:
        self.value = 0
        self._hash = blake2b(digest_size=8)

    def add(self, array: np.ndarray) -> None:
        """Takes in `array` (C-contiguous): its length, then its bytes."""
        self._hash.update(array.nbytes.to_bytes(8, "little"))
        self._hash.update(array.data)

    def close(self) -> int:
        """Ends a link of the chain, returns and keeps its hash."""
        link = self._hash.digest()
        self.value = int.from_bytes(link, "little")
        self._hash = blake2b(link, digest_size=8)
        return self.value
