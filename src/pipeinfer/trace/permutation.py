"""A secret renaming of a vocabulary: a keyed bijection on token ids with fixed points.

Knows ids only. It is a substitution: it hides what a text says, not how often an id occurs.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np

RANKS = 8  # 64-bit ranks out of one hash


class Permutation:
    """A bijection on 0 .. vocabulary-1; ids in `fixed` stay, and so do those beyond the vocabulary.

    The others are sorted by a keyed hash, so that the same key and model give the same renaming on
    any machine. key: at most 64 bytes.
    """

    def __init__(self, key: bytes, vocabulary: int, fixed: Iterable[int]) -> None:
        kept = np.zeros(vocabulary, dtype=bool)
        kept[[token for token in fixed if 0 <= token < vocabulary]] = True
        free = np.flatnonzero(~kept)
        blocks = range(-(-vocabulary // RANKS))
        hashes = [blake2b(n.to_bytes(8, "little"), key=key, digest_size=64) for n in blocks]
        ranks = np.frombuffer(b"".join(one.digest() for one in hashes), dtype="<u8")
        self._table = np.arange(vocabulary, dtype=np.int32)
        self._table[free] = free[np.argsort(ranks[free], kind="stable")]

    def ids(self, raw: bytes) -> bytes:
        """Little-endian int32 bytes, renamed."""
        return self.array(np.frombuffer(raw, dtype="<i4")).tobytes()

    def array(self, ids: np.ndarray) -> np.ndarray:
        """int32 [n], renamed."""
        table = self._table
        inside = (ids >= 0) & (ids < len(table))
        return np.where(inside, table[np.where(inside, ids, 0)], ids).astype("<i4")

    def one(self, token: int) -> int:
        """One id, renamed."""
        return int(self._table[token]) if 0 <= token < len(self._table) else token
