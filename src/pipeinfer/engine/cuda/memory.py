"""How many KV pages fit beside everything else on a GPU, measured by a step of the largest size.

Knows bytes and one artificial step; no request and no model.
"""

from __future__ import annotations

import gc

import numpy as np
import torch

from pipeinfer.engine.cuda.artificial import artificial_step
from pipeinfer.engine.cuda.rooms import Limits
from pipeinfer.engine.cuda.runner import CudaRunner
from pipeinfer.steps.step import Step

LARGE_TOP_K = 20


def largest_step(limits: Limits, page_size: int, max_model_len: int) -> Step:
    """All rows and all tokens; everything lies in the dummy page, every row samples."""
    rows = min(limits.rows, limits.tokens)
    counts = np.ones(rows, dtype=np.int32)
    left = limits.tokens - rows
    for row in range(rows - 1, -1, -1):
        counts[row] += min(left, max_model_len - 1)
        left -= int(counts[row]) - 1
    return artificial_step(counts, page_size)


def warm_up(runner: CudaRunner, limits: Limits, page_size: int, max_model_len: int) -> None:
    """Runs the largest step, and small ones of each kind: kernels are compiled and loaded then."""
    largest = largest_step(limits, page_size, max_model_len)
    for _ in range(2):  # the first one also allocates what stays
        runner.run(largest)
    runner.run(artificial_step(np.ones(min(limits.rows, 3), dtype=np.int32), page_size))
    runner.run(artificial_step(np.ones(1, dtype=np.int32), page_size, top_k=LARGE_TOP_K))


def free_for_pages(fraction: float) -> int:
    """Bytes for the KV pool: `fraction` of the GPU's memory less all that is, and was, in use.

    Call it after a warm-up, when the warm-up's pool is gone.
    """
    torch.cuda.synchronize()
    gc.collect()
    peak = torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    transient = peak - torch.cuda.memory_reserved()
    return int(total * fraction) - (total - free) - transient
