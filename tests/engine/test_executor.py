"""The executor: order, reports on the loop, errors, and what it measures."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from single_steps import empty_step

from pipeinfer.engine.executor import MOST_PENDING, Executor


class Reports:
    """What the executor reported, and on which thread."""

    def __init__(self) -> None:
        self.seen: asyncio.Queue[tuple] = asyncio.Queue()

    def done(self, step, ids, seconds):
        self.seen.put_nowait((step.number, ids.tolist(), seconds, threading.get_ident()))

    def error(self, step, error):
        self.seen.put_nowait((step.number, error, None, threading.get_ident()))


async def test_steps_run_in_order_off_the_loop_and_report_on_it():
    reports, threads = Reports(), []

    def run(step):
        threads.append(threading.get_ident())
        return np.array([step.number], dtype=np.int32)

    executor = Executor(run, reports.done, reports.error)
    for number in range(MOST_PENDING):
        executor.submit(empty_step(number))
    seen = [await reports.seen.get() for _ in range(MOST_PENDING)]
    executor.close()
    assert [(number, ids) for number, ids, _, _ in seen] == [(n, [n]) for n in range(MOST_PENDING)]
    assert {thread for *_, thread in seen} == {threading.get_ident()}
    assert set(threads) == {executor._thread.ident}
    assert executor.pending == 0


async def test_a_failed_step_is_reported_once_and_later_steps_still_run():
    reports = Reports()

    def run(step):
        if step.number == 1:
            raise ArithmeticError("no finite maximum")
        return np.array([step.number], dtype=np.int32)

    executor = Executor(run, reports.done, reports.error)
    for number in range(3):
        executor.submit(empty_step(number))
    seen = [await reports.seen.get() for _ in range(3)]
    executor.close()
    assert [entry[0] for entry in seen] == [0, 1, 2]
    assert isinstance(seen[1][1], ArithmeticError)
    assert reports.seen.empty()


async def test_more_steps_than_the_overlap_loop_needs_are_refused():
    reports, gate = Reports(), threading.Event()

    def run(step):
        gate.wait()
        return np.empty(0, dtype=np.int32)

    executor = Executor(run, reports.done, reports.error)
    for number in range(MOST_PENDING):
        executor.submit(empty_step(number))
    assert executor.pending == MOST_PENDING
    with pytest.raises(RuntimeError, match=f"while {MOST_PENDING} are pending"):
        executor.submit(empty_step(9))
    gate.set()
    for _ in range(MOST_PENDING):
        await reports.seen.get()
    executor.close()


async def test_close_finishes_what_was_queued_and_refuses_more():
    reports = Reports()
    executor = Executor(lambda step: np.empty(0, np.int32), reports.done, reports.error)
    executor.submit(empty_step(0))
    executor.submit(empty_step(1))
    executor.close()
    assert executor.steps == 2
    assert [(await reports.seen.get())[0] for _ in range(2)] == [0, 1]
    with pytest.raises(RuntimeError, match="closed"):
        executor.submit(empty_step(2))
    executor.close()


async def test_time_between_steps_counts_as_idle_only_without_a_queued_step():
    reports, gates = Reports(), [threading.Event() for _ in range(3)]

    def run(step):
        gates[step.number].wait()
        return np.empty(0, dtype=np.int32)

    executor = Executor(run, reports.done, reports.error)
    executor.submit(empty_step(0))
    executor.submit(empty_step(1))
    await asyncio.sleep(0.1)
    gates[0].set()
    gates[1].set()
    busy = [(await reports.seen.get())[2] for _ in range(2)]
    assert busy[0] >= 0.1
    assert executor.idle_seconds == 0
    await asyncio.sleep(0.2)
    gates[2].set()
    executor.submit(empty_step(2))
    busy.append((await reports.seen.get())[2])
    executor.close()
    assert executor.idle_seconds >= 0.15
    assert executor.busy_seconds >= sum(busy)


def test_reports_for_a_loop_that_is_gone_are_dropped():
    gate = threading.Event()

    def run(step):
        gate.wait()
        return np.empty(0, dtype=np.int32)

    loop = asyncio.new_event_loop()
    executor = Executor(run, lambda *_: None, lambda *_: None, loop)
    executor.submit(empty_step(0))
    loop.close()
    gate.set()
    executor.close()
    assert executor.steps == 1
