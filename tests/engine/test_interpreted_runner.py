"""The CUDA runner's steps, through Triton's interpreter, give the tokens of the CPU's runner.

There they are computed beside requests whose logits are NaN, which fail and disturb nobody.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from runner_requests import (
    LENGTHS,
    LOGPROBS,
    POISON,
    WANTED,
    logprobs_of,
    masks_for,
    run_alike,
    submit_all,
)

from pipeinfer.settings import Settings
from pipeinfer.step_cost import StepCost

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "parity"))
PROGRAM = HERE / "interpreted_runner.py"


# The latter has layers with a window, layers without, and a RoPE for each: all ways of running a
# step are taken with it alone. Ranks, which windows do not concern, have the other one.
MODELS = {
    "qwen3": ("Qwen3ForCausalLM", {}),
    "gemma3": (
        "Gemma3ForCausalLM",
        {
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}


WAYS = (
    "graphs", "no graphs", "pages listed, lengths on the host", "all pages gathered",
    "torch backend",
)  # fmt: skip


@pytest.fixture(scope="module", params=["gemma3"])
def folder(checkpoint, request):
    architecture, overrides = MODELS[request.param]
    return checkpoint(architecture, poison=POISON, **overrides)


@pytest.fixture(scope="module")
def found(folder) -> dict[str, Any]:
    """Tokens by request, by way of running; and what steps were measured to take."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(PROGRAM), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().rpartition("\n")[2])


@pytest.fixture(scope="module")
def on_the_cpu(folder):
    """The same requests on the CPU's own path."""
    from cores import Cores

    settings = Settings(kv_pages=40, page_size=16, max_running=3)
    cores = Cores(folder, settings, budget=24, masks=masks_for(folder))
    submit_all(cores)
    cores.run()
    return cores


@pytest.fixture(scope="module")
def expected(on_the_cpu) -> dict[str, list[int]]:
    """Its tokens."""
    assert len(on_the_cpu.outputs) == len(LENGTHS) and all(on_the_cpu.outputs.values())
    return on_the_cpu.outputs


def check_logprobs(found: dict[str, list], cores) -> None:
    """Ranks and ids are equal, log-probs are as near as sums in another order are."""
    expected = logprobs_of(cores)
    assert found.keys() == expected.keys() and len(expected) == len(LOGPROBS)
    for name, entries in expected.items():
        assert len(entries) == len(found[name]) == WANTED
        for (own, rank, ids, others), (its, *same, theirs) in zip(
            entries, found[name], strict=True
        ):
            assert same == [rank, ids]
            assert [its, *theirs] == pytest.approx([own, *others], abs=1e-4)


@pytest.mark.parametrize("folder", ["qwen3"], indirect=True)
def test_two_ranks_that_exchange_their_best_candidates_measure_and_give_the_same_tokens(
    folder, expected, on_the_cpu, short_path
):
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(PROGRAM), str(folder), f"ipc://{short_path}/rank-0"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "2"], env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=400) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    for out, _ in said:
        told = json.loads(out.strip().rpartition("\n")[2])
        assert told["graphs"] == expected
        check_logprobs(told["logprobs"]["graphs"], on_the_cpu)
        assert [size[0] for size in told["step cost"][1]] == [4]


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_running_a_step_gives_the_same_tokens(found, expected, way):
    assert found[way] == expected


@pytest.mark.parametrize("way", ["alike", "alike, no graphs"])
def test_what_rows_begin_with_in_common_is_read_once_to_the_same_tokens(found, folder, way):
    from cores import Cores

    cores = Cores(folder, Settings(kv_pages=40, page_size=16, max_running=3), budget=24)
    tokens, sharing, by_graph = found[way]
    assert tokens == run_alike(cores)
    assert len(tokens) == 4 and sharing >= 2
    assert by_graph == (sharing if way == "alike" else 0)


def test_graphs_that_were_left_are_captured_between_steps(found):
    # By way of running "pages listed", whose tokens are as those of all others.
    first, left, at_last, none = found["late graphs"]
    assert (left, none) == (3, 0)
    assert first + left == at_last


@pytest.mark.parametrize("way", ["graphs", "no graphs"])
def test_log_probs_are_the_same_behind_a_graph_and_without(found, on_the_cpu, way):
    check_logprobs(found["logprobs"][way], on_the_cpu)


def test_an_engine_with_graphs_says_what_its_steps_take(found):
    cost = msgspec.convert(found["step cost"], StepCost)
    assert [rows for rows, _ in cost.decodes] == [1, 2]
    assert [tokens for tokens, _, _ in cost.mixed] == [4, 24]
    assert all(0 < time < 10**14 for _, time, *_ in (*cost.decodes, *cost.mixed))
    times = [time for _, time, _ in cost.mixed]
    assert times == sorted(times), "more tokens take longer"


def test_an_engine_without_graphs_measures_its_steps_kernel_by_kernel(found):
    cost = msgspec.convert(found["step cost without graphs"], StepCost)
    assert [rows for rows, _ in cost.decodes] == [1, 3], "up to all that may run"
    assert [tokens for tokens, _, _ in cost.mixed] == [24], "up to the largest step"
    assert all(0 < time < 10**14 for _, time, *_ in (*cost.decodes, *cost.mixed))
