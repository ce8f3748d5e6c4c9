"""The model runner with real tiny checkpoints against transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from single_steps import Driver, Row, build_step, empty_step

from checkpoints import ARCHITECTURES, load_reference
from pipeinfer.engine.loading import load_engine
from pipeinfer.engine.sampler import BadLogits
from pipeinfer.settings import Settings

PROMPTS = [
    np.random.default_rng(length).integers(0, 256, length).tolist()
    for length in (1, 2, 9, 16, 17, 40, 33)
]
LENGTH = 24


def load(folder, **settings):
    engine = load_engine(Settings(max_running=8, kv_pages=4096, **settings), folder)
    return engine.runner


def generated(folder, prompts: list[list[int]], length: int) -> list[list[int]]:
    """Greedy outputs of transformers, one prompt at a time."""
    model = load_reference(folder)
    outputs = []
    for prompt in prompts:
        result = model.generate(
            torch.tensor([prompt]), do_sample=False, min_new_tokens=length,
            max_new_tokens=length, eos_token_id=None, temperature=None, top_p=None,
        )  # fmt: skip
        outputs.append(result[0, len(prompt) :].tolist())
    return outputs


@pytest.fixture(scope="module")
def expected(checkpoint):
    cache = {}

    def get(architecture):
        if architecture not in cache:
            folder = checkpoint(architecture)
            cache[architecture] = (folder, generated(folder, PROMPTS, LENGTH))
        return cache[architecture]

    return get


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("page_size", "chunk", "stagger"), [(16, 1000, 0), (1, 7, 2), (64, 5, 5)])
def test_greedy_tokens_equal_those_of_transformers(
    expected, architecture, page_size, chunk, stagger
):
    folder, outputs = expected(architecture)
    runner = load(folder, page_size=page_size)
    assert Driver(runner, PROMPTS, LENGTH).run(chunk, stagger) == outputs


@pytest.mark.parametrize("architecture", ["MistralForCausalLM", "Qwen3ForCausalLM"])
def test_greedy_tokens_behind_a_sliding_window_equal_those_of_transformers(
    checkpoint, architecture
):
    options = {"sliding_window": 12}
    if architecture == "Qwen3ForCausalLM":
        options |= {"use_sliding_window": True, "max_window_layers": 1}
    folder = checkpoint(architecture, **options)
    outputs = generated(folder, PROMPTS, LENGTH)
    assert outputs != generated(checkpoint(architecture), PROMPTS, LENGTH)
    for chunk in (1000, 7):
        assert Driver(load(folder, page_size=4), PROMPTS, LENGTH).run(chunk) == outputs


def test_logits_equal_those_of_transformers(checkpoint):
    folder = checkpoint("LlamaForCausalLM")
    runner, prompt = load(folder), PROMPTS[5]
    row = Row(0, 0, prompt, np.arange(1, 5), True)
    mine = runner.logits(build_step([row], 0, 4))
    with torch.inference_mode():
        theirs = load_reference(folder)(torch.tensor([prompt])).logits[0, -1]
    assert float((mine[0] - theirs).abs().max() / theirs.abs().max()) < 1e-5


def test_seeded_tokens_do_not_depend_on_the_batch_or_on_chunks(checkpoint):
    folder = checkpoint("Qwen3ForCausalLM")
    together = Driver(load(folder), PROMPTS, LENGTH, temperature=0.8).run(chunk=6, stagger=1)
    assert together != Driver(load(folder), PROMPTS, LENGTH).run(chunk=6)
    for slot, prompt in enumerate(PROMPTS):
        driver = Driver(load(folder), [[0]] * slot + [prompt], LENGTH, temperature=0.8)
        assert driver.run(chunk=1000)[slot] == together[slot]


def test_a_step_without_rows_gives_no_ids(checkpoint):
    ids = load(checkpoint("LlamaForCausalLM")).run(empty_step())
    assert ids.shape == (0,)
    assert ids.dtype == np.int32


def test_a_chunk_that_does_not_sample_gives_no_id_and_leaves_last_token_alone(checkpoint):
    runner = load(checkpoint("LlamaForCausalLM"))
    first = runner.run(build_step([Row(3, 0, [5, 6, 7], np.array([1]), True)], 0, 1))
    assert first.shape == (1,)
    chunk = Row(3, 0, [9] * 8, np.array([2]), False)
    assert runner.run(build_step([chunk], 1, 1)).shape == (0,)
    from_device = runner.run(build_step([Row(3, 3, None, np.array([1]), True)], 2, 1))
    given = runner.run(build_step([Row(3, 3, [int(first[0])], np.array([1]), True)], 3, 1))
    assert from_device.tolist() == given.tolist()


def test_nan_from_the_model_names_the_row_instead_of_sampling_nonsense(checkpoint):
    runner = load(checkpoint("LlamaForCausalLM"))
    runner.pool.k[0][7] = float("nan")
    rows = [
        Row(0, 0, [1, 2], np.array([1, 2]), True),
        Row(1, 16, [3, 4], np.array([7, 3]), True),
    ]
    with pytest.raises(BadLogits) as caught:
        runner.run(build_step(rows, 0, 2))
    assert caught.value.row == 1
