"""Two and four ranks, as processes over gloo, give the tokens that one rank gives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rank_process import generate, scores

from checkpoints import ARCHITECTURES, CheckpointCache

OUTPUTS = 16
GAP = 1e-3  # between the two best logits, so that rounding cannot change the greedy choice
SAMPLED = (
    {"temperature": 0.8},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 1.1, "top_k": 20},
    {"temperature": 0.7, "min_p": 0.05, "top_k": 50},
    {"temperature": 0.8, "repetition_penalty": 1.4, "frequency_penalty": 0.5},
    {"temperature": 0.9, "top_p": 0.8, "presence_penalty": 1.5, "logit_bias": {9: 3.0, 70: -100.0}},
    {"temperature": 0.9, "logit_bias": {9: 3.0, 70: 3.5, 200: 4.0, 250: 2.0}},
)
# Two KV heads on four ranks are replicated; 263 ids do not divide by two or four.
OVERRIDES = {
    "LlamaForCausalLM": {"vocab_size": 263},
    "MistralForCausalLM": {"sliding_window": 40},
    "Qwen2ForCausalLM": {"num_key_value_heads": 1},
    "Qwen3ForCausalLM": {"tie_word_embeddings": True, "vocab_size": 263},
    "Qwen3MoeForCausalLM": {},
    "Gemma3ForCausalLM": {"tie_word_embeddings": True, "vocab_size": 263},
}
# Experts split over the ranks one by one, and dealt out whole.
WAYS = {"Qwen3MoeForCausalLM": ({}, {"enable_expert_parallel": True})}


def requests(folder: Path) -> tuple[list[dict], dict[str, dict]]:
    """Greedy requests whose choice is never close, then sampled ones, some with log-probs; and what
    one rank gives."""
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
        for index, knobs in enumerate(SAMPLED)
    ]
    clear[1]["params"] = {**greedy, "logprobs": 3, "prompt_logprobs": 2}
    clear[3]["params"] = {**clear[3]["params"], "logprobs": 1, "min_tokens": 9}
    cores = generate(str(folder), clear, 1)
    return clear, {"outputs": cores.outputs, "scores": scores(cores, clear)}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """[(architecture, folder, requests, outputs and log-probs of one rank)]"""
    cache = CheckpointCache(tmp_path_factory.mktemp("split"))
    made = []
    for architecture in ARCHITECTURES:
        folder = cache(architecture, **OVERRIDES[architecture])
        made.append((architecture, folder, *requests(folder)))
    return made


@pytest.mark.parametrize("size", [2, 4])
def test_every_architecture_gives_the_same_tokens_on_several_ranks(
    work, tmp_path, short_path, size
):
    plan = tmp_path / "work.json"
    jobs = [(f"{name} {changes}", str(folder), asked, changes, expected)
            for name, folder, asked, expected in work
            for changes in WAYS.get(name, ({},))]  # fmt: skip
    plan.write_text(json.dumps([job[1:4] for job in jobs]))
    script = Path(__file__).with_name("rank_process.py")
    outs = [tmp_path / f"out-{rank}.json" for rank in range(size)]
    ranks = [
        subprocess.Popen(
            [sys.executable, script, f"ipc://{short_path}/rank-0", str(rank), str(size), plan, out],
            stderr=subprocess.PIPE, text=True,
        )
        for rank, out in enumerate(outs)
    ]  # fmt: skip
    said = [rank.communicate(timeout=240)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * size, said
    for out in outs:
        for (name, *_, expected), found in zip(jobs, json.loads(out.read_text()), strict=True):
            assert found["outputs"] == expected["outputs"], name
            check_scores(name, found["scores"], expected["scores"])


def check_scores(name: str, found: dict[str, list], expected: dict[str, list]) -> None:
    """Log-probs of ranks are those of one, as far as sums in another order are."""
    assert found.keys() == expected.keys() and len(expected) == 3
    for key, entries in expected.items():
        assert len(entries) == len(found[key]) > 0
        for (own, rank, ids, others), (its, its_rank, its_ids, theirs) in zip(
            entries, found[key], strict=True
        ):
            assert [its, *theirs] == pytest.approx([own, *others], abs=1e-4), (name, key)
            assert abs(its_rank - rank) <= 1, (name, key)  # where two are that close
            assert len(set(its_ids)) == len(ids)
