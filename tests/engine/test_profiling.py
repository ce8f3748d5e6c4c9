"""What a step costs the host: sums, percentiles by phase, ranges that nest."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections import Counter

import numpy as np
import pytest
from single_steps import HostRunner, Row, build_step

from pipeinfer import LLM, SamplingParams
from pipeinfer.engine import executor as driver_module
from pipeinfer.engine.core import Compute
from pipeinfer.engine.executor import DeviceDriver, Executor
from pipeinfer.engine.profiling import HOST, PHASES, WARM_STEPS, Phases, StepProfile, profile_path
from pipeinfer.settings import ConfigurationError, Settings
from pipeinfer.step import Sampled


class Noted:
    """Marks that remember what was opened and closed."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._open: list[str] = []

    def push(self, name: str) -> None:
        self._open.append(name)

    def pop(self) -> None:
        self.seen.append("/".join(self._open))
        self._open.pop()


def decodes(number: int, rows: int):
    """A step of `rows` decode rows."""
    page = np.array([1])
    return build_step([Row(slot, 3, None, page, True) for slot in range(rows)], number, 1)


def test_percentiles_are_those_of_numpy_for_every_phase_and_all_together():
    phases, draw = Phases(), np.random.default_rng(0)
    times = draw.exponential(1e-4, (50, len(PHASES)))
    for number, row in enumerate(times):
        for phase, seconds in zip(PHASES, row, strict=True):
            phases.add(phase, number, seconds)
        phases.done(number, rows=8, decodes=8)
    found = phases.statistics()
    for index, phase in enumerate(PHASES):
        assert found[f"{phase}_us_p50"] == pytest.approx(np.median(times[:, index]) * 1e6)
        assert found[f"{phase}_us_p99"] == pytest.approx(np.percentile(times[:, index], 99) * 1e6)
        assert found[f"{phase}_seconds"] == pytest.approx(times[:, index].sum())
    assert found[f"{HOST}_us_p50"] == pytest.approx(np.median(times.sum(axis=1)) * 1e6)
    assert found["full_steps"] == 50


