"""`pipeinfer top`: a line for each stage of a running server, with what it does at the moment."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading

import openai
import pytest
from terminal import Terminal

from held_processes import HeldProcesses
from pipeinfer.cli.top import StageLine
from servers import STAGES, Server, environment


@pytest.fixture(scope="module")
def server():
    with Server("--threads", "1", "--kv-pages", "300") as running:
        yield running


def command(server: Server) -> list[str]:
    port = server.url.rpartition(":")[2]
    return [sys.executable, "-m", "pipeinfer", "top", "--port", port]


def top(server: Server, *more: str) -> tuple[int, dict[str, str]]:
    """Exit code, and {stage: its line without the id} of the last look."""
    done = subprocess.run(
        [*command(server), *more],
        env=environment(), capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert not done.stderr
    rows = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    return done.returncode, dict(rows)


def test_every_stage_says_what_it_does_while_requests_run(server):
    pids = {row["name"]: row["pid"] for row in server.health()["stages"]}
    api = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300, max_retries=0)
    for _ in range(8):  # until one is seen before it is over
        running = api.completions.create(
            model="pipeinfer-demo", prompt="go on", max_tokens=2000, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        next(running)
        code, lines = top(server, "--once")
        still_runs = server.metric("pipeinfer_requests_running") == 1
        running.response.close()
        if still_runs:
            break
    assert still_runs, "each was over too soon to be seen"
    assert code == 0
    said = {stage.split("-")[0]: line for stage, line in lines.items()}
    assert re.match(r"token: +p50 [\d,.]+, p90 .* ms \(\d in the last minute\)", said.pop("first"))
    said.pop("between", "")  # not there before a second output
    assert set(said) - {"stage"} == set(STAGES)
    for name in STAGES:
        assert re.match(rf"{pids[name]}\s+ready ", said[name]), said[name]
    assert "1 stream, " in said["gateway"] and "1 group up" in said["tokenizer"]
    assert "1 run, 0 wait" in said["scheduler"]
    for name in ("engine", "detokenizer"):
        [rate] = re.findall(r"([\d,]+) tokens/s", said[name])
        assert int(rate.replace(",", "")) > 0
    assert "1/256 slots" in said["engine"]


def test_latencies_are_told_while_it_goes_on_looking(server):
    api = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300, max_retries=0)
    looking = subprocess.Popen(
        [*command(server), "--seconds", "0.2"],
        env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    found: dict[str, float] = {}
    timer = threading.Timer(300, looking.kill)
    timer.start()
    try:
        assert looking.stdout is not None
        for line in looking.stdout:
            if match := re.match(r"(\w+)-0.* ready .*, latency ([\d.,]+) ms$", line):
                found[match[1]] = float(match[2].replace(",", ""))
            elif line.startswith("detokenizer-0"):  # a look has ended: another request, until all
                api.completions.create(model="pipeinfer-demo", prompt="go on", max_tokens=3)
            if len(found) == 4:
                break
    finally:
        timer.cancel()
        looking.send_signal(signal.SIGINT)
        assert looking.wait(60) == 0
    assert set(found) == {"tokenizer", "scheduler", "engine", "detokenizer"}
    assert all(0 < milliseconds < 10_000 for milliseconds in found.values())


def test_on_a_terminal_each_stage_has_one_line_and_q_ends_it(server):
    with Terminal([*command(server), "--seconds", "0.2"], environment()) as terminal:
        before = terminal.modes()
        first = terminal.wait_for("detokenizer-0")
        assert "q ends" in first
        looks = terminal.wait_for("detokenizer-0") + terminal.wait_for("\x1b[H")
        assert before != terminal.modes(), "keys come without Enter"
        terminal.type("x")
        terminal.wait_for("\x1b[H")
        terminal.type("q")
        assert terminal.process.wait(60) == 0
        assert terminal.modes() == before
    lines = [line.rpartition("\x1b[2J")[2] for line in looks.splitlines()]
    assert max(map(len, lines)) <= 80, lines
    [engine] = [line for line in lines if line.startswith("engine-0-0")]
    assert " tokens/s, " in engine and " busy, " in engine and "/256 slots" in engine


def test_a_signal_that_ends_it_leaves_the_terminal_as_it_was(server):
    with Terminal(command(server), environment()) as terminal:
        before = terminal.modes()
        terminal.wait_for("detokenizer-0")
        terminal.process.terminate()
        assert terminal.process.wait(60) == 128 + signal.SIGTERM
        assert terminal.modes() == before


def test_a_line_loses_its_least_important_parts_first():
    line = StageLine("engine-0-0 ", ["184 tokens/s", "86% busy", "hits 3%"])
    assert line.within(100) == "engine-0-0 184 tokens/s, 86% busy, hits 3%"
    assert line.within(40) == "engine-0-0 184 tokens/s, 86% busy"
    assert line.within(23) == "engine-0-0 184 tokens/s"
    assert line.within(20) == "engine-0-0 184 toke…"


def test_a_stage_that_says_nothing_is_shown_and_is_an_error(server):
    with HeldProcesses(server.pid("detokenizer")):
        code, lines = top(server, "--once")
    assert code == 1
    assert lines["detokenizer-0"] == "silent"


def test_doctor_says_what_the_targets_allow_the_server_that_runs(server):
    done = subprocess.run(
        [sys.executable, "-m", "pipeinfer", "doctor", "--port", "0", "--itl-target", "0.04"],
        env=environment(), capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert any(line.split(maxsplit=2)[1:] == [
        "steps", "beside streams up to 40 ms, so that prompts wait at most 0.5 s"
    ] for line in lines), done.stdout  # fmt: skip
    [at] = [n for n, line in enumerate(lines) if f"process {server.process.pid}," in line]
    # An engine on a CPU measures nothing.
    assert "targets    scheduler-0: steps beside streams stay short: how long" in lines[at + 1]
