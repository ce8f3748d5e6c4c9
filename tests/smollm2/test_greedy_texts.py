"""The model's greedy texts are transformers' texts, whether or not requests have to give way."""

from __future__ import annotations

import time

import pytest
from smollm2_prompts import PROMPTS, TOKENS

from pipeinfer import LLM, SamplingParams

SCARCE = 52  # pages of 16 tokens: about a quarter of what all prompts and answers need


@pytest.mark.parametrize(
    ("asked", "settings"),
    [(PROMPTS[::5], {}), (PROMPTS, {"kv_pages": SCARCE})],
    ids=["room for ten", "scarce for fifty"],
)
def test_greedy_texts_are_those_of_transformers(model, expected, asked, settings):
    with LLM(model=str(model), dtype="float32", **settings) as llm:
        params = SamplingParams(temperature=0, max_tokens=TOKENS)
        outputs = llm.generate(list(asked), params, use_tqdm=False)
        texts = [output.outputs[0].text for output in outputs]
        preemptions = preempted(llm, len(asked))
    theirs = dict(zip(PROMPTS, expected["greedy"], strict=True))
    assert dict(zip(asked, texts, strict=True)) == {prompt: theirs[prompt] for prompt in asked}
    assert (preemptions > 0) == bool(settings)


def preempted(llm: LLM, many: int) -> float:
    """How often requests gave way, from a heartbeat that has seen that many end."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        stats = llm.stats()["scheduler-0"]
        if stats["finished_total"] == many:
            return stats["preemptions_total"]
        time.sleep(0.05)
    raise AssertionError(f"no heartbeat saw all requests end: {stats}")
