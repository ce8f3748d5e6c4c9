"""Where steps are computed: in the order of their submission, while their submitter goes on.

A CPU and a GPU differ in this: what is submitted to the host is called by a thread of its own,
what is submitted to a GPU is called at once and queues its kernels (CudaDevice in machine.py).
Knows calls, tensors and an event loop, no step.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeAlias

if TYPE_CHECKING:  # who drives a device that computes nothing starts without torch
    import torch

Tensors: TypeAlias = "tuple[torch.Tensor, ...]"
Work = Callable[[], None]


def nothing() -> None:
    """There is nothing to prepare."""


class StepEvent(Protocol):
    """The end of one piece of work."""

    @property
    def ready(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    @property
    def busy(self) -> float:
        """Seconds that the device computed it; once it has ended."""
        ...

    @property
    def idle(self) -> float:
        """Seconds that the device had nothing to do before; once it has ended."""
        ...

    def wait(self) -> None:
        """Returns when it has ended; raises what it raised."""
        ...

    def then(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        """Has `call` called on `loop` when it has ended, behind those that were asked for before;
        to be asked on that loop."""
        ...


@dataclass(frozen=True)
class Replay:
    """Captured work: `run` queues it, into the same `tensors`, from the addresses it has read.
    They hold it until other captured work of the device is queued, or captured."""

    run: Work
    tensors: Tensors


class Device(Protocol):
    """Works off what is submitted, one after the other."""

    def submit(self, work: Work, /, *, before: Work = nothing) -> StepEvent:
        """Queues `work`. What it raises is raised by the event's `wait`, or, by a device that calls
        `work` at once (a GPU), by `submit` itself. `before` is called right before
        `work` and counts as time of the host: a GPU without other work is idle meanwhile."""
        ...

    def run(self, work: Work, /) -> None:
        """The same, and waits for its end; raises what it raises."""
        ...

    def capture(self, body: Callable[[], Tensors], /) -> Replay:
        """Work that is to be done again and again; from within `run`."""
        ...

    def seconds(self, work: Work, times: int, /) -> float:
        """What the shortest of a few takes, each waited for; from within `run`."""
        ...

    def pinned(self, size: tuple[int, ...], dtype: torch.dtype, /) -> torch.Tensor:
        """Zeros on the host, which copies from and to the device need not wait for."""
        ...

    def close(self) -> None:
        """Waits for everything that was submitted. Nothing may follow."""
        ...


class FailedEvent:
    """The event of what could not even be submitted."""

    ready, busy, idle = True, 0.0, 0.0

    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self) -> NoReturn:
        raise self._error

    def then(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        loop.call_soon(call)


class TwoPhaseEvent:
    """The end of work whose second part is submitted later; `then` is for those who know that it
    was."""

    def __init__(self, first: StepEvent) -> None:
        self._first = first
        self._second: StepEvent = first
        self._completed = False

    def complete(self, second: StepEvent) -> None:
        """The other part was submitted."""
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
    """See StepEvent; the device's thread ends it."""

    def __init__(self) -> None:
        self.busy = self.idle = 0.0
        self._error: Exception | None = None
        self._over = threading.Event()
        self._lock = threading.Lock()  # between those who ask and who ends it
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
        """From the device's thread."""
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
    """A thread, from the first piece of work on, so that the event loop stays free meanwhile."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Work, Work, HostEvent] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Work, /, *, before: Work = nothing) -> HostEvent:
        """From within other work it is done at once: the device's thread would wait for itself."""
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

    def capture(self, body: Callable[[], Tensors]) -> Replay:
        """Calls it once more each time."""
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
            del one, before, work, event  # what they hold may be large


def _do(before: Work, work: Work, event: HostEvent) -> float:
    """Ends the event; returns when that was."""
    began, error = time.perf_counter(), None
    try:
        before()
        work()
    except Exception as raised:  # whatever it is, it belongs to who submitted the work
        error = raised
    ended = time.perf_counter()
    event.busy = ended - began
    event.end(error)
    return ended
