"""Where the ranges of phases.py are seen: on NVTX timelines (nsys), or in a torch profiler's trace.

Knows torch, no step and no phase.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.profiler import record_function

from pipeinfer.engine.phases import Marks, NoMarks


class NvtxMarks:
    """Ranges for nsys; without a listener a push and a pop take less than a microsecond."""

    def push(self, name: str) -> None:
        """Opens a range of this thread."""
        torch.cuda.nvtx.range_push(name)

    def pop(self) -> None:
        """Closes the innermost one."""
        torch.cuda.nvtx.range_pop()


class ProfilerMarks:
    """Ranges in the trace of a running torch profiler."""

    def __init__(self) -> None:
        self._threads = threading.local()

    def push(self, name: str) -> None:
        """Opens a range of this thread."""
        opened = record_function(name)
        opened.__enter__()
        self._stack().append(opened)

    def pop(self) -> None:
        """Closes the innermost one."""
        self._stack().pop().__exit__(None, None, None)

    def _stack(self) -> list[Any]:
        if not hasattr(self._threads, "stack"):
            self._threads.stack = []
        return self._threads.stack


def usual_marks() -> Marks:
    """NVTX where torch has CUDA and a GPU, else none."""
    return NvtxMarks() if torch.cuda.is_available() else NoMarks()
