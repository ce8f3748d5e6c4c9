"""How the offline classes begin and end: wrong models, dying stages, interrupts, leftovers."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from child_processes import children_with
from pipeinfer import LLM, SamplingParams
from pipeinfer.demo import demo_path
from pipeinfer.llm import ConfigurationError, PipelineStopped, RequestOutput

LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
LONGEST = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)
TRIES = 8  # of what must be seen before an answer has ended

INTERRUPTED = """
import psutil
from pipeinfer import LLM, SamplingParams
llm = LLM(threads=1, kv_pages=256, log_level="warning")
print(*(child.pid for child in psutil.Process().children()), flush=True)
try:
    while True:
        llm.generate(["a"] * 8, SamplingParams(max_tokens=2000, ignore_eos=True), use_tqdm=False)
except KeyboardInterrupt:
    print("interrupted", len(llm.generate("a", use_tqdm=False)), flush=True)
"""


def test_a_setting_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigurationError, match="'kv_page'"):
        LLM(kv_page=3)
    with pytest.raises(ConfigurationError, match="--kv-pages"):
        LLM(kv_pages="many")


def test_gateways_are_refused_where_the_caller_is_the_only_one() -> None:
    with pytest.raises(ConfigurationError, match="--gateways"):
        LLM(gateways=2)


def test_a_model_that_is_not_there_is_refused_without_starting_anything() -> None:
    before = set(threading.enumerate())  # an LLM that tests share may run
    with pytest.raises(ConfigurationError, match="/no/such/folder"):
        LLM("/no/such/folder")
    assert not [t for t in set(threading.enumerate()) - before if t.name == "pipeinfer"]


def test_weights_that_cannot_be_read_are_a_configuration_error(
    tmp_path: Path, small: dict[str, Any]
) -> None:
    model = copy_of_demo(tmp_path)
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    before = set(psutil.Process().children())
    with pytest.raises(ConfigurationError, match="engine-0-0 cannot start"):
        LLM(str(model), **small)
    assert set(psutil.Process().children()) == before


def test_requests_outlive_a_killed_engine_and_end_with_an_error_when_it_cannot_return(
    tmp_path: Path, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sockets = Path(tempfile.mkdtemp())  # tmp_path is too long a place for sockets
    monkeypatch.setattr(tempfile, "tempdir", str(sockets))
    model = copy_of_demo(tmp_path)
    prompts = ["a", "bc", "def"]
    with LLM(str(model), **small) as llm:
        undisturbed = llm.generate(prompts, LONG, use_tqdm=False)
        disturbed = generate_while(llm, prompts, kill_engine)
        assert [r.outputs for r in disturbed] == [r.outputs for r in undisturbed]

        def lose() -> None:
            shutil.rmtree(model)
            kill_engine()

        for result in generate_while(llm, prompts, lose, LONGEST):
            assert result.outputs[0].finish_reason == "error"
            assert "there is no such folder" in result.outputs[0].error
        with pytest.raises(PipelineStopped, match=r"died 6 times.*there is no such folder"):
            llm.generate("a", use_tqdm=False)
    sockets.rmdir()  # nothing was left in it
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("a")


def test_all_stages_in_one_process_give_the_same(llm: LLM, in_process: dict[str, Any]) -> None:
    before = set(psutil.Process().children())
    some = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with LLM(**in_process) as inside:
        assert set(psutil.Process().children()) == before
        mine = inside.generate(["a", "bc"], some, use_tqdm=False)
    theirs = llm.generate(["a", "bc"], some, use_tqdm=False)
    assert [r.outputs for r in mine] == [r.outputs for r in theirs]


def test_ctrl_c_stops_the_call_and_the_end_of_a_script_ends_the_processes() -> None:
    """The script has no `if __name__` guard and closes nothing."""
    script = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, text=True
    )
    assert script.stdout is not None
    children = [psutil.Process(int(pid)) for pid in script.stdout.readline().split()]
    assert len(children) == 5  # four stages, and the engine's memory holder
    engine = next(c for c in children if "engine" in c.cmdline())
    used = engine.cpu_times().user
    wait_until(lambda: engine.cpu_times().user > used + 0.3)  # it computes
    script.send_signal(signal.SIGINT)
    assert script.stdout.readline() == "interrupted 1\n"
    assert script.wait(60) == 0
    script.stdout.close()
    assert not any(child.is_running() for child in children)


CLOSED_WHILE_IT_ANSWERS = """
import asyncio
from pipeinfer import AsyncLLM, SamplingParams

async def answer():
    async with AsyncLLM(device="cpu", log_level="info") as llm:
        async for _ in llm.generate("a", SamplingParams(max_tokens=400, ignore_eos=True)):
            break

asyncio.run(answer())
"""


def test_a_script_ends_without_a_word_of_waiting() -> None:
    """What its last answers leave behind, as a step in flight, is nothing to wait for."""
    script = [sys.executable, "-c", CLOSED_WHILE_IT_ANSWERS]
    ended = subprocess.run(script, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "engine-0-0" in ended.stderr and "stopping" not in ended.stderr


def copy_of_demo(folder: Path) -> Path:
    return Path(shutil.copytree(demo_path(), folder / "model"))


def kill_engine() -> None:
    """That of the LLM which was started last."""
    engine = children_with("engine")[-1]
    os.kill(engine.pid, signal.SIGKILL)


def generate_while(
    llm: LLM, prompts: list[str], act: Any, params: SamplingParams = LONG
) -> list[RequestOutput]:
    """Results of a call during which `act` is called, after the first tokens."""
    for _ in range(TRIES):
        results: list[RequestOutput] = []
        sampled = llm.stats()["engine-0-0"]["sampled_tokens_total"]
        # It has its list by default, as the next try makes another one.
        thread = threading.Thread(
            target=lambda mine=results: mine.extend(llm.generate(prompts, params, use_tqdm=False))
        )
        thread.start()

        def runs(before: float = sampled) -> bool:
            return (
                llm.stats()["gateway-0"]["running"] > 0
                and llm.stats()["engine-0-0"]["sampled_tokens_total"] > before + 10
            )

        wait_until(lambda alive=thread.is_alive, runs=runs: runs() or not alive())
        if thread.is_alive():
            act()
            thread.join()
            return results
    raise AssertionError("each call had ended before it was seen to run")


def wait_until(condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
