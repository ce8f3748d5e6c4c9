"""Where the ranges of phases.py are seen: on NVTX timelines (nsys), or in a torch profiler's trace.

Knows torch, no step and no phase.
"""

from __future__ import annotations

import threading

import torch
from torch.profiler import record_function

from pipeinfer.engine.phases import Marks, NoMarks


class NvtxMarks:
    """Ranges for nsys; without a listener a push and a pop take less than a microsecond."""

    def push(self, name: str) -> None:
        """Opens a range of this thread."""
        # torch's own code gives this argument no type.
        torch.cuda.nvtx.range_push(name)  # pyright: ignore[reportUnknownMemberType]

    def pop(self) -> None:
        """Closes the innermost one."""
        torch.cuda.nvtx.range_pop()


class _Opened(threading.local):
    """The ranges that a thread has opened, the innermost last."""

    def __init__(self) -> None:
        self.ranges: list[record_function] = []


class ProfilerMarks:
    """Ranges in the trace of a running torch profiler."""

    def __init__(self) -> None:
        self._opened = _Opened()

    def push(self, name: str) -> None:
        """Opens a range of this thread."""
        opened = record_function(name)
        opened.__enter__()
        self._opened.ranges.append(opened)

    def pop(self) -> None:
        """Closes the innermost one."""
        self._opened.ranges.pop().__exit__(None, None, None)


def usual_marks() -> Marks:
    """NVTX where torch has CUDA and a GPU, else none."""
    return NvtxMarks() if torch.cuda.is_available() else NoMarks()
