"""Log-probs are transformers' to 1e-4: of outputs and of prompts, however the work is cut."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from cores import Cores

from checkpoints import ARCHITECTURES, CheckpointCache, load_reference
from pipeinfer.logprobs import Score, scores
from pipeinfer.packing import pack
from pipeinfer.params import SamplingParams
from pipeinfer.settings import Settings

TOLERANCE = 1e-4
LENGTHS = (1, 2, 17, 40, 90)
OUTPUTS = 20
SETTINGS = {"page_size": 16, "kv_pages": 128, "max_running": 8, "threads": 1, "device": "cpu"}
# Beside each other in one batch: some ask for nothing, others for different numbers.
ASKED = ((5, 3), (None, None), (0, None), (20, 20), (None, 1))
WAYS = {
    "whole prompts": {},
    "chunks": {"budget": 7},
    "preempted": {"policy": "cores:Nuisance", "budget": 24},
    "depth 1": {"overlap_depth": 1},
}


@dataclass
class Known:
    """A checkpoint, prompts, and transformers' log-probs of any sequence."""

    folder: object
    prompts: list[list[int]]
    model: object

    def logprobs(self, ids: list[int]) -> np.ndarray:
        """float64 [n, vocab]: of what follows each of `ids`."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([ids])).logits[0]  # type: ignore[operator]
        return logits.double().log_softmax(-1).numpy()


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    torch.set_num_threads(1)
    checkpoints = CheckpointCache(tmp_path_factory.mktemp("logprobs"))
    rng = np.random.default_rng(5)
    made: dict[str, Known] = {}

    def of(architecture: str) -> Known:
        if architecture not in made:
            folder = checkpoints(architecture)
            prompts = [rng.integers(0, 256, length).tolist() for length in LENGTHS]
            made[architecture] = Known(folder, prompts, load_reference(folder))
        return made[architecture]

    return of


def params_of(asked: tuple[int | None, int | None], **more: object) -> SamplingParams:
    usual = {"temperature": 0.8, "max_tokens": OUTPUTS, "ignore_eos": True}
    return SamplingParams(**usual | more, logprobs=asked[0], prompt_logprobs=asked[1])  # type: ignore


def run(known: Known, asked, budget=256, policy="mixed", overlap_depth=2, **more) -> Cores:
    settings = Settings(**SETTINGS, overlap_depth=overlap_depth)
    cores = Cores(known.folder, settings, policy=policy, budget=budget)
    for number, (prompt, one) in enumerate(zip(known.prompts, asked, strict=True)):
        cores.submit(f"r{number}", prompt, params_of(one, **more), seed=number)
    cores.run()
    assert cores.scheduler.idle()
    return cores


def check(entry: Score, expected: np.ndarray, token: int, most: int) -> None:
    """`expected` [vocab]: log-probs of the position."""
    assert abs(entry.logprob - expected[token]) < TOLERANCE
    above = int((expected > expected[token] + 2 * TOLERANCE).sum())
    near = int((expected > expected[token] - 2 * TOLERANCE).sum())
    assert above < entry.rank <= near
    assert len(entry.ids) == len(set(entry.ids)) == most
    best = np.sort(expected)[::-1][:most]
    assert np.abs(np.array(entry.logprobs) - best).max(initial=0) < TOLERANCE
    assert np.abs(expected[entry.ids] - entry.logprobs).max(initial=0) < TOLERANCE


def check_all(known: Known, cores: Cores, asked) -> None:
    for number, (prompt, (of_output, of_prompt)) in enumerate(
        zip(known.prompts, asked, strict=True)
    ):
        name = f"r{number}"
        outputs = cores.outputs[name]
        expected = known.logprobs(prompt + outputs)
        if of_output is None:
            assert cores.logprobs[name] == b""
        else:
            found = list(scores(cores.logprobs[name], of_output))
            assert len(found) == len(outputs) == OUTPUTS
            for n, entry in enumerate(found):
                check(entry, expected[len(prompt) + n - 1], outputs[n], of_output)
        if of_prompt is None:
            assert cores.prompt_logprobs[name] == b""
        else:
            first, *others = scores(cores.prompt_logprobs[name], of_prompt)
            assert first.rank == 0 and first.ids == []
            assert len(others) == len(prompt) - 1
            for n, entry in enumerate(others, start=1):
                check(entry, expected[n - 1], prompt[n], of_prompt)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_log_probs_are_those_of_transformers(known, architecture, way):
    its = known(architecture)
    cores = run(its, ASKED, **WAYS[way])
    check_all(its, cores, ASKED)
    if way == "preempted":
        assert cores.scheduler.counts["preemptions"] > 2


EVERY = ((3, 2),) * len(LENGTHS)
CHANGES = {
    "suppressed": {"min_tokens": 6, "stop_token_ids": tuple(range(200)), "max_tokens": OUTPUTS},
    "biased": {"logit_bias": dict.fromkeys(range(0, 250, 5), 5.0)},
    "penalized": {"repetition_penalty": 1.7, "presence_penalty": 1.5},
    "truncated": {"top_k": 3, "top_p": 0.5},
    "hot": {"temperature": 5.0},
    "greedy": {"temperature": 0},
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_logits_does_not_change_log_probs(known, change):
    its = known("Qwen3ForCausalLM")
    cores = run(its, EVERY, **CHANGES[change])
    for number, prompt in enumerate(its.prompts):
        name = f"r{number}"
        outputs = cores.outputs[name]
        expected = its.logprobs(prompt + outputs)
        found = list(scores(cores.logprobs[name], 3))
        assert len(found) == len(outputs) > 0
        for n, entry in enumerate(found):
            check(entry, expected[len(prompt) + n - 1], outputs[n], 3)
    if change == "suppressed":  # the likeliest were among those that must not be sampled
        tops = [e.ids[0] for n in range(5) for e in list(scores(cores.logprobs[f"r{n}"], 3))[:6]]
        assert any(token < 200 for token in tops)


def test_asking_changes_no_token(known):
    its = known("LlamaForCausalLM")
    nothing = ((None, None),) * len(LENGTHS)
    assert run(its, EVERY).outputs == run(its, nothing).outputs


def test_prompts_that_are_scored_match_nothing_and_others_find_what_they_leave(known):
    its = known("Qwen2ForCausalLM")
    cores = Cores(its.folder, Settings(**SETTINGS, overlap_depth=2))
    prompt = its.prompts[-1]
    for name, asked in (("plain", None), ("scored", 2), ("again", 2), ("after", None)):
        cores.submit(name, prompt, params_of((1, asked)), seed=1)
        cores.run()
    assert cores.cached == {"plain": 0, "scored": 0, "again": 0, "after": 80}
    expected = its.logprobs(prompt)
    for name in ("scored", "again"):
        for n, entry in enumerate(list(scores(cores.prompt_logprobs[name], 2))[1:], start=1):
            check(entry, expected[n - 1], prompt[n], 2)


def test_a_scored_prompt_that_was_taken_back_is_not_scored_twice(known):
    """What it knows already is found in the prefix cache as any other prompt's."""
    its = known("Qwen2ForCausalLM")
    cores = Cores(its.folder, Settings(**SETTINGS, overlap_depth=1), budget=24)
    admitted = []
    heard = cores.engine.handle

    def handle(event, now):
        admitted.extend(getattr(event, "admits", ()))
        return heard(event, now)

    cores.engine.handle = handle  # type: ignore[method-assign]
    cores.submit("r", its.prompts[-1], params_of((1, 1)), seed=1)
    cores.run(lambda: cores.scheduler._live["r"].scored > 40)
    request = cores.scheduler._live["r"]
    cores.scheduler._planner._preempt(request)
    cores.run()
    first, second = (admit.score_from for admit in admitted)
    assert first == 1 and second > 40
    assert len(list(scores(cores.prompt_logprobs["r"], 1))) == len(its.prompts[-1])
    assert pack(cores.outputs["r"])
