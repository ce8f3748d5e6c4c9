"""The host as a device: work in order on one thread, errors that stay with their work, calls."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import torch

from pipeinfer.engine.device import FailedEvent, HostDevice


@pytest.fixture
def device():
    device = HostDevice()
    yield device
    device.close()


async def test_work_is_done_in_order_on_one_thread_and_calls_come_back_to_the_loop(device):
    loop, seen, over = asyncio.get_running_loop(), [], asyncio.Event()
    threads = set()

    def work(number):
        threads.add(threading.get_ident())
        seen.append(("work", number))

    def call(number):
        assert threading.get_ident() == here
        seen.append(("call", number))
        if number == 4:
            over.set()

    here = threading.get_ident()
    for number in range(5):
        device.submit(lambda number=number: work(number)).then(loop, lambda n=number: call(n))
    await over.wait()
    assert len(threads) == 1 and here not in threads
    for kind in ("work", "call"):
        assert [number for one, number in seen if one == kind] == list(range(5))


async def test_who_asks_after_the_end_is_called_too(device):
    event, over = device.submit(lambda: None), asyncio.Event()
    event.wait()
    assert event.ready
    event.then(asyncio.get_running_loop(), over.set)
    await over.wait()


def test_what_work_raises_belongs_to_its_mark_alone(device):
    def fail():
        raise ArithmeticError("no finite maximum")

    seen = []
    events = [
        device.submit(work) for work in (lambda: seen.append(0), fail, lambda: seen.append(2))
    ]
    events[2].wait()
    assert seen == [0, 2]
    for _ in range(2):
        with pytest.raises(ArithmeticError):
            events[1].wait()


def test_time_between_pieces_counts_as_idle_only_with_nothing_queued(device):
    gate = threading.Event()
    first = device.submit(lambda: gate.wait() and time.sleep(0.1))
    second = device.submit(lambda: None)
    gate.set()
    second.wait()
    assert first.busy >= 0.1 and first.idle == second.idle == 0
    time.sleep(0.2)
    third = device.submit(lambda: None)
    third.wait()
    assert third.idle >= 0.2


def test_closing_waits_for_what_was_submitted():
    device, gate, seen = HostDevice(), threading.Event(), []
    device.submit(gate.wait)
    device.submit(lambda: seen.append(1))
    threading.Timer(0.05, gate.set).start()
    device.close()
    assert seen == [1]
    HostDevice().close()


async def test_what_could_not_be_submitted_has_ended_with_its_error():
    failed, over = FailedEvent(ValueError("too large")), asyncio.Event()
    assert failed.ready and failed.busy == failed.idle == 0
    with pytest.raises(ValueError, match="too large"):
        failed.wait()
    failed.then(asyncio.get_running_loop(), over.set)
    await over.wait()


def test_captured_work_is_done_again_into_the_same_tensors_from_what_lies_there_then():
    device, source = HostDevice(), torch.arange(3.0)

    def work() -> None:
        replay = device.capture(lambda: (2 * source, source.sum()[None]))
        doubled, total = replay.tensors
        assert (doubled.tolist(), total.tolist()) == ([0, 2, 4], [3])
        source.add_(1)
        replay.run()
        assert (doubled.tolist(), total.tolist()) == ([2, 4, 6], [6])
        assert device.seconds(replay.run, 3) > 0

    device.run(work)
    with pytest.raises(ZeroDivisionError):
        device.run(lambda: print(1 / 0))
    device.close()


def test_work_within_work_is_done_at_once(device):
    """It would wait for itself."""
    order = []

    def outer() -> None:
        device.run(lambda: order.append("run"))
        event = device.submit(lambda: order.append("work"), before=lambda: order.append("prepare"))
        assert event.ready and event.busy > 0
        with pytest.raises(ZeroDivisionError):
            device.run(lambda: 1 / 0)
        order.append("outer")

    device.submit(outer).wait()
    assert order == ["run", "prepare", "work", "outer"]
