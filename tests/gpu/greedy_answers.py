"""Servers of a small model on a GPU, and their greedy answers with log-probs; for tests."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

sys.path.append(str(Path(__file__).parents[2] / "tools"))  # what serves a test is there
from bench.shapes import write_tokenizer


def settings_of_small_model(
    checkpoints: Callable[[str], Path], tmp_path: Path, **others: Any
) -> dict[str, Any]:
    """Settings of a server; checkpoints: see gpu_checkpoints."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoints("Qwen3ForCausalLM"), folder)
    write_tokenizer(folder, 1024)
    return {"model": str(folder), "device": "cuda", **others}


async def ask(
    api: aiohttp.ClientSession, model: str, prompt: list[int], tokens: int = 8
) -> tuple[str, dict[str, Any], int]:
    """The text, its log-probs, and how many tokens of the prompt were cached."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "logprobs": 3}
    body |= {"temperature": 0.0, "ignore_eos": True}
    async with api.post("/v1/completions", json=body) as answer:
        found = await answer.json()
        assert answer.status == 200, found
    choice, details = found["choices"][0], found["usage"].get("prompt_tokens_details") or {}
    return choice["text"], choice["logprobs"], details.get("cached_tokens", 0)
