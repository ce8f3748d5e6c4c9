"""Faults that were put in are found by each target of tools/fuzz, and by replaying their inputs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from planted_faults import PLANTS

import servers
from fuzz import inputs
from fuzz.cli import main
from fuzz.engines import TARGETS

ROOT = Path(__file__).resolve().parents[2]
# With the seeds that find them soon: what other seeds take stands in docs/benchmarks.md.
CHOSEN = {
    "unknown-tag": 1, "unhashable": 0, "bound-left-out": 4, "split-forgets-locks": 0,
    "one-too-many": 1, "any-blocks": 0,
}  # fmt: skip


def fuzz(*arguments: str, plant: Path) -> subprocess.CompletedProcess[str]:
    """Runs tools/fuzz; `plant`: a folder whose sitecustomize.py puts a fault in."""
    environment = servers.environment()
    paths = (str(plant), str(Path(__file__).parent), environment.get("PYTHONPATH", ""))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return subprocess.run(
        [sys.executable, "tools/fuzz", *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400,
    )  # fmt: skip


@pytest.mark.parametrize("name", CHOSEN)
def test_a_planted_fault_is_found_and_its_input_shows_it_again(name, tmp_path):
    plant, out = PLANTS[name], tmp_path / "result.json"
    program = f"import planted_faults\nplanted_faults.plant({name!r})\n"
    (tmp_path / "sitecustomize.py").write_text(program)
    words = ("--engine", "mutate", "--seed", str(CHOSEN[name]), "--seconds", "360")
    words += ("--first", plant.found, "--out", str(tmp_path / "out"), "--json", str(out))
    done = fuzz(plant.target, *words, plant=tmp_path)
    assert done.returncode == 1 and out.exists(), done.stderr
    metrics = json.loads(out.read_text())["metrics"]
    [finding] = [one for one in metrics["findings"] if plant.found in one["signature"]]
    assert metrics["executions"] > 0 and finding["after_executions"] > 1, "not the first input"
    again = fuzz(plant.target, "--replay", finding["file"], plant=tmp_path)
    assert again.returncode == 1 and "Traceback" in again.stderr
    assert main([plant.target, "--replay", finding["file"]]) == 0


def test_each_target_but_cores_has_a_planted_fault():
    """Its faults are found within a test's own process: test_fuzz_running.py."""
    assert {PLANTS[name].target for name in CHOSEN} == set(TARGETS) - {"cores"}


def test_any_bytes_are_an_input_of_several_parts():
    assert inputs.parts(inputs.joined([b"", b"abc", b"x" * 70_000])) == [
        b"", b"abc", b"x" * 70_000,
    ]  # fmt: skip
    assert inputs.parts(b"\0\0\5ab") == [b"ab"]
    assert inputs.parts(b"\0") == [b""] and inputs.parts(b"") == []
    huge = bytes(inputs.LONGEST_PART + 3)  # as one grew within an hour
    cut = inputs.parts(inputs.joined([huge, b"x"]))
    assert [len(part) for part in cut] == [inputs.LONGEST_PART, 1]
