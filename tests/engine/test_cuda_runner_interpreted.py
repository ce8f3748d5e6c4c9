"""The CUDA runner's steps, through Triton's interpreter, give the tokens of the CPU's runner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from runner_requests import LENGTHS, submit_all

from pipeinfer.settings import Settings

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "parity"))
PROGRAM = HERE / "interpreted_runner.py"


@pytest.fixture(scope="module")
def folder(checkpoint):
    return checkpoint("Qwen3ForCausalLM")


@pytest.fixture(scope="module")
def found(folder) -> dict[str, dict[str, list[int]]]:
    """Tokens by request, by way of running."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(PROGRAM), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().rpartition("\n")[2])


@pytest.fixture(scope="module")
def expected(folder) -> dict[str, list[int]]:
    """The same requests on the CPU's own path."""
    from cores import Cores

    cores = Cores(folder, Settings(kv_pages=40, page_size=16, max_running=3), budget=48)
    submit_all(cores)
    cores.run()
    assert len(cores.outputs) == len(LENGTHS) and all(cores.outputs.values())
    return cores.outputs


def test_two_ranks_that_exchange_their_best_candidates_give_the_same_tokens(
    folder, expected, tmp_path
):
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(PROGRAM), str(folder), f"ipc://{tmp_path}/rank-0"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "2"], env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=280) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    for out, _ in said:
        assert json.loads(out.strip().rpartition("\n")[2])["graphs"] == expected


@pytest.mark.parametrize("way", ["graphs", "derived on the device", "packed on the host"])
def test_every_way_of_running_a_step_gives_the_same_tokens(found, expected, way):
    assert found[way] == expected
