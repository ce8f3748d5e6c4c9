"""Steps with adapters, in graphs and without, by Triton's kernels: the tokens are the CPU's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import interpreted_adapters
from interpreted_adapters import served

from adapter_files import write_adapter
from checkpoints import load_reference, make_checkpoint

PROGRAM = Path(interpreted_adapters.__file__)


def test_graphs_hold_adapters_and_steps_without_take_their_own(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "LlamaForCausalLM")
    reference = load_reference(folder)
    adapters = [str(write_adapter(tmp_path / str(n), reference, n, r=5)) for n in (1, 2)]
    plain = served(folder, adapters)
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder), *adapters],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.strip().rpartition("\n")[2])
    assert found["graphs"]["tokens"] == found["no graphs"]["tokens"] == plain["tokens"]
    assert len({tuple(ids[:4]) for ids in plain["tokens"].values()}) > 3
    without, adapted = found["graphs"]["graphs"]
    assert without > 0 and adapted > 0
    assert found["no graphs"]["graphs"] == plain["graphs"] == [0, 0]
