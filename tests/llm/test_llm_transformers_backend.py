"""A decoder that transformers builds, from a prompt to its text, through all processes of LLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from checkpoints import load_reference
from pipeinfer import LLM, SamplingParams
from transformers_checkpoints import write_transformers_checkpoint


def test_olmo_2_is_served_without_being_asked_for_transformers(
    tmp_path: Path, small: dict[str, Any]
) -> None:
    folder = write_transformers_checkpoint(tmp_path, "olmo2")
    reference = load_reference(folder)
    prompts = [[5, 9, 200, 31], list(range(40)), [77]]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(str(folder), **small) as llm:
        found = llm.generate(prompts, params, use_tqdm=False)
        again = llm.generate(prompts[1], params, use_tqdm=False)
    for prompt, result in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = reference.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False,
                eos_token_id=None,
            )  # fmt: skip
        assert result.outputs[0].token_ids == out[0, len(prompt) :].tolist()
    assert again[0].outputs[0].token_ids == found[1].outputs[0].token_ids
    assert again[0].cached_tokens >= 32
