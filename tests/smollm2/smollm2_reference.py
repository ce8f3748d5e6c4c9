"""The same model in transformers, from the same GGUF file, in float32; and what it once said.

Most of what transformers says takes it half a minute to say and never changes, so it is stored
beside this file; tests ask it again for a part. Knows nothing of pipeinfer. To store it anew, where
prompts or windows.txt have changed:

    OMP_NUM_THREADS=1 PYTHONPATH=tests python tests/smollm2/smollm2_reference.py
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import torch
from safetensors.torch import load_file, save_file
from smollm2_prompts import CONVERSATIONS, PROMPTS, TOKENS, TURN_TOKENS
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).parent
# Pieces of pages, with form feeds between, as docs/ once was: what rounding costs depends on the
# text as much as on what is rounded.
WINDOWS = (HERE / "windows.txt").read_text().split("\f")
TEXTS = HERE / "reference_texts.json"  # {"greedy": of PROMPTS, "conversations": of CONVERSATIONS}
LIKELIHOODS = HERE / "reference_likelihoods.safetensors"  # {str(window): float32 [tokens - 1]}


class Reference:
    """Greedy texts and log-likelihoods, as transformers gives them."""

    def __init__(self, file: Path) -> None:
        where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
        # Read anew for each question that transformers has, and the names for each tensor.
        once = {name: cache(getattr(gguf, name)) for name in ("GGUFReader", "get_tensor_name_map")}
        with mock.patch.multiple(gguf, **once):
            self.tokenizer = AutoTokenizer.from_pretrained(**where, padding_side="left")
            self.model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()

    def greedy(self, prompts: list[str], tokens: int) -> list[str]:
        """Continuations of the prompts, all of them in one batch."""
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True)
        length = inputs["input_ids"].shape[1]
        ids = self.model.generate(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"],
            do_sample=False, max_new_tokens=tokens,
        )  # fmt: skip
        return self.tokenizer.batch_decode(ids[:, length:], skip_special_tokens=True)

    def conversation(self, turns: tuple[str, ...], tokens: int) -> list[str]:
        """The answers, each of which is part of the next question."""
        messages: list[dict[str, str]] = []
        for turn in turns:
            messages.append({"role": "user", "content": turn})
            prompt = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            [answer] = self.greedy([prompt], tokens)
            messages.append({"role": "assistant", "content": answer})
        return [message["content"] for message in messages[1::2]]

    def windows(self) -> list[list[int]]:
        """Token ids of WINDOWS."""
        return [self.tokenizer(piece)["input_ids"] for piece in WINDOWS]

    @torch.inference_mode()
    def likelihoods(self, ids: list[int]) -> torch.Tensor:
        """[len(ids) - 1]: the log-likelihood of each token but the first."""
        return chosen(self.model(torch.tensor([ids])).logits[0], ids)


def chosen(logits: torch.Tensor, ids: list[int]) -> torch.Tensor:
    """Log-likelihoods of ids[1:], from logits [len(ids), vocab] of every position."""
    targets = torch.tensor(ids[1:])
    return -torch.nn.functional.cross_entropy(logits[:-1], targets, reduction="none")


def stored_texts() -> dict[str, Any]:
    """What Reference.greedy and Reference.conversation gave, see TEXTS."""
    return json.loads(TEXTS.read_text())


def stored_likelihoods() -> list[torch.Tensor]:
    """What Reference.likelihoods gave for each window."""
    stored = load_file(LIKELIHOODS)
    return [stored[str(number)] for number in range(len(stored))]


def store(reference: Reference) -> None:
    texts = {
        "greedy": reference.greedy(list(PROMPTS), TOKENS),
        "conversations": [reference.conversation(turns, TURN_TOKENS) for turns in CONVERSATIONS],
    }
    TEXTS.write_text(json.dumps(texts, indent=1) + "\n")
    found = {str(at): reference.likelihoods(ids) for at, ids in enumerate(reference.windows())}
    save_file(found, LIKELIHOODS)


if __name__ == "__main__":
    from gguf_models import smollm2

    store(Reference(smollm2()))
