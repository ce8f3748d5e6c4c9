"""Every benchmark, small: its numbers must add up, whatever their size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import servers
from bench.shapes import SHAPES
from pipeinfer.core import TAKEOVER_PHASES

ROOT = Path(__file__).resolve().parents[2]
STAGES = {"gateway", "tokenizer", "scheduler", "engine", "detokenizer"}


@pytest.fixture
def bench(tool_run):
    """Runs a command; gives its metrics and what it printed."""

    def run(*arguments: str) -> tuple[dict, str]:
        done = tool_run("bench", *arguments)
        assert done.code == 0, done.err
        return done.metrics, done.out

    return run


@pytest.mark.parametrize("tool", ["bench", "chaos", "simulate", "soak"])
def test_a_tool_runs_from_a_checkout(tool):
    """As a user runs it; its commands are called by tests of their own."""
    done = subprocess.run(
        [sys.executable, f"tools/{tool}", "--help"],
        cwd=ROOT, env=servers.environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0 and f"python tools/{tool}" in done.stdout, done.stderr


def check_parts(metrics: dict) -> None:
    """An offline result: the engine's parts lie within each other and within the wall time."""
    parts, seconds = metrics["engine_seconds"], metrics["seconds"]
    assert metrics["tokens_per_s"] * seconds == pytest.approx(metrics["output_tokens"])
    computing = parts["attention_plan"] + parts["forward"] + parts["sample"]
    assert 0 < computing <= parts["busy"] <= seconds
    assert metrics["idle_share"] == pytest.approx(1 - parts["busy"] / seconds)
    assert metrics["outside_model_share"] == pytest.approx(1 - parts["forward"] / seconds)
    check_host_cost(metrics)


def check_host_cost(metrics: dict) -> None:
    """Percentiles by phase: ordered, and a phase costs no more than all of them together."""
    for name in ("host_step_us", "host_full_step_us"):
        cost = metrics[name]
        assert all(0 <= times["p50"] <= times["p99"] for times in cost.values())
        assert cost["forward"]["p50"] > 0 and cost["plan"]["p50"] > 0 and cost["result"]["p50"] > 0
        assert max(times["p50"] for times in cost.values()) == cost["host"]["p50"]
    assert metrics["host_full_steps"] > 0
    assert 0 < metrics["host_full_rows"] <= metrics["requests"]


def test_offline_counts_what_was_asked_for(bench):
    both, printed = bench(
        "offline", "--requests", "8,3", "--prompt-tokens", "4:16", "--output-tokens", "3:9",
        "--flops", "1e11", "--bandwidth", "1e10", "--threads", "1", "--log-level", "error",
        "--adapters", "2", "--adapter-rank", "4",
    )  # fmt: skip
    for requests in (8, 3):
        metrics = both[str(requests)]
        check_parts(metrics)
        assert metrics["requests"] == requests and metrics["adapters"] == 2
        assert requests * 3 <= metrics["output_tokens"] <= requests * 9
        assert metrics["efficiency"] == pytest.approx(metrics["floor_seconds"] / metrics["seconds"])
    assert "outside the model" in printed


def test_vectors_are_measured_beside_one_token_of_each_prompt(bench):
    metrics, printed = bench(
        "vectors", "--prompts", "6", "--prompt-tokens", "4:9", "--threads", "1", "--in-process"
    )
    assert 6 * 4 <= metrics["prompt_tokens"] <= 6 * 9
    rates = metrics["embed_prompts_per_s"], metrics["generate_prompts_per_s"]
    assert metrics["ratio"] == pytest.approx(rates[0] / rates[1]) and "embed" in printed


def test_pipeline_counts_the_cpu_of_every_stage(bench):
    metrics, _ = bench(
        "pipeline", "--streams", "8", "--clients", "2", "--dp", "2", "--output-tokens", "64"
    )
    cost = metrics["cpu_us_per_token"]
    assert metrics["output_tokens"] == 8 * 64
    assert set(cost) == STAGES | {"client"}
    assert metrics["cpu_us_per_token_all_stages"] == pytest.approx(
        sum(cost[stage] for stage in STAGES)
    )
    # The grain of a process's CPU time is 10 ms.
    assert sum(cost.values()) * 8 * 64 >= 10_000


def test_startup_is_ready_before_the_first_token(bench):
    metrics, _ = bench("startup", "--rounds", "1", "--threads", "1")
    assert 0 < metrics["ready_seconds"] < metrics["first_token_seconds"]
    [engine] = metrics["engine_seconds"].values()
    assert engine["imports"] > 0 and engine["weights"] > 0
    assert sum(engine.values()) < metrics["ready_seconds"]


def test_drafts_are_measured_by_kind_of_text(bench):
    metrics, printed = bench(
        "drafts",
        "--rounds",
        "1",
        "--tokens",
        "30",
        "--threads",
        "1",
        "--dtype",
        "float32",
        "--in-process",
    )
    assert metrics["broken"] == []
    assert 0 < metrics["accepted_draft_tokens"] <= metrics["draft_tokens"]
    for task in ("summary", "edit", "code", "story"):
        found = metrics[task]
        ratio = found["with_tokens_per_s"] / found["without_tokens_per_s"]
        assert found["ratio"] == pytest.approx(ratio) and task in printed


