"""A model of transformers in the CUDA runner's steps, through Triton's interpreter, in graphs too:
what else differs between steps, a model does not see.

A graph runs its body again there: what is shown is that steps of padding harm nobody, not that
CUDA can capture them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from runner_requests import POISON, masks_for, submit_all
from safetensors.torch import load_file, save_file

from pipeinfer.settings import Settings
from transformers_checkpoints import write_transformers_checkpoint

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "parity"))
PROGRAM = HERE / "interpreted_runner.py"
WAYS = "graphs", "no graphs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_transformers_checkpoint(tmp_path_factory.mktemp("foreign"), "olmo2")
    weights = load_file(made / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(weights, made / "model.safetensors", {"format": "pt"})
    return made


def test_steps_of_transformers_give_the_tokens_of_the_cpu(folder: Path) -> None:
    from cores import Cores

    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(PROGRAM), str(folder), "tokens"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.strip().rpartition("\n")[2])
    settings = Settings(kv_pages=40, page_size=16, max_running=3)
    cores = Cores(folder, settings, budget=24, masks=masks_for(folder))
    submit_all(cores)
    cores.run()
    assert cores.loaded.uses_transformers and all(cores.outputs.values())
    assert found == dict.fromkeys(WAYS, cores.outputs)
