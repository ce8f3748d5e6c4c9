"""A session with one step in flight and prompts first; replays that go on after a difference."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import msgspec
import pytest
from replay_tool import ROOT, tool, tool_process

from pipeinfer.core import StepDone
from pipeinfer.kernels import host
from pipeinfer.messages import Admit, Plan, Result
from pipeinfer.params import RequestParams
from pipeinfer.replay.run import ReplayCounts
from pipeinfer.replay.traces import Difference, TraceEntry, TraceExchange, load
from pipeinfer.wire import pack

STAGES = ("tokenizer", "scheduler", "engine", "detokenizer")


@pytest.fixture(scope="module")
def other_session(tmp_path_factory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("other-session")
    plain = ("--overlap-depth", "1", "--policy", "prefill-first")
    done = tool_process("session", "--out", out, "--requests", 16, "--seed-of-requests", 5, *plain)
    assert done.returncode == 0, done.stdout + done.stderr
    return {path.name.partition("-")[0]: path for path in out.glob("*.pitrace")}


def test_session_with_one_step_in_flight_and_prompts_first_replays(other_session):
    for stage in STAGES:
        path = other_session[stage]
        settings = load(path).header.settings
        assert (settings["overlap_depth"], settings["policy"]) == (1, "prefill-first")
        done = tool("run", stage, path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert ", 0 differences" in done.stdout


def test_tokens_and_requests_that_differ_are_counted(other_session, monkeypatch):
    """Those that sample, and no others, get other tokens of a sampler with a bug."""
    right = host.philox_words
    with monkeypatch.context() as patch:
        patch.setattr(host, "philox_words", lambda seeds, at, counts: right(seeds, at + 1, counts))
        done = tool("run", "engine", other_session["engine"], "--all")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "first difference: message" in done.stdout
    counted = re.search(r"tokens: (\d+) of (\d+) differ, in (\d+) of (\d+) requests", done.stdout)
    wrong, tokens, concerned, everybody = map(int, counted.groups())
    admits = [
        admit
        for e in load(other_session["engine"]).entries
        if e.kind == "Plan"
        for admit in e.message.admits
    ]
    drawing = {a.request_id for a in admits if a.params.temperature > 0}
    assert everybody == len({a.request_id for a in admits})
    assert 0 < concerned <= len(drawing) < everybody
    assert concerned <= wrong < tokens
    assert "replay took" in done.stdout


def entry(seq: int, message, direction="in", channel="local") -> TraceEntry:
    return TraceEntry(seq, 1.0, direction, channel, "", 0, 0.0, message, 1)


def test_a_wrong_id_is_counted_for_the_request_in_its_slot():
    def admit(slot, name):
        return Admit(slot, name, pack([1]), 1, 9, RequestParams(), 0)

    plan = Plan(7, 3, (), (admit(4, "a"), admit(2, "b")), pack([4, 2]), pack([1, 1]))
    step = TraceExchange(entry(2, StepDone(7, 3, pack([1, 1]), pack([50, 60]))))
    rows = [pack(x) for x in ([4, 2], [0, 0], [1, 1], [1, 1], [50, 60], [])]
    step.outputs.append(entry(3, Result(7, 3, *rows, 0, 0, 0), "out", "result"))
    tally = ReplayCounts(keep_going=True)
    tally.follow(TraceExchange(entry(1, plan, channel="plan")))
    tally.step(step, StepDone(7, 3, pack([1, 1]), pack([50, 61])))
    assert (tally.tokens, tally.wrong, tally.requests) == (2, 1, {"b"})
    assert tally.summary_lines()[1] == "tokens: 1 of 2 differ, in 1 of 2 requests"
    tally.step(step, StepDone(7, 3, pack([1, 0]), pack([50])))
    assert (tally.tokens, tally.wrong) == (4, 3), "of another length, all of it counts"


@pytest.mark.parametrize("keep_going", [False, True])
def test_the_first_difference_ends_a_replay_unless_it_is_to_go_on(keep_going):
    tally = ReplayCounts(keep_going)
    assert not tally.over
    found = [Difference(n, "text", "x", 0, 1, entry(n, StepDone(1, n, b"", b""))) for n in (5, 9)]
    for difference in (None, *found):
        tally.add(difference)
    assert tally.first is found[0]
    assert tally.over is not keep_going
    assert tally.messages == {"StepDone": 2}


def test_recording_and_replay_of_an_engine_on_its_device(tmp_path, monkeypatch):
    """The script that runs on a GPU, here on the CPU; how fast this machine is does not matter."""
    out = tmp_path / "result.json"
    sizes = ("--requests", "6", "--prompt-tokens", "5:30", "--output-tokens", "4:12")
    monkeypatch.setattr(sys, "argv", ["", *sizes, "--threads", "1", "--json", str(out)])
    assert runpy.run_path(str(ROOT / "tests/gpu/replay_engine.py"))["main"]() in (0, 1)
    result = msgspec.json.decode(out.read_bytes())
    assert (result["code"], result["wrong_tokens"], result["first_difference"]) == (0, 0, None)
    assert result["tokens"] >= 6 * 4 + 6 * 4  # of the warm-up too
    assert result["replay_seconds"] > 0 and result["trace_bytes"] > 1_000
