"""Steps in flight: launched and collected on two threads, reported in order on the loop."""

from __future__ import annotations

import asyncio
import queue
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from pipeinfer.engine.cuda.executor import StreamExecutor
from pipeinfer.engine.executor import MOST_PENDING


class Device:
    """Launches at once; a step's result is there when the test lets it be."""

    def __init__(self) -> None:
        self.launched: queue.Queue[int] = queue.Queue()
        self.results: dict[int, threading.Event] = {n: threading.Event() for n in range(9)}
        self.fails_to_launch: set[int] = set()
        self.fails_to_finish: set[int] = set()

    def launch(self, step):
        if step.number in self.fails_to_launch:
            raise ValueError(f"launch of {step.number}")
        self.launched.put(step.number)
        return step.number

    def wait(self, flight):
        assert self.results[flight].wait(30)
        if flight in self.fails_to_finish:
            raise RuntimeError(f"end of {flight}")
        return np.array([flight], dtype=np.int32), 0.25, 0.5


class Reports:
    def __init__(self) -> None:
        self.all: asyncio.Queue = asyncio.Queue()

    def done(self, step, ids, seconds) -> None:
        self.all.put_nowait((step.number, ids.tolist(), seconds))

    def error(self, step, error) -> None:
        self.all.put_nowait((step.number, str(error)))


def step(number):
    return SimpleNamespace(number=number)


@pytest.fixture
async def running():
    device, reports = Device(), Reports()
    executor = StreamExecutor(device, reports.done, reports.error)
    yield device, reports, executor
    for event in device.results.values():
        event.set()
    await asyncio.to_thread(executor.close)


async def test_a_step_is_launched_before_the_one_before_it_has_a_result(running):
    device, reports, executor = running
    executor.submit(step(0))
    executor.submit(step(1))
    launched = [await asyncio.to_thread(device.launched.get, True, 30) for _ in range(2)]
    assert launched == [0, 1]
    assert executor.pending == 2
    device.results[1].set()  # the later result alone is not reported
    device.results[0].set()
    assert await reports.all.get() == (0, [0], 0.25)
    assert await reports.all.get() == (1, [1], 0.25)
    assert executor.pending == 0
    assert (executor.busy_seconds, executor.idle_seconds) == (0.5, 1.0)


async def test_errors_of_launch_and_of_result_are_reported_in_their_place(running):
    device, reports, executor = running
    device.fails_to_launch, device.fails_to_finish = {1}, {2}
    for number in range(4):
        executor.submit(step(number))
    for number in (3, 2, 0):
        device.results[number].set()
    assert [(await reports.all.get())[:2] for _ in range(4)] == [
        (0, [0]), (1, "launch of 1"), (2, "end of 2"), (3, [3]),
    ]  # fmt: skip


async def test_more_pending_steps_than_the_overlap_loop_allows_are_refused(running):
    _, _, executor = running
    for number in range(MOST_PENDING):
        executor.submit(step(number))
    with pytest.raises(RuntimeError, match="while 4 are pending"):
        executor.submit(step(5))


async def test_close_waits_for_what_was_submitted_and_takes_nothing_more(running):
    device, reports, executor = running
    executor.submit(step(0))
    closing = asyncio.create_task(asyncio.to_thread(executor.close))
    device.results[0].set()
    await closing
    assert await reports.all.get() == (0, [0], 0.25)
    with pytest.raises(RuntimeError, match="closed executor"):
        executor.submit(step(1))
