"""What the memory manager decided of one plan, row by row: between Plan and Step.

Plain data; knows nobody.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

_NONE = np.empty(0, dtype=np.int32)


@dataclass
class Rows:
    """The rows of plan `number` in the plan's order, [R] each, and what the plan did to the pages.

    Written by MemoryManager.apply and by nobody afterwards; read by StepBuilder, which makes a Step
    of them, and by EngineCore for its messages.

    slots, starts, counts: int32; row r computes positions starts[r] .. starts[r]+counts[r]-1.
    samples: bool, such a row ends with a sampled token. known: bool, its tokens are known ids (else
    the one that lies on the device). deferred: bool, there were no pages for it, so it computes
    nothing. same_as_previous: the rows are those of the plan before, and both decode one token of
    each.

    admitted, cached: int32 [admits], slots, and tokens found in the prefix cache. free, evictable:
    pages after the plan. evicted: from the cache since the reset. digest: 64-bit hash of all
    decisions since then. unverified: int32 [n], pages that were freed and whose contents no finite
    logits vouch for, see KVPool.clear.
    """

    slots: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    samples: np.ndarray
    known: np.ndarray
    deferred: np.ndarray
    same_as_previous: bool = False
    number: int = -1
    admitted: np.ndarray = field(default_factory=lambda: _NONE)
    cached: np.ndarray = field(default_factory=lambda: _NONE)
    free: int = 0
    evictable: int = 0
    evicted: int = 0
    digest: int = 0
    unverified: np.ndarray = field(default_factory=lambda: _NONE)
