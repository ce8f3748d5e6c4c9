"""The model's greedy texts are transformers' texts, whether or not requests have to give way."""

from __future__ import annotations

import time

from smollm2_prompts import ADAPTER, ASKED, PROMPTS, TOKENS, stored_adapter_texts

from pipeinfer import LLM, LoRARequest, SamplingParams

SCARCE = 22  # pages of 16 tokens: a third of what all prompts and answers need
PARAMS = SamplingParams(temperature=0, max_tokens=TOKENS)


def test_greedy_texts_are_those_of_transformers_and_with_an_adapter_those_of_peft(model, expected):
    """A row with the adapter is beside one without it, in every step, and pages are scarce."""
    adapter = LoRARequest("pirate", 1, str(ADAPTER))
    asked = [prompt for prompt in ASKED for _ in range(2)]
    settings = {"dtype": "float32", "kv_pages": SCARCE, "enable_lora": True, "max_lora_rank": 2}
    with LLM(model=str(model), **settings) as llm:
        adapters = [None, adapter] * len(ASKED)
        outputs = llm.generate(asked, PARAMS, use_tqdm=False, lora_request=adapters)
        assert preempted(llm, len(asked)) > 0
    texts = [output.outputs[0].text for output in outputs]
    theirs = dict(zip(PROMPTS, expected["greedy"], strict=True))
    assert texts[::2] == [theirs[prompt] for prompt in ASKED]
    assert texts[1::2] == stored_adapter_texts()
    assert sum(one != other for one, other in zip(texts[::2], texts[1::2], strict=True)) > 7


def preempted(llm: LLM, many: int) -> float:
    """How often requests gave way, from a heartbeat that has seen that many end."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        stats = llm.stats()["scheduler-0"]
        if stats["finished_total"] == many:
            return stats["preemptions_total"]
        time.sleep(0.05)
    raise AssertionError(f"no heartbeat saw all requests end: {stats}")
