"""Exact mode on a GPU: the logits of a request are the same bits whatever else is computed."""

from __future__ import annotations

import pytest
from company import WANTED, ask
from overlapped import GpuCores
from test_cuda_parity import ARCHITECTURES, MORE_ARCHITECTURES, again, compare, cores, prompts

from pipeinfer.engine.graphs import Graphs

pytestmark = pytest.mark.gpu

CASES = [
    *((name, 128) for name in (*ARCHITECTURES, *MORE_ARCHITECTURES)),
    ("LlamaForCausalLM", 64),
    ("GptOssForCausalLM", 64),
    ("Gemma3ForCausalLM", 256),
]
ROUTED = ("Moe", "Mixtral", "Oss")


@pytest.mark.parametrize(("architecture", "head_dim"), CASES)
def test_logits_are_the_same_bits_in_any_step(gpu_checkpoints, architecture, head_dim):
    folder, asked = gpu_checkpoints(architecture, head_dim), prompts(14)
    made = cores(folder, 2048, exact=True)
    assert made.loaded.attention == "exact"
    assert made.loaded.graph_sizes

    expected = ask(made, asked)
    assert len(expected.logits) == WANTED * len(asked)
    compare(folder, made, asked).check(routed=any(word in architecture for word in ROUTED))
    backwards = list(range(len(asked)))[::-1]
    preempting = GpuCores(folder, made.settings, policy="cores:Nuisance", loaded=made.loaded)
    found = {
        "warm": ask(made, asked, tag="w"),
        "alone": ask(again(made, folder), asked, alone=True),
        "backwards": ask(again(made, folder), asked, backwards),
        "chunks of 64": ask(again(made, folder, max_step_tokens=64), asked),
        "depth 1": ask(again(made, folder, overlap_depth=1), asked),
        "preempted": ask(preempting, asked),
    }
    assert sum(made.cached[f"r{index}w"] for index in range(len(asked))) >= 64
    runner = made.loaded.runner
    graphs, runner._graphs = runner._graphs, Graphs(runner.device)
    found["no graphs"] = ask(again(made, folder), asked)
    found["no graphs, chunks of 64"] = ask(again(made, folder, max_step_tokens=64), asked)
    runner._graphs = graphs
    tokens = {how: other.other_tokens(expected) for how, other in found.items()}
    logits = {how: other.other_logits(expected) for how, other in found.items()}
    assert (tokens, logits) == (dict.fromkeys(found, 0),) * 2
    print(f"EXACT {architecture} {head_dim}: {len(expected.logits)} tokens, {len(found)} ways")
