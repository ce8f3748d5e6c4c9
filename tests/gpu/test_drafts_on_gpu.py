"""Draft tokens change no token on a GPU in exact mode, with CUDA graphs and without; in the
fast mode only at near ties."""

from __future__ import annotations

import pytest
from overlapped import GpuCores
from test_cuda_parity import NEAR_TIE, again, cores, first_differences, generate

from draws import numbers
from pipeinfer.engine.graphs import Graphs
from pipeinfer.params import RequestParams

pytestmark = pytest.mark.gpu

WANTED = 60
CASES = [("Qwen3ForCausalLM", 128), ("LlamaForCausalLM", 64), ("Gemma3ForCausalLM", 128)]


def prompts() -> list[list[int]]:
    random = numbers(0)
    asked = [random.integers(0, 1000, length).tolist() for length in (1, 17, 90, 300)]
    return [*asked, [7, 8, 9, 10] * 12, [5] * 70, [*asked[3][:256], 1, 2]]


def ask(made: GpuCores, tag: str) -> dict[str, list[int]]:
    for index, prompt in enumerate(prompts()):
        params = RequestParams(
            temperature=(0.0, 0.8)[index % 2], top_p=0.9 if index == 3 else 1.0, max_tokens=WANTED
        )
        made.submit(f"r{index}{tag}", prompt, params, seed=index)
    made.run()
    return {name.removesuffix(tag): ids for name, ids in made.outputs.items() if name.endswith(tag)}


@pytest.mark.parametrize("drafts", ["n-grams", "model"])
@pytest.mark.parametrize(("architecture", "head_dim"), CASES)
def test_tokens_are_the_same_with_drafts_and_without(
    gpu_checkpoints, architecture, head_dim, drafts
):
    """Every request drafts in every step, so that most drafts of n-grams are wrong. The draft model
    is the model itself."""
    folder = gpu_checkpoints(architecture, head_dim)
    usual = ask(cores(folder, exact=True, cache="naive"), "")
    speculate = "ngram" if drafts == "n-grams" else str(folder)
    made = cores(folder, exact=True, cache="naive", speculate=speculate)
    runner = made.loaded.runner
    runner.keep_logits = False
    sizes = [(shape.num_prefills, shape.num_decodes) for shape in runner._graphs.verifying]
    assert sizes == [(rows, decodes) for rows in (1, 2, 4, 8) for decodes in (0, rows)]
    replays = 0
    for captured in map(runner._graphs.__getitem__, runner._graphs.verifying):
        original = captured.replay

        def replay(original=original) -> None:
            nonlocal replays
            replays += 1
            original()

        object.__setattr__(captured, "replay", replay)
    assert ask(made, "") == usual
    stats = made.scheduler.stats()
    drafted, accepted = stats["draft_tokens_total"], stats["accepted_draft_tokens_total"]
    if drafts == "n-grams":
        assert 0 < accepted < drafted and replays > WANTED / 2
    else:
        assert accepted > 0.8 * drafted and replays > WANTED / 8
    runner._graphs = Graphs(runner.device)
    eager = again(made, folder)
    eager.loaded.runner.keep_logits = False
    assert ask(eager, "") == usual
    print(f"DRAFTS {architecture} {drafts}: {accepted} of {drafted} accepted, {replays} replays")


@pytest.mark.parametrize("drafts", ["n-grams", "model"])
@pytest.mark.parametrize(("architecture", "head_dim"), CASES)
def test_first_differences_in_the_fast_mode_are_near_ties(
    gpu_checkpoints, architecture, head_dim, drafts
):
    """By the logits of the run without drafts. The draft model is the model itself."""
    folder = gpu_checkpoints(architecture, head_dim)
    made = cores(folder)
    plain = generate(made)
    speculate = "ngram" if drafts == "n-grams" else str(folder)
    drafting = cores(folder, speculate=speculate, speculative_max_requests=12)
    drafting.loaded.runner.keep_logits = False
    margins = first_differences(made, plain, generate(drafting))
    print(f"FLIPS {architecture} {drafts}: {len(margins)} of {len(plain)} requests, by {margins}")
    assert drafting.steps < made.steps or drafts == "n-grams"
    assert all(margin < NEAR_TIE for margin in margins)
