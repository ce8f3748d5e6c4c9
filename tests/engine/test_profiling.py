"""`--profile N`: a trace that a browser opens, of exactly N steps, with the phases by name."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import numpy as np
import pytest
from single_steps import HostRunner, Row, build_step

from pipeinfer import LLM, SamplingParams
from pipeinfer.engine.executor import Executor
from pipeinfer.engine.phases import Phases
from pipeinfer.engine.profiling import WARM_STEPS, StepProfile, profile_path
from pipeinfer.settings import ConfigurationError, Settings
from pipeinfer.step import Sampled

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
