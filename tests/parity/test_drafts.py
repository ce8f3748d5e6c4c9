"""Draft tokens change no token: the same requests with speculative decoding and without.

In float32 on a CPU, where a row computes the same whatever its step is. Every request that can
draft does so in every step (`Cores`), so most drafts are wrong, and are rolled back all the time.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from cores import Cores

from checkpoints import ALL_ARCHITECTURES, CheckpointCache
from draws import numbers
from pipeinfer.attention.torch_backend import TorchBackend
from pipeinfer.engine.loading import load_engine
from pipeinfer.params import RequestParams
from pipeinfer.settings import ConfigurationError, Settings
from transformers_checkpoints import write_transformers_checkpoint

LENGTHS = (1, 2, 17, 40, 90, 33)
WANTED = 32  # tokens of each answer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.set_num_threads(1)
    return CheckpointCache(tmp_path_factory.mktemp("drafts"))


@pytest.fixture(scope="module")
def usual(checkpoint):
    """An architecture's cores that have answered the prompts without drafts."""

    @cache
    def of(architecture: str) -> Cores:
        made = cores(checkpoint(architecture), speculate="none")
        ask(made, prompts())
        return made

    return of


def cores(folder: Path, policy: str = "mixed", keeps_pages=False, **changes) -> Cores:
    settings = Settings(
        model=str(folder), device="cpu", dtype="float32", page_size=16, kv_pages=128,
        max_running=8, threads=1, max_step_tokens=256, speculate="ngram",
    )  # fmt: skip
    settings = msgspec.structs.replace(settings, **changes)
    return Cores(folder, settings, policy, settings.max_step_tokens, keeps_pages=keeps_pages)


def params(index: int) -> RequestParams:
    """Greedy and sampled, with what may stand beside drafts: log-probs, lengths, logit bias, and
    what may not: penalties."""
    return RequestParams(
        temperature=0.7 if index % 3 else 0.0,
        top_p=0.9 if index % 3 == 2 else 1.0,
        max_tokens=WANTED - index,
        min_tokens=16 if index % 2 else 0,
        logprobs=3 if index % 2 else None,
        logit_bias={5: 1.5} if index == 3 else {},
        frequency_penalty=0.5 if index == 4 else 0.0,
    )


def prompts() -> list[list[int]]:
    """Some repeat themselves, so that some drafts are right; two begin alike."""
    random = numbers(0)
    asked = [random.integers(0, 256, length).tolist() for length in LENGTHS]
    return [*asked, [7, 8, 9, 10] * 12, [*asked[4][:64], 1, 2]]


def ask(made: Cores, asked: list[list[int]], tag: str = "") -> dict[str, list[int]]:
    for index, prompt in enumerate(asked):
        made.submit(f"r{index}{tag}", prompt, params(index), seed=index, eos_ids=(200,))
    made.run()
    return {name.removesuffix(tag): ids for name, ids in made.outputs.items() if name.endswith(tag)}


def drafted(made: Cores) -> tuple[float, float]:
    stats = made.scheduler.stats()
    return stats["draft_tokens_total"], stats["accepted_draft_tokens_total"]


@pytest.mark.parametrize("architecture", ALL_ARCHITECTURES)
def test_tokens_and_log_probs_are_the_same(checkpoint, usual, architecture):
    without, made = usual(architecture), cores(checkpoint(architecture))
    assert ask(made, prompts()) == without.outputs
    drafts, accepted = drafted(made)
    assert 0 < accepted < drafts and drafted(without) == (0, 0)
    for name, raw in without.logprobs.items():
        logprobs = (np.frombuffer(raw, "<i4"), np.frombuffer(made.logprobs[name], "<i4"))
        assert len(logprobs[0]) == len(logprobs[1])
        values = [one.reshape(-1, 8)[:, 0].copy().view("<f4") for one in logprobs if len(one)]
        assert not values or np.abs(values[0] - values[1]).max() < 1e-4


@pytest.mark.parametrize(
    ("how", "changes"),
    [
        ("one step at a time, no prefix cache", {"overlap_depth": 1, "cache": "naive"}),
        ("chunks, few pages", {"max_step_tokens": 16, "kv_pages": 20}),
        ("pages of one token", {"page_size": 1, "kv_pages": 400}),
        ("two drafts, of three requests", {"num_speculative_tokens": 2,
                                           "speculative_max_requests": 3, "max_running": 3}),
        ("many drafts", {"num_speculative_tokens": 16}),
    ],
)  # fmt: skip
def test_the_same_tokens_however_steps_are_composed(checkpoint, usual, how, changes):
    asked, expected = prompts(), usual("Qwen3ForCausalLM").outputs
    made = cores(checkpoint("Qwen3ForCausalLM"), **changes)
    assert ask(made, asked) == expected, how
    if changes.get("cache") != "naive":
        assert ask(made, asked, tag="again") == expected, how  # out of the prefix cache
    assert drafted(made)[0] > 0 and made.engine.idle()
    made.memory.check_integrity()


def test_a_request_that_is_taken_back_goes_on_with_the_same_tokens(checkpoint, usual):
    made = cores(checkpoint("Qwen3ForCausalLM"), "cores:Nuisance")
    assert ask(made, prompts()) == usual("Qwen3ForCausalLM").outputs
    assert made.scheduler.stats()["preemptions_total"] > 3 and drafted(made)[0] > 0


