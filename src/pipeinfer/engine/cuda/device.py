"""One stream of a GPU as a device: work is called at once, and its kernels are queued.

While anybody waits for a mark the event loop does not sleep: it asks again and again whether the
oldest one has ended. Threads that wait would compete with the loop for the interpreter, and a core
that sleeps between two steps runs the code of the next one with cold caches.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from pipeinfer.engine.cuda.lent import lent
from pipeinfer.engine.device import Replay, Tensors, Work, nothing

# Calls before a capture: lazy initialisation must not be captured. Most of it is of the first.
FIRST_TRIES, TRIES = 2, 1
LONG = 0.05  # seconds that are measured of any work
MARKS = 16  # more than are under way, two a step; an end is also read for the mark after it


class CudaMark:
    """See engine/device.py; between two events of the stream, `before` them the end of the last."""

    def __init__(
        self,
        device: CudaDevice,
        began: torch.cuda.Event,
        ended: torch.cuda.Event,
        before: torch.cuda.Event | None,
    ) -> None:
        self._device = device
        self._began = began
        self._ended = ended
        self._before = before
        self._seconds: tuple[float, float] | None = None  # busy and idle, once they were read

    @property
    def ready(self) -> bool:
        return self._seconds is not None or self._ended.query()

    @property
    def busy(self) -> float:
        return self._read()[0]

    @property
    def idle(self) -> float:
        return self._read()[1]

    def wait(self) -> None:
        self._read()

    def then(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        self._device.ask(loop, self, call)

    def _read(self) -> tuple[float, float]:
        if self._seconds is None:
            self._ended.synchronize()
            busy = self._began.elapsed_time(self._ended) / 1e3
            idle = 0.0
            if self._before is not None:
                idle = max(self._before.elapsed_time(self._began) / 1e3, 0.0)
            self._seconds = busy, idle
        return self._seconds


class CudaDevice:
    """See engine/device.py. What `work` raises is raised by `submit`: it could not be queued."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._events = [
            tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(MARKS)
        ]
        self._submitted = 0
        self._last: torch.cuda.Event | None = None
        self._asked: deque[tuple[CudaMark, Callable[[], None]]] = deque()
        self._asking = False
        self._memory: Any = None  # of all that is captured

    def submit(self, work: Work, prepare: Work = nothing) -> CudaMark:
        """The stream is current then, and stays it: what torch looks up to enter and leave one
        takes as long as the launch of a graph.
        """
        began, ended = self._events[self._submitted % MARKS]
        self._submitted += 1
        torch.cuda.set_stream(self.stream)
        prepare()
        began.record(self.stream)
        work()
        ended.record(self.stream)
        before, self._last = self._last, ended
        return CudaMark(self, began, ended, before)

    def run(self, work: Work) -> None:
        with torch.cuda.stream(self.stream):
            work()
            torch.cuda.synchronize()

    def capture(self, body: Callable[[], Tensors]) -> Replay:
        """As a CUDA graph."""
        for _ in range(TRIES if self._memory else FIRST_TRIES):
            body()
        self.stream.synchronize()
        self._memory = self._memory or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Not by torch.cuda.graph, which gives all cached memory back to the driver each time: the
        # next call would ask for it again. Of this thread alone: NCCL has one of its own, which
        # asks after events meanwhile.
        graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
        try:
            tensors = body()
        finally:
            graph.capture_end()
        graph.replay()  # the first brings it to the device: a millisecond, of nobody's step here
        # What is captured next may use the same memory.
        return Replay(graph.replay, tuple(map(lent, tensors)))

    def seconds(self, work: Work, times: int) -> float:
        """Less often if it takes long: what disturbs it takes as long as always."""
        found: list[float] = []
        while len(found) < times and sum(found) < LONG:
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            work()
            ended.record()
            ended.synchronize()
            found.append(began.elapsed_time(ended) / 1e3)
        return min(found)

    def pinned(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, pin_memory=True)

    def close(self) -> None:
        self.stream.synchronize()

    def ask(
        self, loop: asyncio.AbstractEventLoop, mark: CudaMark, call: Callable[[], None]
    ) -> None:
        """`call` on `loop`, which is the same one always, when `mark` has ended."""
        self._asked.append((mark, call))
        if not self._asking:
            self._asking = True
            loop.call_soon(self._ask, loop)

    def _ask(self, loop: asyncio.AbstractEventLoop) -> None:
        """Calls whom it can, and asks again in the loop's next iteration while anybody waits, also
        if one that was called raises: the loop's exception handler gets that."""
        try:
            while self._asked and self._asked[0][0].ready:
                self._asked.popleft()[1]()  # which may ask for the next one
        finally:
            self._asking = len(self._asked) > 0
            if self._asking:
                loop.call_soon(self._ask, loop)
