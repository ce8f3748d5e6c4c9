"""A GPU: one stream of it as a device, and what an engine stands on there.

Work is called at once, and its kernels are queued. While anybody waits for an event the event loop
does not sleep: it asks again and again whether the oldest one has ended. Threads that wait would
compete with the loop for the interpreter, and a core that sleeps between two steps runs the code of
the next one with cold caches. How many KV pages fit beside everything else is measured, by a step
of the largest size. Needs triton. Knows bytes and dummy steps; no request and no model.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pipeinfer.engine.calibrate import (
    LARGE_TOP_K,
    alike_decodes,
    allow_all,
    dummy_step,
    largest_step,
)
from pipeinfer.engine.device import Replay, Tensors, Work, nothing
from pipeinfer.engine.graph_shapes import MIN_SHARED_DECODES
from pipeinfer.engine.machine import Built
from pipeinfer.engine.preload import hashing
from pipeinfer.engine.runner import Runner
from pipeinfer.kernels import by_triton
from pipeinfer.kernels.interface import Kernels

# Calls before a capture: lazy initialisation must not be captured. Most of it is of the first.
FIRST_TRIES, TRIES = 2, 1
LONG = 0.05  # seconds that are measured of any work
EVENT_PAIRS = 16  # more than are under way, two a step; an end is also read for the event after it


class CudaEvent:
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
            tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(EVENT_PAIRS)
        ]
        self._submitted = 0
        self._last: torch.cuda.Event | None = None
        self._callbacks: deque[tuple[CudaEvent, Callable[[], None]]] = deque()
        self._polling = False
        self._memory: Any = None  # of all that is captured

    def submit(self, work: Work, prepare: Work = nothing) -> CudaEvent:
        """The stream is current then, and stays it: what torch looks up to enter and leave one
        takes as long as the launch of a graph.
        """
        began, ended = self._events[self._submitted % EVENT_PAIRS]
        self._submitted += 1
        torch.cuda.set_stream(self.stream)
        prepare()
        began.record(self.stream)
        work()
        ended.record(self.stream)
        before, self._last = self._last, ended
        return CudaEvent(self, began, ended, before)

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
        return Replay(graph.replay, tuple(map(non_owning_view, tensors)))

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
        self, loop: asyncio.AbstractEventLoop, event: CudaEvent, call: Callable[[], None]
    ) -> None:
        """`call` on `loop`, which is the same one always, when `event` has ended."""
        self._callbacks.append((event, call))
        if not self._polling:
            self._polling = True
            loop.call_soon(self._ask, loop)

    def _ask(self, loop: asyncio.AbstractEventLoop) -> None:
        """Calls whom it can, and asks again in the loop's next iteration while anybody waits, also
        if one that was called raises: the loop's exception handler gets that."""
        try:
            while self._callbacks and self._callbacks[0][0].ready:
                self._callbacks.popleft()[1]()  # which may ask for the next one
        finally:
            self._polling = len(self._callbacks) > 0
            if self._polling:
                loop.call_soon(self._ask, loop)


log = logging.getLogger(__name__)

WORDS = {1: "|i1", 2: "<i2", 4: "<i4"}  # by bytes: bfloat16 has no name there


def array_interface(tensor: torch.Tensor) -> dict[str, object]:
    """Where its numbers are, as integers of their size. Source:
    https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html."""
    size = tensor.itemsize
    return {
        "shape": tuple(tensor.shape),
        "strides": tuple(stride * size for stride in tensor.stride()),
        "typestr": WORDS[size],
        "data": (tensor.data_ptr(), False),
        "version": 2,
    }


class _NonOwning:
    """What torch makes a tensor of; it keeps nothing but this.

    What a CUDA graph leaves behind is read before another graph runs. If each kept it, hundreds of
    graphs would hold logits of some hundred MB each."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = array_interface(tensor)


def non_owning_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers in the same place on a GPU, until that is given to others; `tensor` itself
    where torch makes no such view."""
    if not tensor.numel() or tensor.itemsize not in WORDS:
        return tensor
    try:
        found = torch.as_tensor(_NonOwning(tensor), device=tensor.device).view(tensor.dtype)
    except (RuntimeError, TypeError, ValueError) as error:
        log.warning("CUDA graphs keep more memory than they need: %s", error)
        return tensor
    return found if found.data_ptr() == tensor.data_ptr() else tensor


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

    def warm_up(self, runner: Runner, max_tokens: int) -> None:
        """Runs the largest step, and small ones of each kind: kernels are compiled and loaded."""
        hashing().join()
        page_size, rows = runner.pool.page_size, runner.largest.rows
        largest = largest_step(runner.largest, page_size, max_tokens)
        for _ in range(2):  # the first one also allocates what stays
            launched = runner.launch(largest)
            runner.finish(launched, allow_all)
            launched.take()
        runner.run(dummy_step(np.ones(min(rows, 3), dtype=np.int32), page_size))
        runner.run(dummy_step(np.ones(1, dtype=np.int32), page_size, top_k=LARGE_TOP_K))
        if runner.shares and rows > MIN_SHARED_DECODES:
            # Graphs in which decodes share are captured at once, the others later, and each
            # doubling of rows is cut by a kernel of its own, which must be there by then.
            doubled = (
                1 << power for power in range(MIN_SHARED_DECODES.bit_length(), rows.bit_length())
            )
            for many in sorted({*doubled, rows}):
                runner.run(dummy_step(np.ones(many, dtype=np.int32), page_size))
            runner.run(alike_decodes(rows, 0, page_size))
            runner.run(alike_decodes(MIN_SHARED_DECODES, 1, page_size))

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
