"""Machines: all of an engine that depends on the kind of device, host or GPU.

    Machine        protocol: device, kernels, memory for pages, warm-up
    HostMachine    the CPU, shared by the ranks on this host
    CudaMachine    one GPU; how much memory its pages get is measured by a step of the largest size
    CudaDevice     a stream of a GPU as a Device, see engine/device.py
    GpuKind        what each kind of GPU can run, for docs/gpus.md and `pipeinfer doctor`

Work for a GPU is called at once, and its kernels are queued. While a callback waits for an event,
the event loop polls the oldest event instead of sleeping: a waiting thread would compete with the
loop for the interpreter, and a core that sleeps between two steps runs the code of the next step
with cold caches. Uses dummy steps; no request and no model.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from pipeinfer.attention import registry
from pipeinfer.attention.registry import Gpu
from pipeinfer.engine.calibrate import (
    LARGE_TOP_K,
    alike_decodes,
    allow_all,
    dummy_step,
    largest_step,
)
from pipeinfer.engine.device import Device, HostDevice, Replay, Tensors, Work, nothing
from pipeinfer.engine.device_memory import Allocate, CudaMemory, DeviceMemory, HostMemory
from pipeinfer.engine.graphs import MIN_SHARED_DECODES
from pipeinfer.engine.runner import Runner
from pipeinfer.engine.start import hashing
from pipeinfer.kernels import host
from pipeinfer.kernels.interface import Kernels
from pipeinfer.layers.quantized import FP8_MIN_CAPABILITY
from pipeinfer.layers.weight import MIN_SHARED_MEMORY_BYTES
from pipeinfer.processes import memory_left, resident_bytes

log = logging.getLogger(__name__)

# A pool on the host competes with everything else that runs there, so it is not taken as large as
# it could be; --kv-pages takes more.
MAX_HOST_BYTES = 4 * 2**30
HOST_STEP_TOKENS = 2048

Built = TypeVar("Built")


class Machine(Protocol):
    """The device of one rank, and what the engine must know of the kind of device."""

    @property
    def where(self) -> torch.device:
        """The torch device of tensors."""
        ...

    @property
    def device(self) -> Device:
        """The device that runs steps."""
        ...

    @property
    def kernels(self) -> Kernels:
        """Kernels for tensors on `where`."""
        ...

    @property
    def step_tokens(self) -> int:
        """Tokens of the largest step, unless settings set another number."""
        ...

    def build(self, work: Callable[[], Built], /) -> Built:
        """Calls `work` on the thread that builds engines on this machine; returns its result."""
        ...

    def warm_up(self, runner: Runner, max_tokens: int, shares_device: bool, /) -> None:
        """Compiles and allocates all that steps need, before free memory is measured.

        - max_tokens: tokens of the longest request
        - shares_device: whether another engine serves on this device, so that large steps would
          delay its steps
        """
        ...

    @property
    def total_bytes(self) -> int:
        """Bytes of its memory, in use or not."""
        ...

    def free_for_pages(self, fraction: float, shared: int | None = None, /) -> int:
        """Returns bytes for KV pages, if `fraction` of the machine's memory may be in use. shared:
        bytes of this process that a standby shares; as much as the rest of this process takes is
        left for the standby. None: there is no standby.
        """
        ...

    @property
    def allocate(self) -> Allocate:
        """Allocates memory that can outlive this process."""
        ...

    def scratch(self, size: int, /) -> DeviceMemory:
        """Returns addresses for `size` bytes of such memory, scratch until memory is mapped
        there.
        """
        ...

    def trim(self) -> None:
        """Gives cached free memory back to the system."""
        ...


class HostMachine:
    """This host, as one of `ranks` that share it."""

    step_tokens = HOST_STEP_TOKENS

    def __init__(self, threads: int, ranks: int) -> None:
        """Sets torch's number of threads; 0: all cores, divided by the number of ranks."""
        if threads or ranks > 1:
            torch.set_num_threads(threads or max(torch.get_num_threads() // ranks, 1))
        self.device = HostDevice()
        self.kernels: Kernels = host
        self.where = torch.device("cpu")
        self.allocate: Allocate = HostMemory
        self._ranks = ranks
        self._sampling_bytes = 0

    def build(self, work: Callable[[], Built]) -> Built:
        """Calls `work` on the thread that computes steps. OpenMP has a team of threads for each
        thread that ever computed anything large; with two such teams on the same cores each barrier
        of a step would put its threads to sleep, and steps took up to twice as long.
        """
        built: list[Built] = []
        self.device.run(lambda: built.append(work()))
        return built[0]

    def warm_up(self, runner: Runner, max_tokens: int, shares_device: bool) -> None:
        """Notes the memory that sampling takes; nothing is compiled on a host."""
        self._sampling_bytes = runner.sampling_bytes

    def scratch(self, size: int) -> DeviceMemory:
        return HostMemory(size, scratch=True)

    def trim(self) -> None:
        """Does nothing: no free memory is cached."""

    @property
    def total_bytes(self) -> int:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def free_for_pages(self, fraction: float, shared: int | None = None) -> int:
        free = available_bytes() - (0 if shared is None else resident_bytes() - shared)
        of_rank = int(free // self._ranks * fraction)
        return min(of_rank - self._sampling_bytes, MAX_HOST_BYTES)


def available_bytes(root: Path = Path("/")) -> int:
    """Returns bytes that can be taken without swapping, within the control group's limit if it has
    one.
    """
    free, left = _meminfo(root / "proc/meminfo"), memory_left(root)
    return free if left is None else min(free, left)


def _meminfo(path: Path) -> int:
    if path.exists():
        for line in path.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# Calls before a capture: lazy initialisation must not be captured, and happens mostly in the first
# call.
FIRST_TRIES, TRIES = 2, 1
SHARED_TOKENS = 512  # tokens of a standby's first step: 20 ms of a model of 14B on an H200
LONG = 0.05  # seconds that are measured of any work
EVENT_PAIRS = 16  # more than are under way, two a step; an end is also read for the event after it


class CudaEvent:
    """The StepEvent of a CudaDevice: work between two events of the stream; `before` is the end of
    the work before it.
    """

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
    """A stream of a GPU as a Device. Errors of `work` are raised by `submit`: it could not be
    queued.
    """

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
        self._memory: Any = None  # memory pool of all captured graphs

    def submit(self, work: Work, /, *, before: Work = nothing) -> CudaEvent:
        """Queues `work` on the stream, which becomes and stays the current stream: entering and
        leaving a stream in torch takes as long as the launch of a graph.
        """
        began, ended = self._events[self._submitted % EVENT_PAIRS]
        self._submitted += 1
        torch.cuda.set_stream(self.stream)
        before()
        began.record(self.stream)
        work()
        ended.record(self.stream)
        last, self._last = self._last, ended
        return CudaEvent(self, began, ended, last)

    def run(self, work: Work) -> None:
        with torch.cuda.stream(self.stream):
            torch.cuda.synchronize()  # on any thread, it makes the GPU's context the current one
            work()
            torch.cuda.synchronize()

    def capture(self, body: Callable[[], Tensors], first_run: bool = True) -> Replay:
        """Captures `body` as a CUDA graph, after some calls without a capture."""
        for _ in range(TRIES if self._memory else FIRST_TRIES):
            body()
        self.stream.synchronize()
        self._memory = self._memory or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # torch.cuda.graph would give all cached memory back to the driver each time, and the next
        # call would ask for it again. The capture mode is that of this thread alone: NCCL has a
        # thread of its own, which queries events meanwhile.
        graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
        try:
            tensors = body()
        finally:
            graph.capture_end()
        if first_run:  # it brings the graph to the device: a millisecond, here outside of any step
            graph.replay()
        # The next capture may use the same memory.
        return Replay(graph.replay, tuple(map(non_owning_view, tensors)))

    def seconds(self, work: Work, times: int) -> float:
        """Measures fewer runs if they take long: a disturbance weighs less in a long run."""
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
        """Schedules `call` on `loop` for the end of `event`; all calls must name the same loop."""
        self._callbacks.append((event, call))
        if not self._polling:
            self._polling = True
            loop.call_soon(self._ask, loop)

    def _ask(self, loop: asyncio.AbstractEventLoop) -> None:
        """Calls the callbacks of events that have ended, and polls again in the loop's next
        iteration while callbacks are left. Errors of a callback go to the loop's exception handler.
        """
        try:
            while self._callbacks and self._callbacks[0][0].ready:
                self._callbacks.popleft()[1]()  # which may ask for the next one
        finally:
            self._polling = len(self._callbacks) > 0
            if self._polling:
                loop.call_soon(self._ask, loop)


WORDS = {1: "|i1", 2: "<i2", 4: "<i4"}  # integers by bytes: bfloat16 has no name there


def array_interface(tensor: torch.Tensor) -> dict[str, object]:
    """Returns the tensor's __cuda_array_interface__, with numbers as integers of their size.
    Source: https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html.
    """
    size = tensor.itemsize
    return {
        "shape": tuple(tensor.shape),
        "strides": tuple(stride * size for stride in tensor.stride()),
        "typestr": WORDS[size],
        "data": (tensor.data_ptr(), False),
        "version": 2,
    }


class _NonOwning:
    """An object from which torch makes a tensor that keeps only this object alive, not the memory.

    The results of a CUDA graph are read before another graph runs. If each graph kept its own,
    hundreds of graphs would hold logits of some hundred MB each.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = array_interface(tensor)


def non_owning_view(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of the same memory on a GPU that does not keep the memory; valid until the
    memory is used for other data. Returns `tensor` itself if torch makes no such view.
    """
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
    """The machine of one GPU."""

    step_tokens = GPU_STEP_TOKENS

    def __init__(self, ordinal: int, threads: int) -> None:
        """Makes GPU `ordinal` the current one, and sets how long Python lets a thread run. threads:
        of torch on the host; 0: torch's own number.
        """
        if threads:
            torch.set_num_threads(threads)
        # The thread that launches steps must not wait 5 ms, the default, for another one of Python.
        sys.setswitchinterval(SWITCH_SECONDS)
        torch.cuda.set_device(ordinal)
        from pipeinfer.kernels import by_triton  # needs triton, which hosts without a GPU may lack

        self.where = torch.device("cuda", ordinal)
        self.device = CudaDevice(self.where)
        self.kernels: Kernels = by_triton
        self.allocate: Allocate = CudaMemory

    def build(self, work: Callable[[], Built]) -> Built:
        """Calls `work` on the caller's thread, which also launches steps."""
        return work()

    def warm_up(self, runner: Runner, max_tokens: int, shares_device: bool) -> None:
        """Runs the largest step, and small ones of each kind: kernels are compiled and loaded.
        Beside another engine, runs once a step with all rows but few tokens: that engine has
        measured the memory of the largest step, and its kernels are compiled.
        """
        hashing().join()
        page_size, rows = runner.pool.page_size, runner.largest.rows
        most = runner.largest
        if shares_device:
            most = replace(most, tokens=min(most.tokens, max(SHARED_TOKENS, rows)))
        largest = largest_step(most, page_size, max_tokens)
        for _ in range(1 if shares_device else 2):  # the first one also allocates memory that stays
            launched = runner.launch(largest)
            runner.sample_masked(launched, allow_all)
            launched.take()
        runner.run(dummy_step(np.ones(min(rows, 3), dtype=np.int32), page_size))
        runner.run(dummy_step(np.ones(1, dtype=np.int32), page_size, top_k=LARGE_TOP_K))
        if runner.shares and rows > MIN_SHARED_DECODES:
            # Shared-prefix graphs are captured at once, the others later, and each doubling of rows
            # needs a kernel of its own, which must be loaded by then.
            doubled = (
                1 << power for power in range(MIN_SHARED_DECODES.bit_length(), rows.bit_length())
            )
            for decodes in sorted({*doubled, rows}):
                runner.run(dummy_step(np.ones(decodes, dtype=np.int32), page_size))
            runner.run(alike_decodes(rows, 0, page_size))
            runner.run(alike_decodes(MIN_SHARED_DECODES, 1, page_size))

    def scratch(self, size: int) -> DeviceMemory:
        return CudaMemory(size, scratch=True)

    def trim(self) -> None:
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()

    @property
    def total_bytes(self) -> int:
        return torch.cuda.mem_get_info()[1]

    def free_for_pages(self, fraction: float, shared: int | None = None) -> int:
        """Returns `fraction` of the GPU's memory less all that is, and was, in use; to be called
        when the warm-up's pool is freed. A standby takes as much at its start.
        """
        self.trim()
        transient = torch.cuda.max_memory_reserved() - torch.cuda.memory_reserved()
        free, total = torch.cuda.mem_get_info()
        taken = total - free + transient
        standby = 0 if shared is None else taken - shared
        return int(total * fraction) - taken - standby


HEADS = (64, 96, 128, 192, 256)
ALL_PACKAGES: frozenset[str] = frozenset({"flashinfer", "sgl_kernel"})
YES, PLAIN = "in their format", "plain"
TABLE_HEAD = (
    "capability",
    "GPUs",
    "attention, heads",
    "FP8 weights",
    "4 bits",
    "FP8 KV",
    "run so far",
)


@dataclass(frozen=True)
class GpuKind:
    """GPUs of one compute capability.

    Attributes:
    - capability: major and minor
    - names: GPUs
    - shared_bytes: shared memory of a block
    - run: what was run on such a GPU, in words
    - missing: what was never run on such a GPU, though there is code for it
    """

    capability: tuple[int, int]
    names: str
    shared_bytes: int
    run: str = "nothing"
    missing: str = ""

    @property
    def number(self) -> str:
        """The capability as NVIDIA writes it, such as 9.0."""
        return "{}.{}".format(*self.capability)

    @property
    def backends(self) -> dict[str, tuple[int, ...]]:
        """Head sizes by attention backend that takes them in bfloat16, with all packages
        installed.
        """
        found = {
            name: tuple(dim for dim in HEADS if self._supports(name, dim))
            for name in registry.BACKENDS
        }
        return {name: dims for name, dims in found.items() if dims}

    def _supports(self, name: str, dim: int, e4m3: bool = False) -> bool:
        gpu = Gpu(self.capability, "bfloat16", dim, ALL_PACKAGES, e4m3=e4m3)
        return registry.unsupported_reason(name, gpu) == ""

    @property
    def fp8_weights(self) -> str:
        """Format in which FP8 weights are computed: their own, or plain."""
        fits = (
            self.capability >= FP8_MIN_CAPABILITY and self.shared_bytes >= MIN_SHARED_MEMORY_BYTES
        )
        return YES if fits else PLAIN

    @property
    def int4_weights(self) -> str:
        """Format in which 4-bit weights are computed: their own, or plain."""
        return YES if self.shared_bytes >= MIN_SHARED_MEMORY_BYTES else PLAIN

    @property
    def fp8_kv(self) -> str:
        """Names of the backends that take FP8 keys and values, for heads of 128."""
        names = [name for name in registry.BACKENDS if self._supports(name, 128, e4m3=True)]
        return ", ".join(names)

    def cells(self) -> tuple[str, ...]:
        """Returns a row of the table, with the columns of TABLE_HEAD."""
        groups: dict[tuple[int, ...], list[str]] = {}
        for name, dims in self.backends.items():
            groups.setdefault(dims, []).append(name)
        attention = "; ".join(
            f"{', '.join(names)}: {'all' if dims == HEADS else ', '.join(map(str, dims))}"
            for dims, names in groups.items()
        )
        run = f"{self.run}; not yet: {self.missing}" if self.missing else self.run
        formats = (self.fp8_weights, self.int4_weights, self.fp8_kv)
        return (self.number, self.names, attention, *formats, run)


KINDS: Sequence[GpuKind] = (
    GpuKind((8, 0), "A100", 163 * 1024),
    GpuKind((8, 9), "L4, L40S, RTX 4090", 99 * 1024),
    GpuKind(
        (9, 0),
        "H100, H200",
        227 * 1024,
        run="bfloat16 and float16, heads of 64 and 128, with flashinfer 256, FP8 and 4 bits, "
        "FP8 KV, models of transformers",
        missing="other heads of 256, FP8 KV with flashinfer but for heads of 64",
    ),
    GpuKind((10, 0), "B200", 227 * 1024),
)


def doctor_line(capability: tuple[int, int]) -> str:
    """Returns the line of `pipeinfer doctor` about a GPU of that capability."""
    kind = next((one for one in KINDS if one.capability == capability), None)
    if kind is None:
        return "pipeinfer was never run on this kind of GPU"
    run = f"of this kind, what was run: {kind.run}"
    return f"{run}; not yet: {kind.missing}" if kind.missing else run


def table() -> str:
    """Returns the table of all kinds, in Markdown."""
    rows = (TABLE_HEAD, ("---",) * len(TABLE_HEAD), *(kind.cells() for kind in KINDS))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