def test_what_is_cached_of_an_answer_is_what_was_computed_of_it(checkpoint):
    """The next turn of a conversation finds the answer's pages, with rejected drafts in none."""
    folder, asked = checkpoint("Qwen3ForCausalLM"), prompts()
    made, usual = cores(folder), cores(folder, speculate="none", cache="naive")
    first = ask(made, asked)
    turns = [prompt + first[f"r{index}"] + [3] for index, prompt in enumerate(asked)]
    assert ask(made, turns, tag="next") == ask(usual, turns, tag="next")
    for index, prompt in enumerate(asked):
        pages = (len(prompt) + len(first[f"r{index}"]) - 1) // 16
        assert made.cached[f"r{index}next"] >= 16 * pages, index


@pytest.mark.parametrize(("policy", "page_size"), [("mixed", 4), ("cores:Nuisance", 16)])
def test_what_outlives_the_engine_is_every_full_page_and_no_draft(checkpoint, policy, page_size):
    """A successor finds in the page directory what was computed of each request."""
    folder, asked = checkpoint("Qwen3ForCausalLM"), prompts()
    made = cores(folder, policy, keeps_pages=True, page_size=page_size, kv_pages=400)
    answers = ask(made, asked)
    assert drafted(made)[1] > 0
    found = {tuple(ids.tolist()) for _, ids, _ in made.directory.read().verified().sequences()}
    texts = [tuple(prompt + answers[f"r{index}"]) for index, prompt in enumerate(asked)]
    for text in texts:
        full = (len(text) - 1) // page_size * page_size
        assert any(ids[:full] == text[:full] for ids in found), len(text)
    # A step that was under way at the end may have filled a page behind it.
    beyond = 2 * (1 + 4)
    for ids in found:
        assert any(ids[: len(text)] == text[: len(ids)] for text in texts)
        assert len(ids) <= max(map(len, texts)) + beyond


@pytest.mark.parametrize(
    ("architecture", "how", "changes"),
    [
        ("Qwen3ForCausalLM", "one step at a time", {"overlap_depth": 1}),
        ("LlamaForCausalLM", "chunks", {"max_step_tokens": 16}),
        ("Gemma3ForCausalLM", "windows, few pages", {"kv_pages": 20}),
        ("Qwen3MoeForCausalLM", "two drafts", {"num_speculative_tokens": 2}),
    ],
)  # fmt: skip
def test_a_draft_model_like_the_model_guesses_what_it_samples(
    checkpoint, usual, architecture, how, changes
):
    """It has the noise of the tokens that it guesses, and its keys and values are where the
    model's are: also those of prompts that the prefix cache has."""
    folder, asked, expected = checkpoint(architecture), prompts(), usual(architecture).outputs
    made = cores(folder, speculate=str(folder), **changes)
    assert ask(made, asked) == expected, how
    first = drafted(made)
    assert ask(made, asked, tag="again") == expected, how  # out of the prefix cache
    again = tuple(now - then for now, then in zip(drafted(made), first, strict=True))
    for drafts, accepted in (first, again):  # those with top-p and a bias are guessed without
        assert accepted > 0.8 * drafts > 40
    made.memory.check_integrity()


@pytest.mark.parametrize("policy", ["mixed", "cores:Nuisance"])
def test_a_draft_model_of_another_shape_changes_no_token(checkpoint, usual, policy):
    folder, asked = checkpoint("Qwen3ForCausalLM"), prompts()
    other = checkpoint("LlamaForCausalLM", num_hidden_layers=1, num_key_value_heads=1)
    made = cores(folder, policy, speculate=str(other), keeps_pages=True)
    shapes = made.loaded.runner.pool.shapes
    assert [shape.num_kv_heads for shape in shapes] == [2, 2, 1]
    assert ask(made, asked) == usual("Qwen3ForCausalLM").outputs
    drafts, accepted = drafted(made)
    assert drafts > 4 * accepted > 0
    made.memory.check_integrity()


def test_a_request_whose_drafts_are_rejected_stops_and_tries_again(checkpoint):
    folder, other = checkpoint("Qwen3ForCausalLM"), checkpoint("LlamaForCausalLM")
    made = cores(folder, speculate=str(other))
    made.scheduler._planner._drafter.min_rate = 0.7
    alone = RequestParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    made.submit("r", prompts()[3], alone)
    drafts = []
    while not made.finished:
        known = len(made.outputs["r"])
        made.run(lambda known=known: len(made.outputs["r"]) > known)
        drafts.append(drafted(made)[0])
    steps = [now > then for then, now in pairwise(drafts)]
    assert steps[0] and 0 < sum(steps) < len(steps) / 4
    assert any(now and not then for then, now in pairwise(steps)), "once more"


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ({"vocab_size": 300}, "it has 300 ids, the model has 2"),
        ({"max_position_embeddings": 100}, "it reads at most 100 tokens"),
        (None, "GPT2LMHeadModel is served through transformers"),
    ],
)
def test_a_draft_model_that_does_not_fit_is_refused_by_name(checkpoint, tmp_path, overrides, why):
    if overrides is None:
        other = write_transformers_checkpoint(tmp_path / "gpt2", "gpt2")
    else:
        other = checkpoint("LlamaForCausalLM", **overrides)
    with pytest.raises(ConfigurationError, match=f"--speculate .*: .*{why}"):
        cores(checkpoint("Qwen3ForCausalLM"), speculate=str(other))


def test_a_backend_that_needs_lengths_on_the_host_is_refused(checkpoint, monkeypatch):
    traits = dataclasses.replace(TorchBackend.traits, host_lengths=True)
    monkeypatch.setattr(TorchBackend, "traits", traits)
    folder = checkpoint("Qwen3ForCausalLM")
    settings = Settings(model=str(folder), device="cpu", kv_pages=20, speculate="ngram")
    with pytest.raises(ConfigurationError, match="--speculate: the attention backend torch"):
        load_engine(settings, folder)
