"""Log-probs are transformers', whatever changes logits behind them; and what asking for them does.

However the work is cut: see test_parity.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from cores import Cores

from checkpoints import CheckpointCache, load_reference
from pipeinfer.params import RequestParams
from pipeinfer.settings import Settings
from pipeinfer.wire import pack, unpack_logprobs
from right_logprobs import check_logprobs, check_prompt_logprobs

LENGTHS = (1, 2, 17, 40, 90)
OUTPUTS = 12
SETTINGS = {"page_size": 16, "kv_pages": 128, "max_running": 8, "threads": 1, "device": "cpu"}


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


def params_of(asked: tuple[int | None, int | None], **more: object) -> RequestParams:
    usual = {"temperature": 0.8, "max_tokens": OUTPUTS, "ignore_eos": True}
    return RequestParams(**usual | more, logprobs=asked[0], prompt_logprobs=asked[1])  # type: ignore


def run(known: Known, asked: tuple[int | None, int | None]) -> Cores:
    cores = Cores(known.folder, Settings(**SETTINGS))
    for number, prompt in enumerate(known.prompts):
        cores.submit(f"r{number}", prompt, params_of(asked), seed=number)
    cores.run()
    assert cores.scheduler.idle()
    return cores


# What changes logits, or what is taken from them; each meets each prompt.
CHANGES = (
    {"min_tokens": 6, "stop_token_ids": tuple(range(200))},
    {"logit_bias": dict.fromkeys(range(0, 250, 5), 5.0)},
    {"repetition_penalty": 1.7, "presence_penalty": 1.5},
    {"top_k": 3, "top_p": 0.5},
    {"temperature": 5.0},
    {"temperature": 0.0},
)


def test_what_changes_logits_does_not_change_log_probs(known):
    """Behind the logits, so for one architecture; those of all are seen in test_parity.py."""
    its = known("LlamaForCausalLM")
    cores = Cores(its.folder, Settings(**SETTINGS), policy="cores:Nuisance", budget=24)
    requests = {
        f"{change}-{number}": (prompt, params_of((3, 2), **CHANGES[change]))
        for change in range(len(CHANGES))
        for number, prompt in enumerate(its.prompts)
    }
    for seed, (name, (prompt, params)) in enumerate(requests.items()):
        cores.submit(name, prompt, params, seed=seed)
    cores.run()
    assert cores.scheduler.idle() and cores.scheduler.counts["preemptions"] > 2
    for name, (prompt, _) in requests.items():
        outputs = cores.outputs[name]
        expected = its.logprobs(prompt + outputs)
        assert len(outputs) > 0
        check_logprobs(cores.logprobs[name], 3, expected[len(prompt) - 1 : -1], outputs)
        check_prompt_logprobs(cores.prompt_logprobs[name], 2, expected[: len(prompt)], prompt)
    firsts = [[*unpack_logprobs(cores.logprobs[f"0-{n}"], 3)][:6] for n in range(len(LENGTHS))]
    held = [entry for some in firsts for entry in some if entry.ids[0] < 200]
    assert held, "nothing that must not be sampled yet was the likeliest"


def test_asking_changes_no_token(known):
    its = known("Qwen2ForCausalLM")
    assert run(its, (3, 2)).outputs == run(its, (None, None)).outputs


def test_prompts_with_log_probs_match_nothing_and_others_find_what_they_leave(known):
    its = known("Qwen2ForCausalLM")
    cores = Cores(its.folder, Settings(**SETTINGS, overlap_depth=2))
    prompt = its.prompts[-1]
    for name, asked in (("plain", None), ("asked", 2), ("again", 2), ("after", None)):
        cores.submit(name, prompt, params_of((1, asked)), seed=1)
        cores.run()
    assert cores.cached == {"plain": 0, "asked": 0, "again": 0, "after": 80}
    expected = its.logprobs(prompt)
    for name in ("asked", "again"):
        check_prompt_logprobs(cores.prompt_logprobs[name], 2, expected, prompt)


def test_log_probs_of_a_prompt_that_was_taken_back_are_not_made_twice(known):
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
    cores.run(lambda: cores.scheduler._live["r"].num_prompt_logprobs > 40)
    request = cores.scheduler._live["r"]
    cores.scheduler._planner._preempt(request)
    cores.run()
    first, second = (admit.prompt_logprobs_from for admit in admitted)
    assert first == 1 and second > 40
    assert len(list(unpack_logprobs(cores.prompt_logprobs["r"], 1))) == len(its.prompts[-1])
    assert pack(cores.outputs["r"])
