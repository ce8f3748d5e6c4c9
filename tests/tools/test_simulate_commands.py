"""`tools/simulate run`: what it reports adds up, and repeats."""

from __future__ import annotations

import json

import numpy as np
import pytest
from simulated_clusters import tallied

from bench import workload
from pipeinfer.bench.dataset import TokenRange
from simulate import workloads
from simulate.cluster import Deployment
from simulate.step_model import StepModel

POLICIES = ["prefix", "least-loaded", "round-robin"]


@pytest.fixture
def simulate_tool(tool_run):
    def run(*words: str, code: int = 0) -> dict:
        done = tool_run("simulate", "run", *words)
        assert done.code == code, done.err
        if code:
            return {"error": done.err}
        return done.metrics["policies"] | {"printed": done.out}

    return run


def test_policies_are_compared_on_the_same_requests(simulate_tool):
    found = simulate_tool(
        "--groups", "3", "--requests", "120", "--workload", "prefixes", "--prefixes", "30",
        "--prefix-tokens", "600", "--rate", "6", "--output-tokens", "5:40",
    )  # fmt: skip
    assert [name for name in found if name in POLICIES] == POLICIES
    for name in POLICIES:
        one = found[name]
        assert one["requests"] == 120 and one["refused"] == 0
        assert one["output_tokens"] == found["prefix"]["output_tokens"]
        assert one["tokens_per_s"] * one["seconds"] == pytest.approx(one["output_tokens"])
        assert 1.0 <= one["imbalance"] <= 3.0 and 0 < one["busy_share"] <= 1.0
        for times in (one["ttft_ms"], one["itl_ms"], one["e2e_ms"]):
            assert 0 < times["p50"] <= times["p90"] <= times["p99"]
        assert f"{name}: 120 requests" in found["printed"]
    assert found["prefix"]["hit_rate"] > found["round-robin"]["hit_rate"] > 0


def test_the_same_seed_gives_the_same_result(simulate_tool):
    words = ("--groups", "2", "--requests", "60", "--rate", "30", "--output-tokens", "5:60",
             "--routing", "prefix")  # fmt: skip
    once, again, other = (
        simulate_tool(*words, *more)["prefix"] for more in ((), (), ("--work-seed", "1"))
    )
    assert once.pop("simulated_in_s") != other.pop("simulated_in_s")
    again.pop("simulated_in_s")
    assert once == again != other


def test_a_recorded_trace_is_played_at_its_times(simulate_tool, tmp_path):
    trace = tmp_path / "trace.jsonl"
    lines = [(100.0, 50, 7), (109.0, 80, 3), (104.0, 20, 9)]
    trace.write_text(
        "".join(
            json.dumps({"timestamp": at, "input_length": i, "output_length": o}) + "\n"
            for at, i, o in lines
        )
    )
    words = ("--workload", "trace", "--trace", str(trace), "--routing", "round-robin")
    found = simulate_tool(*words)["round-robin"]
    assert (found["requests"], found["prompt_tokens"], found["output_tokens"]) == (3, 150, 19)
    assert 9.0 < found["seconds"] < 10.0
    assert 0.9 < simulate_tool(*words, "--speed", "9")["round-robin"]["seconds"] < 2.0


def test_wrong_usage_is_code_2(simulate_tool):
    assert "--trace FILE" in simulate_tool("--workload", "trace", code=2)["error"]
    assert "is unknown" in simulate_tool("--routing", "fastest", code=2)["error"]
    assert "cannot read" in simulate_tool("--model", "/none.json", code=2)["error"]


def test_a_batch_is_the_offline_protocol_draw_by_draw():
    work = workload.uniform(40, TokenRange(100, 1024), TokenRange(100, 1024), 10_000, 0)
    arriving = list(workloads.batch(40, TokenRange(100, 1024), TokenRange(100, 1024), 0))
    assert [one.output for one in arriving] == sorted(work.outputs, reverse=True)
    sent = {tuple(one.prompt.tolist()) for one in arriving}
    assert sent == {tuple(prompt) for prompt in work.prompts}
    assert {one.at for one in arriving} == {0.0}


def test_one_request_takes_what_the_model_says():
    """By hand: a prompt of 40 tokens in one step, then 9 decodes of one row."""
    model = StepModel(
        fixed=1e-3, prefill=((0, 1e-5),), context=1e-6, turnaround=(0.1,), inbound=(0.5,),
        outbound=(0.07,),
    )  # fmt: skip
    arriving = list(workloads.poisson(1.0, 1, TokenRange(40, 40), TokenRange(10, 10), 0))
    tally = tallied(Deployment(), arriving, model=model)
    assert tally.first[0] == pytest.approx(0.1 + 1e-3 + 40e-5 + 0.5 + 0.07)
    gaps = [1e-3 + 1e-6 * context for context in range(41, 50)]
    assert tally.whole[0] - tally.first[0] == pytest.approx(sum(gaps))
    assert tally.mean_gap() == pytest.approx(np.mean(gaps), rel=1e-3)


def test_a_request_that_never_fits_is_refused_alone():
    arriving = list(workloads.poisson(5.0, 12, TokenRange(10, 90), TokenRange(5, 5), 0))
    deployment = Deployment(max_model_len=50)
    tally = tallied(deployment, arriving, groups=2)
    fits = sum(len(one.prompt) + 5 <= 50 for one in arriving)
    assert 0 < fits < 12
    assert sum(group.finished for group in tally.groups) == fits
    assert sum(group.refused for group in tally.groups) == 12 - fits


def test_a_simulation_knows_the_targets_once_engines_measure_their_steps(simulate_tool, tmp_path):
    """64 prompts of about 8,000 tokens at once, at the step times of a GPU."""
    words = [
        "--model", "qwen3-0.6b-h200", "--groups", "1", "--routing", "round-robin", "--workload",
        "batch", "--requests", "64", "--prompt-tokens", "7000:9000", "--output-tokens", "64:128",
        "--max-step-tokens", "8192", "--page-size", "64",
    ]  # fmt: skip
    found = {}
    for name, more in (
        ("targets", ["--measured-steps"]),
        ("short", ["--measured-steps", "--itl-target", "0.008"]),
        ("none", ["--measured-steps", "--ttft-target", "0"]),
    ):
        found[name] = simulate_tool(*words, *more)["round-robin"]
    seconds = {name: one["seconds"] for name, one in found.items()}
    assert seconds["targets"] < seconds["short"] < seconds["none"], seconds
    assert seconds["targets"] * 1.3 < seconds["none"]
    assert found["targets"]["itl_ms"]["p90"] < 26 and found["short"]["itl_ms"]["p90"] < 9
    assert found["none"]["itl_ms"]["p90"] < 0.75 * found["short"]["itl_ms"]["p90"]


def test_what_the_targets_allow_is_a_table(tool_run):
    done = tool_run("simulate", "targets", "--itl-target", "0.02")
    assert done.code == 0, done.err
    chosen = done.metrics["chosen"]
    times = [one["ms"] for one in chosen]
    assert times == sorted(times) and times[0] < 6 and 15 < times[-1] <= 20
    assert chosen[-1]["rate"] > 2 * chosen[0]["rate"]
    assert "prompt tokens/s" in done.out
