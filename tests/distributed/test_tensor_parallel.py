"""Two and four ranks, as processes over gloo, give the tokens that one rank gives.

Their log-probs are those of transformers.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from rank_process import generate

from checkpoints import CheckpointCache, load_reference
from pipeinfer.engine.loading import load_engine
from pipeinfer.settings import Settings
from right_logprobs import check_logprobs, check_prompt_logprobs

OUTPUTS = 6
GAP = 1e-3  # between the two best logits, so that rounding cannot change the greedy choice
# What is sampled knows no architecture: of one all, of the others some.
SAMPLED = (
    {"temperature": 0.8},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 1.1, "top_k": 20},
    {"temperature": 0.7, "min_p": 0.05, "top_k": 50},
    {"temperature": 0.8, "repetition_penalty": 1.4, "frequency_penalty": 0.5},
    {"temperature": 0.9, "top_p": 0.8, "presence_penalty": 1.5, "logit_bias": {9: 3.0, 70: -100.0}},
    {"temperature": 0.9, "logit_bias": {9: 3.0, 70: 3.5, 200: 4.0, 250: 2.0}},
)
# Alternatives of outputs and of the prompt, of whoever comes.
ASKED = ((None, None), (3, 2), (20, None), (1, None), (0, 20), (5, 0))
# Two KV heads on four ranks are replicated, and the one of Qwen2; 263 ids do not divide.
OVERRIDES = {
    "LlamaForCausalLM": {"vocab_size": 263},
    "MistralForCausalLM": {"sliding_window": 40},
    "Qwen2ForCausalLM": {"num_key_value_heads": 1},
    "Qwen3ForCausalLM": {"tie_word_embeddings": True, "vocab_size": 263},
    "Qwen3MoeForCausalLM": {},
    "Gemma3ForCausalLM": {"tie_word_embeddings": True, "vocab_size": 263},
    # Of those put together from parts, the one with most of them.
    "Glm4MoeForCausalLM": {"merged": True},
}
# Each once, and the first with whole KV heads and with shared ones.
SHARED_BY = {
    2: ("LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"),
    4: ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3MoeForCausalLM", "Glm4MoeForCausalLM"),
}
# Keys and values in 8 bits; experts split over the ranks one by one, and dealt out whole; tokens
# that are guessed ahead.
FP8 = {"kv_cache_dtype": "fp8_e4m3"}
ITSELF = {"speculate": "itself"}  # the draft model is the model
WAYS = {
    "LlamaForCausalLM": ({}, FP8),
    "Qwen2ForCausalLM": ({"speculate": "ngram"}, ITSELF),
    "Qwen3MoeForCausalLM": ({}, {"enable_expert_parallel": True}),
    "Glm4MoeForCausalLM": ({"enable_expert_parallel": True},),
}


class Known(NamedTuple):
    """Requests to one checkpoint, and what must come of them, by request.

    logprobs: float64 [prompt and output, vocab], of what follows each token in transformers.
    """

    folder: Path
    asked: list[dict]
    outputs: dict[str, list[int]]
    logprobs: dict[str, np.ndarray]


def known(folder: Path, sampled: Sequence[dict]) -> Known:
    """Greedy requests whose choice is never close, then `sampled` ones; most with log-probs."""
    rng = np.random.default_rng(3)
    greedy = {"temperature": 0.0, "max_tokens": OUTPUTS, "ignore_eos": True}
    asked = [
        {"prompt": rng.integers(0, 256, int(n)).tolist(), "params": greedy, "seed": 0}
        for n in rng.integers(3, 60, 12)
    ]
    tried = generate(str(folder), asked, 1)
    smallest = dict.fromkeys(tried.outputs, np.inf)
    for (name, _), logits in tried.logits.items():
        second, first = np.partition(logits, -2)[-2:]
        smallest[name] = min(smallest[name], float(first - second))
    clear = [ask for index, ask in enumerate(asked) if smallest[f"r{index}"] > GAP][:4]
    assert len(clear) >= 2, "no prompts with clear greedy choices; change the seed"
    clear += [
        {"prompt": asked[0]["prompt"], "params": {**greedy, **knobs}, "seed": 7 + index}
        for index, knobs in enumerate(sampled)
    ]
    for index, ask in enumerate(clear):
        of_output, of_prompt = ASKED[index % len(ASKED)]
        more = {"logprobs": of_output, "prompt_logprobs": of_prompt}
        ask["params"] = {**ask["params"], **more, "min_tokens": 6 * (index == 3)}
    outputs = generate(str(folder), clear, 1).outputs
    model = load_reference(folder)
    with torch.inference_mode():
        ids = {f"r{n}": [*ask["prompt"], *outputs[f"r{n}"]] for n, ask in enumerate(clear)}
        logits = {name: model(torch.tensor([some])).logits[0] for name, some in ids.items()}
    logprobs = {name: some.double().log_softmax(-1).numpy() for name, some in logits.items()}
    return Known(folder, clear, outputs, logprobs)


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> dict[str, Known]:
    cache = CheckpointCache(tmp_path_factory.mktemp("split"))
    made = {name: cache(name, **changes) for name, changes in OVERRIDES.items()}
    return {
        name: known(folder, SAMPLED if name == "LlamaForCausalLM" else SAMPLED[-2:])
        for name, folder in made.items()
    }


@pytest.mark.parametrize("size", SHARED_BY)
def test_every_architecture_gives_the_same_tokens_on_several_ranks(
    work, tmp_path, short_path, size
):
    plan = tmp_path / "work.json"
    jobs = [(name, changes) for name in SHARED_BY[size] for changes in WAYS.get(name, ({},))]
    given = [
        (folder := str(work[name].folder), work[name].asked,
         {"speculate": folder} if changes == ITSELF else changes)
        for name, changes in jobs
    ]  # fmt: skip
    plan.write_text(json.dumps(given))
    script = Path(__file__).with_name("rank_process.py")
    outs = [tmp_path / f"out-{rank}.json" for rank in range(size)]
    subprocess.run(
        [sys.executable, script, f"ipc://{short_path}/rank-0", plan, *outs], check=True, timeout=400
    )
    of_ranks = [json.loads(out.read_text()) for out in outs]
    for (name, changes), *found in zip(jobs, *of_ranks, strict=True):
        if changes == FP8:  # a sum in another order may be rounded to another number of 8 bits
            check_shifts(work[name].folder, [of_rank["shifts"] for of_rank in found])
            continue
        for of_rank in found:
            assert of_rank["outputs"] == work[name].outputs, (name, changes)
            check_request_logprobs(work[name], of_rank["logprobs"])
            drafted, accepted = of_rank["drafts"]
            assert changes != ITSELF or accepted > 0.7 * drafted > 10


def check_shifts(folder: Path, of_ranks: list[list]) -> None:
    """Ranks shift keys as one alone does; those that share a head, as their queries see it."""
    alone = load_engine(Settings(kv_pages=8, page_size=16, **FP8), folder).runner.pool.key_centers
    for layer, shift in enumerate(alone):
        heads = torch.tensor([shifts[layer] for shifts in of_ranks]).flatten(0, 1)
        together = heads.unflatten(0, (len(shift), -1)).mean(1)
        torch.testing.assert_close(together, shift, rtol=1e-3, atol=1e-4)


def check_request_logprobs(known: Known, found: dict[str, list[str]]) -> None:
    """They are transformers'. found: of outputs and prompts, as rank_process.py writes them."""
    for index, ask in enumerate(known.asked):
        name, prompt, params = f"r{index}", ask["prompt"], ask["params"]
        of_output, of_prompt = map(bytes.fromhex, found[name])
        expected = known.logprobs[name]
        if params["logprobs"] is not None:
            outputs = known.outputs[name]
            behind = expected[len(prompt) - 1 : -1]
            check_logprobs(of_output, params["logprobs"], behind, outputs)
        if params["prompt_logprobs"] is not None:
            most = params["prompt_logprobs"]
            check_prompt_logprobs(of_prompt, most, expected[: len(prompt)], prompt)
