"""Devices that compute steps in the order of submission, while the submitter goes on.

A CPU and a GPU differ in this: work for the host is called by a thread of its own, work for a GPU
is called at once and queues its kernels (CudaDevice in machine.py). Uses calls, tensors and an
event loop, no step.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeAlias

if TYPE_CHECKING:  # a driver of a device that computes nothing starts without torch
    import torch

Tensors: TypeAlias = "tuple[torch.Tensor, ...]"
Work = Callable[[], None]


def nothing() -> None:
    """Does nothing: the default of `before`."""


class StepEvent(Protocol):
    """The end of one piece of work."""

    @property
    def ready(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    @property
    def busy(self) -> float:
        """Seconds that the device computed the work; valid once it has ended."""
        ...

    @property
    def idle(self) -> float:
        """Seconds that the device had nothing to do before the work; valid once it has ended."""
        ...

    def wait(self) -> None:
        """Returns when the work has ended; raises its error."""
        ...

    def then(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        """Schedules `call` on `loop` for the end of the work, after earlier calls; to be called on
        that loop.
        """
        ...


@dataclass(frozen=True)
class Replay:
    """Captured work.

    Attributes:
    - run: queues the work, which reads the addresses that it read when it was captured
    - tensors: results of each run, valid until other captured work of the device is queued or
      captured
    """

    run: Work
    tensors: Tensors


class Device(Protocol):
    """Runs submitted work, one piece after the other."""

    def submit(self, work: Work, /, *, before: Work = nothing) -> StepEvent:
        """Queues `work`. Its errors are raised by the event's `wait`, or, by a device that calls
        `work` at once (a GPU), by `submit` itself. `before` is called right before `work` and
        counts as time of the host: a GPU without other work is idle meanwhile.
        """
        ...

    def run(self, work: Work, /) -> None:
        """Submits `work` and waits for its end; raises its error."""
        ...

    def capture(self, body: Callable[[], Tensors], /, first_run: bool = True) -> Replay:
        """Captures work that is to be repeated; from within `run`.

        - body: returns the result tensors
        - first_run: run it once now, where the first run takes longer than others
        """
        ...

    def seconds(self, work: Work, times: int, /) -> float:
        """Seconds of the fastest of `times` runs of `work`, each waited for; from within `run`."""
        ...

    def pinned(self, size: tuple[int, ...], dtype: torch.dtype, /) -> torch.Tensor:
        """Returns zeros on the host that can be copied from and to the device asynchronously."""
        ...

    def close(self) -> None:
        """Waits for all submitted work. No work may follow."""
        ...


class FailedEvent:
    """The event of work that could not be submitted; `wait` raises the error."""

    ready, busy, idle = True, 0.0, 0.0

    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self) -> NoReturn:
        raise self._error

    def then(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        loop.call_soon(call)


class TwoPhaseEvent:
    """The end of work whose second part is submitted later. `then` may be called only after
    `complete`.
    """

    def __init__(self, first: StepEvent) -> None:
        self._first = first
        self._second: StepEvent = first
        self._completed = False

    def complete(self, second: StepEvent) -> None:
        """Adds the second part, which was submitted now."""
        self._second, self._completed = second, True

    @property
    def ready(self) -> bool:
        return self._completed and self._second.ready

    @property
    def busy(self) -> float:
        return self._first.busy + self._second.busy

    @property
    def idle(self) -> float:
        return self._first.idle + self._second.idle

    def wait(self) -> None:
        if not self._completed:
            raise RuntimeError("the second part has not been submitted yet")
        self._first.wait()
        self._second.wait()

    def then(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        assert self._completed
        self._second.then(loop, call)


class HostEvent:
    """The StepEvent of a HostDevice, ended by the device's thread."""

    def __init__(self) -> None:
        self.busy = self.idle = 0.0
        self._error: Exception | None = None
        self._over = threading.Event()
        self._lock = threading.Lock()  # between callers of `then` and of `end`
        self._calls: list[tuple[asyncio.AbstractEventLoop, Callable[[], None]]] = []

    @property
    def ready(self) -> bool:
        return self._over.is_set()

    def wait(self) -> None:
        self._over.wait()
        if self._error is not None:
            raise self._error

    def then(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        with self._lock:
            if not self._over.is_set():
                self._calls.append((loop, call))
                return
        loop.call_soon(call)

    def end(self, error: Exception | None) -> None:
        """Ends the event, with the error of the work if it raised one; called by the device's
        thread.
        """
        self._error = error
        with self._lock:
            self._over.set()
        for loop, call in self._calls:
            try:
                loop.call_soon_threadsafe(call)
            except RuntimeError:
                if not loop.is_closed():  # a stage that has stopped wants no more calls
                    raise


class HostDevice:
    """A device that is a thread of the host, so that the event loop stays free. The thread starts
    with the first piece of work.
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Work, Work, HostEvent] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Work, /, *, before: Work = nothing) -> HostEvent:
        """Queues `work`. Work that is submitted by other work is done at once: the device's thread
        would wait for itself.
        """
        event = HostEvent()
        if threading.current_thread() is self._thread:
            _do(before, work, event)
            return event
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="steps", daemon=True)
            self._thread.start()
        self._work.put((before, work, event))
        return event

    def run(self, work: Work) -> None:
        self.submit(work).wait()

    def capture(self, body: Callable[[], Tensors], first_run: bool = True) -> Replay:
        """Runs `body` now, and once more for each run of the result, whose tensors it copies into
        the first ones.
        """
        tensors = body()

        def replay() -> None:
            for target, value in zip(tensors, body(), strict=True):
                target.copy_(value)

        return Replay(replay, tensors)

    def seconds(self, work: Work, times: int) -> float:
        found: list[float] = []
        for _ in range(times):
            began = time.perf_counter()
            work()
            found.append(time.perf_counter() - began)
        return min(found)

    def pinned(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        import torch

        return torch.zeros(size, dtype=dtype)

    def close(self) -> None:
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()

    def _loop(self) -> None:
        ended = None
        while True:
            starved = self._work.empty()
            one = self._work.get()
            if one is None:
                return
            before, work, event = one
            if starved and ended is not None:
                event.idle = time.perf_counter() - ended
            ended = _do(before, work, event)
            del one, before, work, event  # their closures may hold large objects


def _do(before: Work, work: Work, event: HostEvent) -> float:
    """Runs the work and ends its event; returns the time of the end, by time.perf_counter."""
    began, error = time.perf_counter(), None
    try:
        before()
        work()
    except Exception as raised:  # any error belongs to the submitter of the work
        error = raised
    ended = time.perf_counter()
    event.busy = ended - began
    event.end(error)
    return ended
