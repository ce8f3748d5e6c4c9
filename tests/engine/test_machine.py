"""A stream as a device, with events that end when the test says so; views of a GPU's memory; which
kinds of GPU can run what.

A step waits for the step whose buffers it takes.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from single_steps import empty_step

from pipeinfer.attention.registry import PACKAGES
from pipeinfer.engine import machine as module
from pipeinfer.engine.device import HostDevice
from pipeinfer.engine.graphs import Graphs
from pipeinfer.engine.machine import (
    ALL_PACKAGES,
    KINDS,
    PLAIN,
    CudaDevice,
    array_interface,
    doctor_line,
    non_owning_view,
    table,
)
from pipeinfer.engine.profiling import Phases
from pipeinfer.engine.runner import Runner
from pipeinfer.engine.step_buffers import PARITIES, StepBuffers


class Event:
    """`time`: in milliseconds, when it was recorded; of the end of work, when that ended."""

    clock, asked = 0.0, 0

    def __init__(self, enable_timing=False) -> None:
        self.over, self.time = False, 0.0

    def record(self, stream) -> None:
        Event.clock += 100.0
        self.over, self.time = False, Event.clock
        stream.recorded.append(self)

    def query(self) -> bool:
        Event.asked += 1
        return self.over

    def synchronize(self) -> None:
        assert self.over, "would wait for ever"

    def elapsed_time(self, other) -> float:
        return other.time - self.time


class Stream:
    def __init__(self, device) -> None:
        self.recorded: list[Event] = []


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    Event.clock, Event.asked = 0.0, 0
    return CudaDevice(torch.device("cpu"))


def end(device: CudaDevice, nth: int) -> None:
    """Ends the `nth`-th piece of work."""
    device.stream.recorded[2 * nth + 1].over = True  # type: ignore


async def iterations(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_marks_end_in_order_and_nobody_asks_when_nobody_waits(device):
    loop, seen = asyncio.get_running_loop(), []
    for number in range(3):
        device.submit(lambda: None).then(loop, lambda number=number: seen.append(number))
    await iterations(5)
    assert seen == [] and Event.asked > 3
    end(device, 1)
    await iterations(2)
    assert seen == [], "not before the one before it"
    end(device, 0)
    await iterations(2)
    assert seen == [0, 1]
    end(device, 2)
    await iterations(2)
    asked = Event.asked
    await iterations(9)
    assert seen == [0, 1, 2] and Event.asked == asked


async def test_who_is_called_may_submit_and_one_question_a_turn_is_enough(device):
    loop = asyncio.get_running_loop()

    def again() -> None:
        device.submit(lambda: None).then(loop, lambda: None)

    device.submit(lambda: None).then(loop, again)
    end(device, 0)
    await iterations(3)
    asked = Event.asked
    await iterations(10)
    assert Event.asked - asked == 10
    end(device, 1)
    await iterations(2)


async def test_the_next_mark_is_asked_for_after_one_whose_call_has_raised(device):
    loop, seen, raised = asyncio.get_running_loop(), [], []
    loop.set_exception_handler(lambda _, context: raised.append(context["exception"]))
    error = ValueError("what was called")

    def fail() -> None:
        raise error

    for call in (fail, lambda: seen.append(1)):
        device.submit(lambda: None).then(loop, call)
    for number in range(3):
        end(device, number) if number < 2 else device.submit(lambda: None).then(loop, fail)
        await iterations(3)
    assert seen == [1] and raised == [error]
    end(device, 2)
    await iterations(3)
    assert raised == [error, error], "and whoever comes later is called, too"


def test_times_are_those_between_the_streams_events_and_stay_when_events_are_used_again(device):
    events = []
    for number in range(2 * module.EVENT_PAIRS):
        events.append(device.submit(lambda: None))
        end(device, number)
        assert events[-1].ready
        assert events[-1].busy == 0.1
        assert events[-1].idle == (0.1 if number else 0.0)
    assert {event.busy for event in events} == {0.1}


def test_a_third_step_waits_for_the_first_result_whose_buffers_it_takes():
    """A rank that hears plans at another's pace takes many in one iteration of its loop."""
    happened: list[tuple[str, int]] = []

    class LaunchedStep:
        def __init__(self, number: int) -> None:
            self.number = number

        def take(self) -> None:
            happened.append(("take", self.number))

    class Device:
        def submit(self, work, *, before):
            before()

    def pack(step, buffers, captured):
        happened.append(("pack", step.number))
        assert buffers.parity == step.number % PARITIES

    runner = Runner.__new__(Runner)
    runner.phases, runner._launched, runner._latest = Phases(), 0, [None] * PARITIES
    runner._buffers = [StepBuffers(parity, HostDevice(), 1, 1, 1) for parity in range(PARITIES)]
    runner.device, runner._graphs = Device(), Graphs(None)  # type: ignore
    runner._pack = pack  # type: ignore
    for number in range(4):
        runner.launch(empty_step(number), lambda step: happened.append(("watch", step.number)))
        runner._latest[number % PARITIES] = LaunchedStep(number)  # type: ignore
    assert happened == [
        ("watch", 0), ("pack", 0), ("watch", 1), ("pack", 1),
        ("watch", 2), ("take", 0), ("pack", 2), ("watch", 3), ("take", 1), ("pack", 3),
    ]  # fmt: skip


