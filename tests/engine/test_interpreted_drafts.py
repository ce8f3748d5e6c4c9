"""Steps that verify a draft model's tokens, in graphs and without, by Triton's kernels: the tokens
are those of the CPU's own path without drafts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from checkpoints import make_checkpoint

PROGRAM = Path(__file__).with_name("interpreted_drafts.py")


def test_graphs_hold_the_passes_of_a_draft_model(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "Qwen3ForCausalLM")

    def run(*words: str, **variables: str) -> dict[str, Any]:
        command = [sys.executable, str(PROGRAM), *words, str(folder)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=400, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.strip().rpartition("\n")[2])

    expected, found = run("plain"), run(TRITON_INTERPRET="1")
    assert expected["drafts"] == [0, 0] and expected["graphs"] == 0
    assert found["tokens"] == expected["tokens"] and all(found["tokens"].values())
    drafts, accepted = found["drafts"]
    assert accepted > 0.8 * drafts > 8 and found["graphs"] > 3
