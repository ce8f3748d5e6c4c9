"""Decoders that transformers builds give its greedy tokens through pages, chunks and the cache."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from cores import Cores

from checkpoints import CheckpointCache, load_reference
from pipeinfer.params import RequestParams
from pipeinfer.settings import Settings
from transformers_checkpoints import SERVED, write_transformers_checkpoint

OUTPUTS, PREFIX = 10, 44  # the prefix is longer than the windows
GAP = 1e-3  # between the two best logits, so that rounding cannot change the greedy choice
TOLERANCE = 1e-4
SETTINGS = Settings(model_impl="transformers", page_size=4, kv_pages=400, max_running=8, threads=1)


class Reference(NamedTuple):
    """What transformers generates behind a prompt, and the logits of each id."""

    prompt: list[int]
    ids: list[int]
    logits: np.ndarray


def references(folder: Path, lengths: list[int]) -> list[Reference]:
    """For prompts of these lengths, those above PREFIX with one beginning, whose greedy choice is
    never close."""
    model, rng = load_reference(folder), np.random.default_rng(1)
    prefix = rng.integers(0, 250, PREFIX).tolist()
    return [reference(model, rng, prefix if n > PREFIX else [], n) for n in lengths]


@torch.inference_mode()
def reference(model, rng: np.random.Generator, prefix: list[int], length: int) -> Reference:
    for _ in range(15):
        prompts = torch.tensor(rng.integers(0, 250, (4, length)))
        prompts[:, : len(prefix)] = torch.tensor(prefix, dtype=torch.long)
        out = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=OUTPUTS,
            do_sample=False, eos_token_id=None, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        logits = torch.stack(out.logits, 1)
        best = logits.topk(2).values
        for i in torch.nonzero((best[..., 0] - best[..., 1]).amin(1) > GAP).flatten().tolist():
            ids = out.sequences[i, length:].tolist()
            return Reference(prompts[i].tolist(), ids, logits[i].numpy())
    raise AssertionError("no prompts with clear greedy choices; change the seed")


def served(folder: Path, known: list[Reference], settings: Settings) -> Cores:
    """Steps of at most 16 tokens, so prompts are cut; the first request leaves its prompt to the
    others, which come at once."""
    cores = Cores(folder, settings, budget=16)
    params = RequestParams(temperature=0, max_tokens=OUTPUTS, ignore_eos=True)
    for number, one in enumerate(known):
        cores.submit(f"r{number}", one.prompt, params)
        if number == 0:
            cores.run()
    cores.run()
    return cores


def check(cores: Cores, known: list[Reference]) -> None:
    for number, one in enumerate(known):
        name = f"r{number}"
        assert cores.outputs[name] == one.ids
        logits = np.stack([cores.logits[name, len(one.prompt) + i] for i in range(OUTPUTS)])
        assert np.abs(logits - one.logits).max() / np.abs(one.logits).max() < TOLERANCE
    assert cores.scheduler.idle()


@pytest.mark.parametrize("model_type", SERVED)
def test_a_decoder_of_transformers_gives_its_tokens_in_chunks_behind_cached_prefixes_and_together(
    tmp_path, model_type
):
    folder = write_transformers_checkpoint(tmp_path, model_type)
    known = references(folder, [52, 1, 60, 17])
    assert len({token for one in known for token in one.ids}) > 3, "it says the same always"
    cores = served(folder, known, SETTINGS)
    assert cores.loaded.uses_transformers
    check(cores, known)
    assert cores.cached["r2"] >= PREFIX - 3
    assert cores.cached["r3"] == 0


def test_auto_leaves_to_transformers_what_pipeinfer_lacks_and_nothing_else(tmp_path):
    settings = Settings(page_size=4, kv_pages=64, threads=1)
    lacking = write_transformers_checkpoint(tmp_path / "lacking", "olmo2")
    assert Cores(lacking, settings).loaded.uses_transformers
    own = CheckpointCache(tmp_path / "own")("LlamaForCausalLM")
    assert not Cores(own, settings).loaded.uses_transformers


def test_a_model_that_pipeinfer_has_gives_the_same_tokens_by_transformers(tmp_path):
    folder = CheckpointCache(tmp_path)("Qwen3ForCausalLM")
    known = references(folder, [50, 9, 60])
    check(served(folder, known, SETTINGS), known)