def test_only_the_first_capture_is_tried_twice_and_one_that_fails_is_ended(device, monkeypatch):
    said: list[str] = []

    class Graph:
        def capture_begin(self, pool, capture_error_mode) -> None:
            assert (pool, capture_error_mode) == ("pool", "thread_local")
            said.append("begin")

        def capture_end(self) -> None:
            said.append("end")

        def replay(self) -> None:
            said.append("replay")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(module, "non_owning_view", lambda tensor: ("lent", tensor))
    device.stream.synchronize = lambda: said.append("wait")
    tensors = (torch.ones(1),)

    def body():
        said.append("body")
        return tensors

    replay = device.capture(body)
    captured = ["wait", "begin", "body", "end", "replay"]
    assert said == ["body", "body", *captured]
    assert replay.tensors == (("lent", tensors[0]),), "what is captured next may use their memory"
    said.clear()
    device.capture(body)
    assert said == ["body", *captured]
    said.clear()
    device.capture(body, first_run=False)
    assert said == ["body", *captured[:-1]], "a large step takes its first run when it comes"
    said.clear()

    def failing():
        if body() and said.count("body") == 2:
            raise RuntimeError("it cannot be captured")
        return tensors

    with pytest.raises(RuntimeError, match="cannot be captured"):
        device.capture(failing)
    assert said == ["body", "wait", "begin", "body", "end"]


@pytest.mark.parametrize(("took", "times"), [(1.0, 8), (20.0, 3), (400.0, 1)])
def test_what_takes_long_is_measured_less_often(device, monkeypatch, took, times):
    calls: list[float] = []

    class Timed(Event):
        def record(self, stream=None) -> None:
            self.time = sum(calls)

        def synchronize(self) -> None:
            """Nothing is under way here."""

    monkeypatch.setattr(torch.cuda, "Event", Timed)
    # The shortest counts: the first is disturbed.
    assert device.seconds(lambda: calls.append(took + (not calls)), 8) == pytest.approx(
        (took + (times == 1)) / 1e3
    )
    assert len(calls) == times


INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


class Told:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.__array_interface__ = array_interface(tensor) | {"version": 3}  # NumPy's name for it


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("part", [np.s_[:], np.s_[1:, ::2], np.s_[2], np.s_[:, 3:]])
def test_a_place_is_that_of_the_numbers(dtype, part):
    tensor = torch.arange(24).reshape(4, 6).to(dtype)[part]
    seen, bits = np.asarray(Told(tensor)), tensor.view(INTEGERS[tensor.itemsize])
    assert np.array_equal(seen, bits.numpy())
    tensor[..., -1] = 7
    assert np.array_equal(seen, bits.numpy()), "it is the same memory"


def test_where_torch_makes_no_view_the_tensor_is_kept_and_that_is_said(caplog):
    tensor = torch.ones(3)
    assert non_owning_view(tensor) is tensor
    assert "keep more memory" in caplog.text
    caplog.clear()
    for small in (torch.ones(3, dtype=torch.int64), torch.ones(0)):
        assert non_owning_view(small) is small
    assert not caplog.text


PAGE = Path(__file__).parents[2] / "docs/gpus.md"


def test_the_page_has_the_table_that_the_code_makes():
    assert table() in PAGE.read_text()


def test_kinds_differ_in_what_they_run():
    ampere, ada, hopper, blackwell = KINDS
    assert "hybrid" in hopper.backends and "hybrid" not in blackwell.backends
    assert "flashinfer" not in ampere.fp8_kv and "flashinfer" in ada.fp8_kv
    assert ampere.fp8_weights == ada.fp8_weights == PLAIN != hopper.fp8_weights


def test_what_never_ran_is_said():
    assert "not yet: " in doctor_line((9, 0)) and "what was run: nothing" in doctor_line((8, 0))
    assert "never run on this kind" in doctor_line((12, 0))


def test_all_packages_of_backends_are_counted_as_there():
    assert {*ALL_PACKAGES} == {name for names in PACKAGES.values() for name in names}
