"""What applying one plan to the memory did, row by row.

Plain data between the manager and the step builder; knows nobody.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Rows:
    """The plan's rows in the plan's order, [R] each.

    slots, starts, counts: int32; row r computes positions starts[r] .. starts[r]+counts[r]-1.
    samples: bool, such a row ends with a sampled token. known: bool, its tokens are admitted ids
    (else the one that lies on the device). deferred: bool, no pages for it, nothing was touched.
    again: the rows are those of the plan before, and both decode one token of each.
    """

    slots: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    samples: np.ndarray
    known: np.ndarray
    deferred: np.ndarray
    again: bool = False


@dataclass(frozen=True)
class Applied:
    """The outcome of plan `number`.

    admitted, cached: int32 [admits], slots and tokens found in the prefix cache. free, evictable:
    pages after the plan. evicted: from the cache since the reset. digest: 64-bit hash of all
    decisions since then. unseen: int32 [n], pages that were freed and hold what no finite logits
    came from: see KVPool.clear.
    """

    number: int
    rows: Rows
    admitted: np.ndarray
    cached: np.ndarray
    free: int
    evictable: int
    evicted: int
    digest: int
    unseen: np.ndarray
