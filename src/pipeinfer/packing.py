"""Token ids as the bytes that messages carry, little-endian int32, and back.

By an array, or, for a handful, without: for one id, the usual case, an array costs more than its
use. Also how a step says what decodes begin with in common (Step.shared_prefixes). Knows no
message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

PART = 1 << 16  # what the upper of two numbers in a word is multiplied with
MOST_RUNS = 32  # beginnings that decodes of a step have in common: kernels have room for so many


def pack(ids: Sequence[int] | np.ndarray) -> bytes:
    """Integers as little-endian int32 bytes."""
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack(raw: bytes) -> np.ndarray:
    """int32 view [n] of what `pack` made; read-only."""
    return np.frombuffer(raw, dtype="<i4")


def pack_few(ids: Iterable[int]) -> bytes:
    """As `pack`."""
    return b"".join([token.to_bytes(4, "little", signed=True) for token in ids])


def unpack_few(raw: bytes) -> list[int]:
    """As `unpack`, but Python's integers; more than one take the way through an array."""
    if len(raw) == 4:
        return [int.from_bytes(raw, "little", signed=True)]
    return unpack(raw).tolist()
