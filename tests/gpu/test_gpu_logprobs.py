"""Log-probs on a GPU, behind CUDA graphs: those of the logits that the tokens were sampled from.

How near these logits are to transformers' says test_cuda_parity.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_cuda_parity import cores, generate, prompts

from checkpoints import load_reference
from pipeinfer.params import RequestParams
from pipeinfer.wire import PositionLogprobs, unpack_logprobs

pytestmark = pytest.mark.gpu

TOLERANCE = 1e-4
NEAR = 0.15  # of bfloat16's logits to float32's
MOST = 5
WANTED = 40
# The second is a real model's: top-k goes over it in several blocks.
VOCABULARIES = (1024, 151_936)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """float64 [vocab]."""
    return torch.from_numpy(logits).double().log_softmax(0).numpy()


def check(entry: PositionLogprobs, expected: np.ndarray, token: int) -> None:
    """`expected` [vocab]: log-probs of the position."""
    assert abs(entry.logprob - expected[token]) < TOLERANCE
    before = (expected == expected[token]) & (np.arange(len(expected)) < token)
    assert entry.rank == 1 + int((expected > expected[token]).sum()) + int(before.sum())
    order = np.lexsort((np.arange(len(expected)), -expected))[:MOST]
    assert entry.ids == order.tolist()
    assert np.abs(expected[order] - entry.logprobs).max() < TOLERANCE


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_log_probs_of_outputs_are_those_of_the_logits_behind_graphs(
    gpu_checkpoints, vocab, temperature
):
    folder = gpu_checkpoints("Qwen3ForCausalLM", vocab_size=vocab)
    made = cores(folder)
    generated = generate(made, wanted=WANTED, temperature=temperature, logprobs=MOST)
    assert made.loaded.runner._graphs.decodes
    for index, prompt in enumerate(prompts()):
        name = f"r{index}"
        found = list(unpack_logprobs(made.logprobs[name], MOST))
        assert len(found) == WANTED
        for n, entry in enumerate(found):
            logits = made.logits[name, len(prompt) + n]
            check(entry, log_softmax(logits), generated[name][n])


def test_log_probs_of_prompts_are_near_those_of_float32(gpu_checkpoints):
    folder = gpu_checkpoints("LlamaForCausalLM")
    made = cores(folder, budget=64)  # in chunks
    generate(made, wanted=4, prompt_logprobs=2)
    reference = load_reference(folder).cuda()
    for index, prompt in enumerate(prompts()):
        with torch.inference_mode():
            batch = torch.tensor([prompt], device="cuda")
            expected = reference(batch).logits[0].double().log_softmax(-1).cpu().numpy()
        first, *others = unpack_logprobs(made.prompt_logprobs[f"r{index}"], 2)
        assert first.rank == 0
        assert len(others) == len(prompt) - 1
        for n, entry in enumerate(others, start=1):
            assert abs(entry.logprob - expected[n - 1][prompt[n]]) < NEAR
            assert np.abs(np.sort(expected[n - 1])[::-1][:2] - entry.logprobs).max() < NEAR


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_asking_changes_no_token(gpu_checkpoints, temperature):
    """Half of the requests ask; all have their tokens."""
    folder = gpu_checkpoints("Qwen3ForCausalLM")
    made = cores(folder)
    plain = generate(made, wanted=WANTED, temperature=temperature)
    other = cores(folder)
    asked = prompts()
    for index, prompt in enumerate(asked):
        most = MOST if index % 2 else None
        params = RequestParams(temperature=temperature, max_tokens=WANTED, logprobs=most)
        other.submit(f"r{index}", prompt, params, seed=index)
    other.run()
    assert {name: other.outputs[name] for name in plain} == plain
