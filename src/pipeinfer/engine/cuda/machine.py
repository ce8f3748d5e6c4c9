"""A GPU as what an engine stands on. How many KV pages fit beside everything else is measured, by a
step of the largest size.

Knows bytes and artificial steps; no request and no model.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

import numpy as np
import torch

from pipeinfer.engine.calibrate import (
    LARGE_TOP_K,
    alike_decodes,
    allow_all,
    artificial_step,
    largest_step,
)
from pipeinfer.engine.cuda.device import CudaDevice
from pipeinfer.engine.graph_shapes import SHARING
from pipeinfer.engine.machine import Built
from pipeinfer.engine.preload import hashing
from pipeinfer.engine.runner import Runner
from pipeinfer.kernels import by_triton
from pipeinfer.kernels.interface import Kernels

GPU_STEP_TOKENS = 8192
SWITCH_SECONDS = 2e-4


class CudaMachine:
    """See engine/machine.py."""

    step_tokens = GPU_STEP_TOKENS

    def __init__(self, ordinal: int, threads: int) -> None:
        """Makes GPU `ordinal` the current one, and sets how long Python lets a thread run;
        `threads` of torch on the host, if not 0."""
        if threads:
            torch.set_num_threads(threads)
        # The thread that launches steps must not wait 5 ms, the default, for another one of Python.
        sys.setswitchinterval(SWITCH_SECONDS)
        torch.cuda.set_device(ordinal)
        self.where = torch.device("cuda", ordinal)
        self.device = CudaDevice(self.where)
        self.kernels: Kernels = by_triton

    def build(self, work: Callable[[], Built]) -> Built:
        """On the caller's thread, which also launches steps."""
        return work()

    def warm_up(self, runner: Runner, most_tokens: int) -> None:
        """Runs the largest step, and small ones of each kind: kernels are compiled and loaded."""
        hashing().join()
        page_size, rows = runner.pool.page_size, runner.largest.rows
        largest = largest_step(runner.largest, page_size, most_tokens)
        for _ in range(2):  # the first one also allocates what stays
            launched = runner.launch(largest)
            runner.finish(launched, allow_all)
            launched.take()
        runner.run(artificial_step(np.ones(min(rows, 3), dtype=np.int32), page_size))
        runner.run(artificial_step(np.ones(1, dtype=np.int32), page_size, top_k=LARGE_TOP_K))
        if runner.shares and rows > SHARING:
            # Graphs in which decodes share are captured at once, the others later, and each
            # doubling of rows is cut by a kernel of its own, which must be there by then.
            doubled = (1 << power for power in range(SHARING.bit_length(), rows.bit_length()))
            for many in sorted({*doubled, rows}):
                runner.run(artificial_step(np.ones(many, dtype=np.int32), page_size))
            runner.run(alike_decodes(rows, 0, page_size))
            runner.run(alike_decodes(SHARING, 1, page_size))

    def free_for_pages(self, fraction: float) -> int:
        """`fraction` of the GPU's memory less all that is, and was, in use: to be asked when the
        warm-up's pool is gone."""
        torch.cuda.synchronize()
        gc.collect()
        peak = torch.cuda.max_memory_reserved()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        transient = peak - torch.cuda.memory_reserved()
        return int(total * fraction) - (total - free) - transient
