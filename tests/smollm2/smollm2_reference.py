"""The same model in transformers, from the same GGUF file, in float32.

Knows nothing of pipeinfer.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class Reference:
    """Greedy texts and log-likelihoods, as transformers gives them."""

    def __init__(self, file: Path) -> None:
        where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
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

    @torch.inference_mode()
    def likelihoods(self, ids: list[int]) -> torch.Tensor:
        """[len(ids) - 1]: the log-likelihood of each token but the first."""
        return chosen(self.model(torch.tensor([ids])).logits[0], ids)


def chosen(logits: torch.Tensor, ids: list[int]) -> torch.Tensor:
    """Log-likelihoods of ids[1:], from logits [len(ids), vocab] of every position."""
    targets = torch.tensor(ids[1:])
    return -torch.nn.functional.cross_entropy(logits[:-1], targets, reduction="none")
