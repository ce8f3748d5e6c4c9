"""Graphs that are left are captured while there is no step, one at a time, on the real device."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest
from single_steps import HostRunner, empty_step

from pipeinfer.core import GraphDue
from pipeinfer.engine import executor
from pipeinfer.engine.core import Compute, EngineCore
from pipeinfer.engine.executor import BackgroundCapture, DeviceDriver, Executor
from pipeinfer.engine.profiling import Phases
from pipeinfer.memory.manager import MemoryManager
from pipeinfer.messages import PROTOCOL, Hello
from pipeinfer.step import Sampled

LEFT = 4


class Runner(HostRunner):
    """Has graphs to capture: each waits for `gate`, and is noted with the steps in `seen`."""

    def __init__(self) -> None:
        super().__init__(self._step)
        self.seen: list[str] = []
        self.gate, self.steps = threading.Semaphore(0), threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self.graphs, self.graphs_deferred = 2, LEFT
        self.error: Exception | None = None

    def _step(self, step) -> Sampled:
        self.steps.acquire()
        self.seen.append(f"step {step.number}")
        return Sampled.one_each([])

    def capture_next(self):
        def work() -> None:
            self.begun.release()
            self.gate.acquire()
            if self.error is not None:
                raise self.error
            self.seen.append("graph")  # before the counts, which the test waits for
            self.graphs, self.graphs_deferred = self.graphs + 1, self.graphs_deferred - 1

        return self.device.submit(work)

    def stop_capturing(self) -> None:
        self.graphs_deferred = 0


def hello() -> Hello:
    return Hello(
        protocol=PROTOCOL, version="test", rank=0, tp=1, incarnation=1, model="model", page_size=16,
        pages=8, max_slots=2, max_model_len=64, attention="torch",
    )  # fmt: skip


@pytest.fixture
async def driven(monkeypatch):
    for name in ("FIRST", "QUIET", "GAP"):
        monkeypatch.setattr(executor, name, 0.001)
    runner, fed = Runner(), asyncio.Queue()
    driver = DeviceDriver(
        lambda *reports: Executor(runner, *reports), Phases(), background=BackgroundCapture(runner)
    )
    core = EngineCore(hello(), "scheduler-0", MemoryManager(9, 16, 2, 64))

    def feed(event) -> None:
        if not isinstance(event, GraphDue):
            fed.put_nowait(event)
            return
        for send in core.handle(event, 0.0):
            driver.deliver(send.message)

    await driver.start(feed)
    yield runner, driver, fed
    for gate in (runner.gate, runner.steps):
        gate.release(100)
    await driver.stop()


async def test_a_step_waits_for_one_capture_at_most(driven):
    runner, driver, fed = driven
    await asyncio.to_thread(runner.begun.acquire)
    driver.deliver(Compute(empty_step(0)))  # comes amid the first capture
    driver.deliver(Compute(empty_step(1)))
    runner.gate.release(LEFT)
    runner.steps.release(2)
    assert [(await fed.get()).number for _ in range(2)] == [0, 1]
    assert runner.seen[:3] == ["graph", "step 0", "step 1"]
    while driver.stats()["graphs_left"]:
        await asyncio.sleep(0.001)
    assert runner.seen[3:] == ["graph"] * (LEFT - 1)
    assert driver.stats()["graphs"] == 2 + LEFT


async def test_nothing_is_captured_while_a_step_is_under_way(driven):
    runner, driver, fed = driven
    await asyncio.to_thread(runner.begun.acquire)
    driver.deliver(Compute(empty_step(0)))
    runner.gate.release(LEFT)
    for number in range(1, 6):  # one is always under way, as in the overlap loop
        driver.deliver(Compute(empty_step(number)))
        runner.steps.release()
        assert (await fed.get()).number == number - 1
        await asyncio.sleep(0.005)  # longer than any wait of who captures
    assert runner.seen == ["graph", *(f"step {number}" for number in range(5))]


async def test_an_engine_whose_capture_fails_serves_without_the_rest(driven, caplog):
    runner, driver, fed = driven
    runner.error = RuntimeError("out of memory")
    with caplog.at_level(logging.WARNING):
        runner.gate.release()
        while driver.stats()["graphs_left"]:
            await asyncio.sleep(0.001)
    assert "stopped after 2, the others stay uncaptured: out of memory" in caplog.text
    runner.steps.release()
    driver.deliver(Compute(empty_step(0)))
    assert (await fed.get()).number == 0
    assert runner.seen == ["step 0"]


async def test_an_engine_that_ends_begins_no_capture(driven):
    runner, driver, _ = driven
    await asyncio.to_thread(runner.begun.acquire)
    runner.gate.release()
    await driver.stop()
    await asyncio.sleep(0.01)
    assert runner.seen == ["graph"] and runner.graphs_deferred == LEFT - 1
