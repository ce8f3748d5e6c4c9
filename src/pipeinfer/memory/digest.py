"""A running hash of decisions, by which the ranks of a group notice that they disagree.

Knows no plan and no page.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np


class RunningDigest:
    """Chained BLAKE2b over integer arrays; `value` is the last 64-bit link."""

    __transient__ = ("_hash",)  # between plans it says no more than `_link`

    def __init__(self) -> None:
        self.value = 0
        self._link = b""
        self._hash: blake2b | None = None

    def add(self, array: np.ndarray) -> None:
        """Takes in `array` (C-contiguous): its length, then its bytes."""
        if self._hash is None:
            self._hash = blake2b(self._link, digest_size=8)
        self._hash.update(array.nbytes.to_bytes(8, "little"))
        self._hash.update(array.data)

    def close(self) -> int:
        """Ends a link of the chain, returns and keeps its hash."""
        whole = self._hash or blake2b(self._link, digest_size=8)
        self._link = whole.digest()
        self._hash = None
        self.value = int.from_bytes(self._link, "little")
        return self.value
