"""The executor: order, reports on the loop, errors and sums, over a device that a test controls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from single_steps import empty_step

from pipeinfer.engine.device import HostDevice, HostEvent, TwoPhaseEvent
from pipeinfer.engine.executor import MAX_UNFINISHED, Executor
from pipeinfer.step import MaskRows, Sampled, Step


@dataclass
class LaunchedStep:
    number: int
    event: HostEvent = field(default_factory=HostEvent)

    def take(self) -> Sampled:
        self.event.wait()
        return Sampled.one_each([self.number])


class Runner:
    """Launches at once; a step has ended when the test says so."""

    def __init__(self) -> None:
        self.device = HostDevice()
        self.launched: list[LaunchedStep] = []
        self.watched: list[int] = []
        self.grounded: set[int] = set()

    def launch(self, step: Step, before: Callable[[Step], None] | None) -> LaunchedStep:
        if step.number in self.grounded:
            raise ValueError(f"launch of {step.number}")
        if before is not None:
            before(step)
        self.launched.append(LaunchedStep(step.number))
        return self.launched[-1]

    def end(self, number: int, error: Exception | None = None) -> None:
        [event] = [one.event for one in self.launched if one.number == number]
        event.busy, event.idle = 0.25, 0.5
        event.end(error)


class Reports:
    """What the executor reported, and on which thread."""

    def __init__(self) -> None:
        self.all: asyncio.Queue[tuple] = asyncio.Queue()
        self.threads: set[int] = set()

    def done(self, step, sampled, seconds):
        self.threads.add(threading.get_ident())
        self.all.put_nowait((step.number, sampled.ids.tolist(), seconds))

    def error(self, step, error):
        self.threads.add(threading.get_ident())
        self.all.put_nowait((step.number, str(error)))


@pytest.fixture
async def running():
    runner, reports = Runner(), Reports()
    executor = Executor(runner, reports.done, reports.error)
    yield runner, reports, executor
    executor.close()


async def test_a_step_is_launched_before_the_one_before_it_has_a_result(running):
    runner, reports, executor = running
    executor.submit(empty_step(0))
    executor.submit(empty_step(1))
    assert [one.number for one in runner.launched] == [0, 1]
    assert executor.unreported == 2
    runner.end(1)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert reports.all.empty(), "the later result alone is not reported"
    await asyncio.to_thread(runner.end, 0)
    assert [await reports.all.get() for _ in range(2)] == [(0, [0], 0.25), (1, [1], 0.25)]
    assert executor.unreported == 0
    assert (executor.steps, executor.busy_seconds, executor.idle_seconds) == (2, 0.5, 1.0)
    assert reports.threads == {threading.get_ident()}


async def test_errors_of_launch_and_of_result_are_reported_in_their_place(running):
    runner, reports, executor = running
    runner.grounded = {1, 2}
    for number in range(5):
        executor.submit(empty_step(number))
    await asyncio.sleep(0)
    assert reports.all.empty(), "the first is still under way"
    runner.end(4)
    runner.end(3, RuntimeError("end of 3"))
    runner.end(0)
    assert [(await reports.all.get())[:2] for _ in range(5)] == [
        (0, [0]), (1, "launch of 1"), (2, "launch of 2"), (3, "end of 3"), (4, [4]),
    ]  # fmt: skip
    assert executor.steps == 2


async def test_more_steps_than_the_overlap_loop_needs_are_refused(running):
    runner, reports, executor = running
    for number in range(MAX_UNFINISHED):
        executor.submit(empty_step(number))
    with pytest.raises(RuntimeError, match=f"while {MAX_UNFINISHED} are unfinished"):
        executor.submit(empty_step(9))
    runner.end(0)  # the loop has no iteration in which it could be reported
    executor.submit(empty_step(MAX_UNFINISHED))
    for number in range(1, MAX_UNFINISHED + 1):
        runner.end(number)
    assert [(await reports.all.get())[0] for _ in range(MAX_UNFINISHED + 1)] == [0, 1, 2, 3, 4]


async def test_steps_that_an_epoch_has_left_under_way_are_none_of_the_next(running):
    runner, reports, executor = running
    for epoch in range(3):
        for number in range(MAX_UNFINISHED):
            executor.submit(replace(empty_step(10 * epoch + number), epoch=epoch))
        with pytest.raises(RuntimeError, match=f"while {MAX_UNFINISHED} are unfinished"):
            executor.submit(replace(empty_step(99), epoch=epoch))
    for one in [*runner.launched]:
        runner.end(one.number)
    assert [(await reports.all.get())[0] for _ in runner.launched][::4] == [0, 10, 20]


async def test_a_report_may_submit_the_next_step():
    runner, numbers, over = Runner(), iter(range(1, 6)), asyncio.Event()

    def done(step, sampled, seconds):
        following = next(numbers, None)
        if following is None:
            return over.set()
        executor.submit(empty_step(following))
        runner.end(following)

    executor = Executor(runner, done, lambda *_: None)
    executor.submit(empty_step(0))
    runner.end(0)
    await over.wait()
    assert executor.steps == 6 and executor.unreported == 0
    executor.close()


async def test_closing_ends_the_watch_on_the_devices_thread_and_takes_nothing_more():
    seen: list = []

    class Watch:
        def before(self, step):
            seen.append(step.number)

        def close(self):
            seen.append(threading.current_thread().name)

    runner, reports = Runner(), Reports()
    executor = Executor(runner, reports.done, reports.error, observer=Watch())
    executor.submit(empty_step(0))
    runner.end(0)
    executor.close()
    executor.close()
    assert seen == [0, "steps"]
    assert (await reports.all.get())[0] == 0, "its report still comes"
    with pytest.raises(RuntimeError, match="closed executor"):
        executor.submit(empty_step(1))


def test_reports_for_a_loop_that_is_gone_are_dropped():
    runner, loop, seen = Runner(), asyncio.new_event_loop(), []
    executor = Executor(runner, lambda *all: seen.append(all), lambda *_: None, loop)
    executor.submit(empty_step(0))
    loop.close()
    runner.end(0)
    executor.close()
    assert not seen


class TwoParts(LaunchedStep):
    """With masked rows: its first part has ended, the second ends when the test says so."""

    def __init__(self, number: int, log: list) -> None:
        super().__init__(number)
        self.first, self.log = HostEvent(), log
        self.first.end(None)
        self.rest, self.event = self.event, TwoPhaseEvent(self.first)


class MaskedRunner(Runner):
    """Steps of odd numbers have masked rows."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list = []

    def launch(self, step, before):
        self.log.append(("launch", step.number))
        if step.masked is None:
            return super().launch(step, before)
        self.launched.append(TwoParts(step.number, self.log))
        return self.launched[-1]

    def sample_masked(self, launched, fill):
        self.log.append(("fill", launched.number, fill(np.zeros((1, 1), np.int32))))
        launched.event.complete(launched.rest)

    def end(self, number, error=None):
        [one] = [one for one in self.launched if one.number == number]
        (one.rest if isinstance(one, TwoParts) else one.event).end(error)


