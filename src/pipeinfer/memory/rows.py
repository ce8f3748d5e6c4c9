"""What the memory manager decided of one plan.

The second of a step's descriptions: Plan (messages.py), Rows, Step (step.py), and DeviceStep
(kernels/interface.py), on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

_NONE = np.empty(0, dtype=np.int32)


@dataclass
class Rows:
    """The R rows of one plan, in the order of the plan, and what the plan did to the pages. Written
    by MemoryManager.apply; read by StepBuilder, which makes a Step of it, and by EngineCore, for
    its messages.

    slots: int32 [R].
    starts, counts: int32 [R]; row r computes positions starts[r] .. starts[r] + counts[r] - 1.
    samples: bool [R], the row ends with a token that is sampled.
    known: bool [R], the row computes known ids: a prefill. False: a decode, of the id that the
        step before sampled and that only the device knows.
    deferred: bool [R], there were no pages for the row, so it computes nothing.
    same_as_previous: the rows are those of the plan before, and both decode one token of each.
    number: of the plan.
    admitted: int32 [admits], slots that the plan filled.
    cached: int32 [admits], tokens of each that the prefix cache had.
    free, evictable: pages after the plan.
    evicted: pages that the cache has evicted since the reset.
    digest: 64 bits, hash of all decisions since the reset.
    unverified: int32 [n], pages that were freed although no finite logits were computed from them;
        see KVPool.zero_pages.
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
