"""Exact mode on a GPU: the logits of a request are the same bits whatever else is computed."""

from __future__ import annotations

from pathlib import Path

import pytest
from company import WANTED, Answers, ask
from overlapped import GpuCores
from test_cuda_parity import ARCHITECTURES, MORE_ARCHITECTURES, again, compare, cores, prompts

from pipeinfer.engine.graphs import Graphs
from pipeinfer.settings import ConfigurationError
from quantized_checkpoints import quantize

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
    ways = same_in_all_ways(made, folder, asked, expected)
    print(f"EXACT {architecture} {head_dim}: {len(expected.logits)} tokens, {ways} ways")


@pytest.mark.parametrize("form", ["fp8", "fp8 blocks"])
def test_logits_of_weights_in_fp8_are_the_same_bits_in_any_step(gpu_checkpoints, tmp_path, form):
    """Rounded by row as they are loaded, and stored in blocks of 128 x 128."""
    folder, asked, how = gpu_checkpoints("Qwen3ForCausalLM", 128), prompts(14), {}
    plain = ask(cores(folder, 2048, exact=True), asked)
    if form == "fp8":
        how = {"quantization": "fp8"}
    else:
        folder, _ = quantize(folder, tmp_path, form)
    made = cores(folder, 2048, exact=True, **how)
    expected = ask(made, asked)
    assert plain.other_logits(expected) == len(expected.logits), "weights are rounded"
    ways = same_in_all_ways(made, folder, asked, expected)
    print(f"EXACT {form}: {len(expected.logits)} tokens, {ways} ways")


def test_other_formats_of_weights_are_refused_by_name(gpu_checkpoints, tmp_path):
    folder, _ = quantize(gpu_checkpoints("Qwen3ForCausalLM", 128), tmp_path, "gptq")
    with pytest.raises(ConfigurationError, match=r"--exact: .* with FP8 alone; "):
        cores(folder, 2048, exact=True)


def same_in_all_ways(
    made: GpuCores, folder: Path, asked: list[list[int]], expected: Answers
) -> int:
    """How many other ways there were; in none of them a token or a logit is another one."""
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
    return len(found)
