"""The cost of recording: the same processes do the same work both ways, and the ratio is right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import servers
from bench import record
from bench.workload import Work

ROOT = Path(__file__).resolve().parents[2]
OFFLINE = ("--requests", "6", "--prompt-tokens", "4:9", "--output-tokens", "3:6", "--threads", "1")
BARE = ("--without-model", "--streams", "3", "--output-tokens", "12", "--step-ms", "2")


@pytest.mark.parametrize("words", [OFFLINE, BARE], ids=["offline", "bare"])
def test_the_same_processes_do_the_same_work_recorded_and_not(tmp_path, words):
    out = tmp_path / "result.json"
    command = ["tools/bench", "record", "--pairs", "2", *words, "--json", str(out)]
    done = subprocess.run(
        [sys.executable, *command, "--log-level", "warning"],
        cwd=ROOT, env=servers.environment(), capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    metrics = json.loads(out.read_text())["metrics"]
    assert metrics["pairs"] == 2
    assert metrics["tokens"]["off"] == metrics["tokens"]["record"] > 0
    assert metrics["recorded_bytes_per_token"] > 1
    for stage in servers.STAGES:
        cost = metrics[f"{stage}_us_per_step"]
        assert cost["off"] > 0 and cost["record"] > 0
        assert cost["ratio"]["low"] <= cost["ratio"]["median"] <= cost["ratio"]["high"]
    whole = sum(metrics[f"{stage}_us_per_step"]["off"] for stage in servers.STAGES)
    assert metrics["cpu_us_per_step"]["off"] == pytest.approx(whole, rel=0.5)


def test_ratio_is_the_median_of_pairs_and_not_of_sums():
    """A machine that slows down by a hundred times hits both of a pair, and changes nothing."""
    base = [1.0, 2.0, 100.0, 3.0, 50.0]
    found = record.ratio(base, [1.02 * value for value in base], seed=1)
    assert found["median"] == pytest.approx(1.02)
    assert (found["low"], found["high"]) == (pytest.approx(1.02), pytest.approx(1.02))
    noisy = record.ratio(base, [1.0, 1.9, 110.0, 3.3, 49.0], seed=1)
    assert noisy["median"] == pytest.approx(1.0)
    assert noisy["low"] < 1.0 < noisy["high"]


def test_what_costs_nothing_has_no_ratio():
    rounds = {"off": [{"x": 0.0, "y": 2.0}], "record": [{"x": 1.0, "y": 3.0}]}
    metrics = record.summary(rounds, seed=1)
    assert "ratio" not in metrics["x"]
    assert metrics["y"]["ratio"]["median"] == 1.5


def test_prompts_of_another_turn_have_the_same_lengths_and_no_common_prefix():
    work = Work([[1, 2, 3], [9]], [4, 5])
    first, second = record.shifted(work, 0, 10_000), record.shifted(work, 1, 10_000)
    assert first.outputs == second.outputs == work.outputs
    assert [len(p) for p in first.prompts] == [len(p) for p in second.prompts] == [3, 1]
    assert all(a[0] != b[0] for a, b in zip(first.prompts, second.prompts, strict=True))