class Filled:
    """Masks that say what they are told."""

    def __init__(self, log: list) -> None:
        self.log = log

    def fill(self, step, words):
        if step.number == 13:
            raise ValueError("fill of 13")
        return {0: f"refused {step.number}"}

    def take(self, step, sampled):
        self.log.append(("take", step.number))
        return sampled

    def close(self):
        self.log.append("closed")


def masked(number: int) -> Step:
    step = empty_step(number)
    rows = MaskRows(np.array([0]), np.array([0], dtype=np.int32))
    return replace(step, masked=rows) if number % 2 else step


async def test_a_step_with_masked_rows_is_finished_when_the_one_before_was_reported():
    runner, reports = MaskedRunner(), Reports()
    executor = Executor(runner, reports.done, reports.error, masks=Filled(runner.log))
    for number in range(3):
        executor.submit(masked(number))
    assert runner.log == [("launch", 0), ("launch", 1)], "the third waits behind the second"
    assert executor.unreported == 3
    runner.end(0)
    assert (await reports.all.get())[0] == 0
    assert runner.log[2:] == [
        ("take", 0), ("fill", 1, {0: "refused 1"}), ("launch", 2),
    ]  # fmt: skip
    executor.submit(masked(3))
    assert runner.log[5:] == [("launch", 3)]
    runner.end(1)
    runner.end(2)
    assert [(await reports.all.get())[0] for _ in range(2)] == [1, 2]
    assert runner.log[6:] == [("take", 1), ("take", 2), ("fill", 3, {0: "refused 3"})]
    runner.end(3)
    assert (await reports.all.get())[0] == 3
    executor.close()
    assert runner.log[-1] == "closed"


async def test_masks_that_cannot_be_made_are_the_steps_own_error():
    runner, reports = MaskedRunner(), Reports()
    executor = Executor(runner, reports.done, reports.error, masks=Filled(runner.log))
    executor.submit(masked(13))
    executor.submit(masked(14))
    runner.end(14)
    assert [(await reports.all.get())[:2] for _ in range(2)] == [(13, "fill of 13"), (14, [14])]


async def test_ids_that_no_grammar_can_take_are_the_steps_own_error_and_later_steps_go_on():
    class Refusing(Filled):
        def take(self, step, sampled):
            if step.number == 0:
                raise ValueError("take of 0")
            return super().take(step, sampled)

    runner, reports = MaskedRunner(), Reports()
    executor = Executor(runner, reports.done, reports.error, masks=Refusing(runner.log))
    for number in range(3):
        executor.submit(masked(number))
    for number in range(3):
        runner.end(number)
        expected = (0, "take of 0") if number == 0 else (number, [number])
        assert (await reports.all.get())[:2] == expected
    assert executor.steps == 2 and executor.unreported == 0
    executor.close()


async def test_a_step_behind_one_that_is_not_finished_counts():
    runner, reports = MaskedRunner(), Reports()
    executor = Executor(runner, reports.done, reports.error, masks=Filled(runner.log))
    for number in range(MAX_UNFINISHED):
        executor.submit(masked(number))
    with pytest.raises(RuntimeError, match=f"while {MAX_UNFINISHED} are unfinished"):
        executor.submit(masked(9))