def test_statistics_import_nothing_while_an_engine_is_busy():
    code = (
        "import sys; from pipeinfer.engine.profiling import PHASES, Phases; phases = Phases()\n"
        "for phase in PHASES: phases.add(phase, 0, 1e-4)\n"
        "phases.done(0, rows=1, decodes=1); known = set(sys.modules)\n"
        "assert phases.statistics()['host_us_p50'] > 0\n"
        "print(sorted(set(sys.modules) - known))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_full_steps_are_decodes_with_nearly_as_many_rows_as_ever():
    phases = Phases()
    for number, (rows, singles, cost) in enumerate(
        [(256, 256, 1.0), (230, 230, 2.0), (100, 100, 50.0), (256, 200, 70.0), (300, 0, 90.0)]
    ):
        phases.add("forward", number, cost)
        phases.done(number, rows, singles)
    phases.add("forward", 5, 99.0)  # under way: not yet one of them
    found = phases.statistics()
    assert (found["full_rows"], found["full_steps"]) == (256, 2)
    assert found["forward_full_us_p50"] == pytest.approx(1.5e6)
    assert found["forward_us_p50"] == pytest.approx(50e6)


def test_only_the_last_steps_count_and_none_of_before_a_new_beginning():
    phases = Phases(samples=4)
    for number in range(10):
        phases.add("pack", number, float(number))
        phases.done(number, 1, 1)
    assert phases.statistics()["pack_us_p50"] == pytest.approx(7.5e6)  # of 6, 7, 8, 9
    phases.begin_anew()
    empty = phases.statistics()
    assert {name: value for name, value in empty.items() if "_us_" in name and value} == {}
    assert set(empty) == set(phases.statistics())
    assert empty["pack_seconds"] == sum(range(10))


def test_ranges_nest_and_close_where_they_were_opened():
    marks = Noted()
    phases = Phases(marks)
    with phases.range("step 3"), phases.span("forward", 3):
        phases.ranges = Noted()  # a profile begins in the middle
    with pytest.raises(ValueError, match="inside"), phases.range("step 4"):
        raise ValueError("inside")
    assert marks.seen == ["step 3/forward", "step 3"]
    assert phases.ranges.seen == ["step 4"]


@pytest.fixture
async def driven():
    """A driver over a real executor whose steps take no time, and what it fed."""
    phases, fed = Phases(), asyncio.Queue()

    def run(step):
        with phases.span("forward", step.number):
            return Sampled.one_each(range(len(step.slots)))

    driver = DeviceDriver(lambda *reports: Executor(HostRunner(run), *reports), phases)
    await driver.start(fed.put_nowait)
    yield driver, fed
    await driver.stop()


async def test_a_driver_says_what_its_steps_cost_and_begins_anew_after_a_pause(driven, monkeypatch):
    driver, fed = driven
    monkeypatch.setattr(driver_module, "PAUSE", float("inf"))
    for number in range(3):
        driver.deliver(Compute(decodes(number, 2)))
        await fed.get()
    await asyncio.sleep(0)
    stats = driver.stats()
    assert (stats["full_rows"], stats["full_steps"]) == (2, 3)
    assert 0 < stats["forward_us_p50"] <= stats["host_us_p50"] <= stats["host_us_p99"]
    assert stats["result_us_p50"] > 0
    monkeypatch.setattr(driver_module, "PAUSE", -1.0)
    driver.deliver(Compute(decodes(3, 5)))
    await fed.get()
    await asyncio.sleep(0)
    assert (driver.stats()["full_rows"], driver.stats()["full_steps"]) == (5, 1)


def test_threads_add_to_one_step_without_losing_anything():
    phases = Phases()

    def add(phase):
        for number in range(500):
            phases.add(phase, number, 1e-6)

    threads = [threading.Thread(target=add, args=(phase,)) for phase in PHASES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(500):
        phases.done(number, 1, 1)
    assert phases.statistics()["host_us_p50"] == pytest.approx(len(PHASES))


ON_THE_STEPS_THREAD = ("attention_plan", "forward", "sample")


def ranges(path) -> Counter:
    """How often each named range stands in a trace."""
    events = json.loads(path.read_text())["traceEvents"]
    return Counter(e["name"] for e in events if e.get("cat") == "user_annotation")


def test_a_server_writes_a_trace_of_the_steps_it_was_asked_for(tmp_path):
    folder = tmp_path / "made" / "for it"
    with LLM(kv_pages=100, threads=1, profile=6, profile_dir=str(folder)) as llm:
        params = SamplingParams(max_tokens=WARM_STEPS + 12, ignore_eos=True)
        llm.generate([[1, 2, 3], [4, 5]], params, use_tqdm=False)
    [path] = folder.iterdir()
    assert path.name.startswith("profile-engine-0-0-") and path.suffix == ".json"
    found = ranges(path)
    assert [found[phase] for phase in ON_THE_STEPS_THREAD] == [6, 6, 6]
    for phase in ("plan", "result"):  # on other threads, a step earlier or later
        assert 4 <= found[phase] <= 8
    names = {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
    assert any(name.startswith("aten::") for name in names)


def decode(number, epoch=0):
    step = build_step([Row(0, 3, None, np.array([1]), True)], number, 1)
    object.__setattr__(step, "epoch", epoch)
    return step


async def run_steps(watch, phases, steps):
    """All of them through an executor that is closed afterwards."""
    done: asyncio.Queue = asyncio.Queue()

    def run(step):
        with phases.span("forward", step.number):
            return Sampled.one_each([0])

    def note(*reported):
        done.put_nowait(reported)

    executor = Executor(HostRunner(run), note, note, observer=watch)
    for step in steps:
        executor.submit(step)
        assert len(await done.get()) == 3  # ids and seconds, not an error
    await asyncio.to_thread(executor.close)


async def test_steps_before_the_twentieth_decode_of_an_epoch_are_left_out(tmp_path):
    phases, path = Phases(), tmp_path / "profile.json"
    usual = phases.ranges
    first = [decode(number) for number in range(WARM_STEPS - 1)]
    second = [decode(number, epoch=1) for number in range(WARM_STEPS + 3)]
    await run_steps(StepProfile(9, path, phases), phases, first + second)
    assert ranges(path)["forward"] == 3  # fewer than asked for, when there are no more
    assert phases.ranges is usual


async def test_no_file_without_enough_steps(tmp_path):
    phases, path = Phases(), tmp_path / "profile.json"
    await run_steps(StepProfile(2, path, phases), phases, [decode(0), decode(1)])
    assert not path.exists()


async def test_one_profile_in_a_process(tmp_path):
    phases, path = Phases(), tmp_path / "profile.json"
    steps = [decode(number, epoch) for epoch in (0, 1) for number in range(WARM_STEPS + 5)]
    await run_steps(StepProfile(2, path, phases), phases, steps)
    assert ranges(path)["forward"] == 2


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_loaded(tmp_path):
    (tmp_path / "file").write_text("")
    wrong = str(tmp_path / "file" / "folder")
    assert profile_path(Settings(profile_dir=wrong), "engine-0-0") is None
    with pytest.raises(ConfigurationError, match="--profile-dir"):
        profile_path(Settings(profile=3, profile_dir=wrong), "engine-0-0")
