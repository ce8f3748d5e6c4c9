"""The model runner with real tiny checkpoints against transformers; every architecture meets those
in tests/parity."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from single_steps import Driver, Row, build_step

from checkpoints import load_reference
from kept_logits import logits_of
from pipeinfer.engine.loading import load_engine
from pipeinfer.settings import Settings

PROMPTS = [
    np.random.default_rng(length).integers(0, 256, length).tolist()
    for length in (1, 2, 9, 16, 17, 40, 33)
]
LENGTH = 16


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
    return generated(checkpoint("Qwen3ForCausalLM"), PROMPTS, LENGTH)


@pytest.mark.parametrize(("page_size", "chunk", "stagger"), [(16, 1000, 0), (1, 7, 2), (64, 5, 5)])
def test_greedy_tokens_equal_those_of_transformers(checkpoint, expected, page_size, chunk, stagger):
    runner = load(checkpoint("Qwen3ForCausalLM"), page_size=page_size)
    assert Driver(runner, PROMPTS, LENGTH).run(chunk, stagger) == expected


def test_greedy_tokens_behind_a_sliding_window_equal_those_of_transformers(checkpoint, expected):
    options = {"sliding_window": 12, "use_sliding_window": True, "max_window_layers": 1}
    folder = checkpoint("Qwen3ForCausalLM", **options)
    outputs = generated(folder, PROMPTS, LENGTH)
    assert outputs != expected
    for chunk in (1000, 7):
        assert Driver(load(folder, page_size=4), PROMPTS, LENGTH).run(chunk) == outputs


def test_logits_equal_those_of_transformers(checkpoint):
    folder = checkpoint("LlamaForCausalLM")
    runner, prompt = load(folder), PROMPTS[5]
    row = Row(0, 0, prompt, np.arange(1, 5), True)
    mine = logits_of(runner, build_step([row], 0, 4))
    with torch.inference_mode():
        theirs = load_reference(folder)(torch.tensor([prompt])).logits[0, -1]
    assert float((mine[0] - theirs).abs().max() / theirs.abs().max()) < 1e-5


def test_seeded_tokens_do_not_depend_on_the_batch_or_on_chunks(checkpoint):
    folder = checkpoint("Qwen3ForCausalLM")
    together = Driver(load(folder), PROMPTS, LENGTH, temperature=0.8).run(chunk=6, stagger=1)
    assert together != Driver(load(folder), PROMPTS, LENGTH).run(chunk=6)
    for slot in (0, 3, 6):
        driver = Driver(load(folder), [[0]] * slot + [PROMPTS[slot]], LENGTH, temperature=0.8)
        assert driver.run(chunk=1000)[slot] == together[slot]


def test_a_chunk_that_does_not_sample_gives_no_id_and_leaves_last_token_alone(checkpoint):
    runner = load(checkpoint("LlamaForCausalLM"))
    first = runner.run(build_step([Row(3, 0, [5, 6, 7], np.array([1]), True)], 0, 1)).ids
    assert first.shape == (1,)
    chunk = Row(3, 0, [9] * 8, np.array([2]), False)
    assert runner.run(build_step([chunk], 1, 1)).ids.shape == (0,)
    from_device = runner.run(build_step([Row(3, 3, None, np.array([1]), True)], 2, 1))
    given = runner.run(build_step([Row(3, 3, [int(first[0])], np.array([1]), True)], 3, 1))
    assert from_device.ids.tolist() == given.ids.tolist()


@pytest.mark.parametrize("part", ["k", "v"])
def test_nan_from_the_model_makes_its_row_bad_and_no_other(checkpoint, part):
    runner, undisturbed = (load(checkpoint("LlamaForCausalLM")) for _ in range(2))
    getattr(runner.pool, part)[0][7] = float("nan")
    rows = [
        Row(0, 0, [1, 2], np.array([1, 2]), True),
        Row(1, 16, [3, 4], np.array([7, 3]), True),
    ]
    sampled = runner.run(build_step(rows, 0, 2))
    assert sampled.bad.tolist() == [1] and sampled.num_sampled.tolist() == [1, 0]
    assert sampled.ids[0] == undisturbed.run(build_step(rows, 0, 2)).ids[0]
    # The step in flight meanwhile goes on from an id that exists.
    both = [Row(0, 2, None, np.array([1, 2]), True), Row(1, 18, None, np.array([7, 3]), True)]
    following = runner.run(build_step(both, 1, 2))
    assert following.bad.tolist() == [1]
    assert following.ids[0] == undisturbed.run(build_step(both, 1, 2)).ids[0]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
def test_what_a_bad_request_left_in_a_page_does_not_reach_its_next_owner(checkpoint, architecture):
    """The page is only partly written anew: what follows the last token stays as it was."""
    runner, undisturbed = (load(checkpoint(architecture)) for _ in range(2))
    prompt, given = [5, 6, 7, 8, 9, 10, 11], []
    for part in (*runner.pool.k, *runner.pool.v):
        part[1:] = float("nan")
    for one in (runner, undisturbed):
        rows = [
            Row(0, 0, prompt[:6], np.array([3, 0]), False),
            Row(1, 0, [1, 2, 3], np.array([4, 0]), True),
            Row(2, 0, list(range(30)), np.array([5, 6]), True),
        ]
        first = one.run(build_step(rows, 0, 2))
        rows = [
            Row(0, 6, prompt[6:], np.array([3, 0]), True),
            Row(1, 3, None, np.array([4, 0]), True),
            Row(2, 30, None, np.array([5, 6]), True),
        ]
        given.append([first, one.run(build_step(rows, 1, 2))])
    for mine, theirs in zip(*given, strict=True):
        assert mine.bad.tolist() == []
        assert mine.ids.tolist() == theirs.ids.tolist()


def test_pages_are_zeroed_before_a_step_that_says_so_computes(checkpoint):
    runner, undisturbed = (load(checkpoint("LlamaForCausalLM")) for _ in range(2))
    for part in (*runner.pool.k, *runner.pool.v):
        part[1:] = float("nan")
    step = build_step([Row(0, 0, [1, 2, 3], np.array([4, 0]), True)], 0, 2)
    cleared = runner.run(
        replace(step, delta=replace(step.delta, pages_to_zero=np.array([4, 9], np.int32)))
    )
    assert cleared.ids.tolist() == undisturbed.run(step).ids.tolist()
    for mine, theirs in zip(
        (*runner.pool.k, *runner.pool.v), (*undisturbed.pool.k, *undisturbed.pool.v), strict=True
    ):
        assert torch.equal(mine[[4, 9]], theirs[[4, 9]])
        assert mine[5].isnan().all()