def test_sleep_measures_each_level_beside_a_start(bench):
    metrics, _ = bench("sleep", "--rounds", "1", "--threads", "1", "--dtype", "float32")
    assert metrics["broken"] == [] and metrics["start_seconds"] > 0
    for level in (1, 2):
        found = metrics[f"level {level}"]
        assert found["other_answers"] == 0
        assert found["sleep_seconds"]["p50"] > 0 and found["wake_seconds"]["p50"] > 0


def test_takeover_counts_what_the_next_engine_computes_again(bench):
    metrics, _ = bench(
        "takeover", "--streams", "3", "--context", "100", "--tokens", "150", "--kills", "1",
        "--wait", "0", "--threads", "1", "--dtype", "float32",
    )  # fmt: skip
    assert metrics["broken"] == []
    keep = metrics["keep"]
    assert (keep["kills"], keep["other_texts"]) == (1, 0)
    assert keep["recomputed"]["max"] < 3 * 16, "less than a page of each stream"
    phases = [keep[f"{phase}_seconds"]["max"] for phase in TAKEOVER_PHASES]
    assert 0 < phases[0] <= sum(phases) < keep["gap_seconds"]["max"] + 1


def test_lora_compares_windows_in_which_adapters_are_loaded_with_calm_ones(bench):
    metrics, _ = bench(
        "lora", "--adapters", "2", "--windows", "1", "--streams", "2", "--tokens", "40",
        "--threads", "1", "--dtype", "float32",
    )  # fmt: skip
    assert metrics["broken"] == [] and metrics["load_ms"]["p50"] > 0
    for window in ("loading", "calm"):
        assert 0 < metrics[f"{window}_gap_ms"]["p50"] <= metrics[f"{window}_gap_ms"]["longest"]
    assert metrics["mib"]["engine"]["before"] > 0


@pytest.fixture(scope="module")
def server():
    with servers.Server("--threads", "1", "--max-model-len", "256") as running:
        yield running


def test_online_measures_each_rate(bench, server):
    metrics, _ = bench(
        "online", "--url", server.url, "--rates", "20,40", "--requests", "6",
        "--prompt-tokens", "4:8", "--output-tokens", "4:8",
    )  # fmt: skip
    assert [point["rate"] for point in metrics["points"]] == [20.0, 40.0]
    for point in metrics["points"]:
        assert (point["requests"], point["failed"]) == (6, 0)
        assert 0 < point["ttft_ms"]["p50"] <= point["ttft_ms"]["p99"]
        assert point["ttft_ms"]["p99"] <= point["e2e_ms"]["p99"]
    assert metrics["ttft_ms"] == metrics["points"][-1]["ttft_ms"]


def test_storm_compares_what_running_streams_feel_under_each_policy(bench):
    metrics, printed = bench(
        "storm", "--streams", "3", "--prompts", "4", "--stream-prompt", "16", "--calm-tokens", "30",
        "--prompt-tokens", "600", "--max-step-tokens", "100", "--kv-pages", "600", "--threads", "1",
        "--in-process",
    )  # fmt: skip
    assert set(metrics["policies"]) == {"mixed", "prefill-first"}
    for name, found in metrics["policies"].items():
        assert name in printed
        same, storm = found["undisturbed_itl_ms"], found["storm_itl_ms"]
        assert found["ratio"] == pytest.approx(storm["p99"] / same["p50"])
        assert 0 < same["p50"] <= same["p99"]
        assert 0 < storm["p50"] <= storm["p99"] <= storm["longest"]
        assert 0 < found["storm_ttft_ms"]["p50"] <= found["storm_seconds"] * 1e3
    # Prompts of 24 steps: prefill-first keeps the streams waiting for all of them.
    mixed, alone = metrics["policies"]["mixed"], metrics["policies"]["prefill-first"]
    assert alone["storm_itl_ms"]["longest"] > alone["storm_seconds"] * 1e3 / 2
    assert mixed["storm_itl_ms"]["p50"] < mixed["storm_seconds"] * 1e3 / 4


def test_online_replays_a_trace(bench, tmp_path, server):
    trace = tmp_path / "trace.jsonl"
    entries = [(0.0, 5, 3), (0.1, 9, 4), (0.2, 4, 900)]  # the last is longer than the context
    lines = [dict(zip(("timestamp", "input_length", "output_length"), e, strict=True))
             for e in entries]  # fmt: skip
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    metrics, _ = bench("online", "--url", server.url, "--trace", str(trace))
    (point,) = metrics["points"]
    assert (point["requests"], point["failed"]) == (3, 1)
    assert point["good_share"] <= 2 / 3


def test_formats_measures_a_batch_and_a_stream_of_each(bench, tmp_path):
    config = tmp_path / "small.json"
    small = {"num_hidden_layers": 1, "vocab_size": 512, "hidden_size": 256, "head_dim": 64}
    small |= {"num_attention_heads": 4, "intermediate_size": 512}
    config.write_text(json.dumps(SHAPES["llama-100m"] | small))
    metrics, printed = bench(
        "formats", "--config", str(config), "--formats", "fp8", "awq", "--requests", "2",
        "--prompt-tokens", "4:8", "--output-tokens", "3", "--stream-tokens", "4",
        "--repeats", "3", "--log-level", "error", "--in-process",
    )  # fmt: skip
    assert list(metrics) == ["fp8", "awq"]
    for found in metrics.values():
        least, median, most = sorted(found["all_tokens_per_s"])
        assert 0 < least <= median == found["tokens_per_s"] <= most and found["stream_ms"] > 0
    assert printed.count("stream_ms") == 6
