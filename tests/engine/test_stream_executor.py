"""Steps in flight: launched and collected without waiting, reported in order, on one loop."""

from __future__ import annotations

import asyncio
import queue
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from pipeinfer.engine.cuda.executor import StreamExecutor


class Device:
    """Launches at once; a step's result is there when the test lets it be."""

    def __init__(self) -> None:
        self.launched: queue.Queue[int] = queue.Queue()
        self.results: dict[int, threading.Event] = {n: threading.Event() for n in range(9)}
        self.fails_to_launch: set[int] = set()
        self.fails_to_finish: set[int] = set()
        self.asked = 0

    def launch(self, step):
        if step.number in self.fails_to_launch:
            raise ValueError(f"launch of {step.number}")
        self.launched.put(step.number)
        return step.number

    def ended(self, flight):
        self.asked += 1
        return self.results[flight].is_set()

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
    executor.close()


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
    for number in (3, 2, 0):
        device.results[number].set()
    for number in range(4):
        executor.submit(step(number))
    assert [(await reports.all.get())[:2] for _ in range(4)] == [
        (0, [0]), (1, "launch of 1"), (2, "end of 2"), (3, [3]),
    ]  # fmt: skip


async def test_a_third_step_waits_for_the_first_result_and_not_for_the_loop(running):
    """A rank that hears plans at another's pace takes many in one turn of its loop."""
    device, reports, executor = running
    executor.submit(step(0))
    executor.submit(step(1))
    launched = [device.launched.get(timeout=30) for _ in range(2)]
    threading.Timer(0.2, device.results[0].set).start()
    executor.submit(step(2))  # the loop is here all the time, so nothing is reported
    assert device.results[0].is_set()
    for number in range(1, 9):
        device.results[number].set()
    for number in range(3, 9):
        executor.submit(step(number))
    assert executor.pending == 9
    launched += [device.launched.get(timeout=30) for _ in range(7)]
    assert launched == list(range(9))
    assert [(await reports.all.get())[0] for _ in range(9)] == list(range(9))
    assert executor.pending == 0


async def test_nobody_asks_when_nothing_is_in_flight(running):
    device, reports, executor = running
    executor.submit(step(0))
    while device.asked < 5:  # the loop goes on meanwhile
        await asyncio.sleep(0)
    device.results[0].set()
    await reports.all.get()
    asked = device.asked
    for _ in range(20):
        await asyncio.sleep(0)
    assert device.asked == asked


async def test_close_waits_for_what_was_submitted_and_takes_nothing_more(running):
    device, reports, executor = running
    executor.submit(step(0))
    threading.Timer(0.1, device.results[0].set).start()
    executor.close()
    assert device.results[0].is_set()
    assert await reports.all.get() == (0, [0], 0.25)
    with pytest.raises(RuntimeError, match="closed executor"):
        executor.submit(step(1))
