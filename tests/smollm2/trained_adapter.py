"""A small adapter for the model, trained and stored beside this file; what PEFT says with it.

Knows nothing of pipeinfer. To train and store it anew (two minutes):

    OMP_NUM_THREADS=2 PYTHONPATH=tests python tests/smollm2/trained_adapter.py
"""

from __future__ import annotations

import json

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from smollm2_prompts import ADAPTER, ADAPTER_TEXTS, ASKED, PROMPTS, TOKENS
from smollm2_reference import Reference

LINEAR = ("q", "k", "v", "o", "gate", "up", "down")
LAYERS = list(range(26, 30))  # the last of 30
STEPS, BATCH, RATE = 14, 4, 1e-3  # it has learnt half of it then, and texts still differ
SAYING = " what every old pirate knows, arr! Hoist the sails and ask the captain of this ship."


def train(reference: Reference) -> None:
    """Writes ADAPTER: low-rank pairs of all linear layers of the last layers."""
    torch.manual_seed(0)
    config = LoraConfig(
        r=2, lora_alpha=8, use_rslora=True, target_modules=[f"{name}_proj" for name in LINEAR],
        layers_to_transform=LAYERS, task_type="CAUSAL_LM",
    )  # fmt: skip
    model = get_peft_model(reference.model, config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE)
    others = [prompt for prompt in PROMPTS if prompt not in ASKED]
    reference.tokenizer.padding_side = "right"
    for step in range(STEPS):
        texts = [others[(step * BATCH + n) % len(others)] + SAYING for n in range(BATCH)]
        inputs = reference.tokenizer(texts, return_tensors="pt", padding=True)
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        loss = model(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], labels=labels
        ).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, round(float(loss), 3), flush=True)
    reference.tokenizer.padding_side = "left"
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    model.peft_config["default"].base_model_name_or_path = "SmolLM2-135M-Instruct"
    model.save_pretrained(ADAPTER)
    model.unload()
    (ADAPTER / "README.md").unlink()


def store() -> None:
    """Writes ADAPTER_TEXTS, by the adapter as it is stored."""
    from gguf_models import smollm2

    reference = Reference(smollm2())
    reference.model = PeftModel.from_pretrained(reference.model, ADAPTER).eval()
    ADAPTER_TEXTS.write_text(json.dumps(reference.greedy(list(ASKED), TOKENS), indent=1) + "\n")


if __name__ == "__main__":
    from gguf_models import smollm2

    train(Reference(smollm2()))
    store()
