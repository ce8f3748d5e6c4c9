"""Random adapters that PEFT writes, and the logits that PEFT gives with them.

Knows nothing of pipeinfer. Import it as `import adapter_files`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from checkpoints import load_reference, make_checkpoint

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def checkpoint_with_adapters(root: Path, architecture: str) -> dict[str, Path]:
    """Folders in `root` by their names: "model", a small checkpoint, and its random adapters "one",
    "two" and "three", of ranks 4, 6 and 8."""
    model = make_checkpoint(root / "model", architecture)
    reference = load_reference(model)
    for seed, name in enumerate(("one", "two", "three")):
        write_adapter(root / name, reference, seed, r=4 + 2 * seed)
    return {path.name: path for path in root.iterdir()}


def write_adapter(
    folder: Path, model: PreTrainedModel, seed: int, strength: float = 0.3, **options: Any
) -> Path:
    """A random adapter of `model`, which is as before then; `options` are fields of LoraConfig."""
    fields: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": LINEAR} | options
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted = get_peft_model(model, LoraConfig(**fields))
        for name, weight in adapted.named_parameters():
            if ".lora_" in name:
                torch.nn.init.normal_(weight.data, 0.0, strength)
    adapted.save_pretrained(str(folder))
    adapted.unload()
    return folder


@torch.inference_mode()
def peft_logits(model: PreTrainedModel, folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """[T, vocab] of the sequence `tokens` [T]; `model` is as before then."""
    adapted = PeftModel.from_pretrained(model, str(folder)).eval()
    logits = cast(torch.Tensor, adapted(tokens[None]).logits[0]).clone()
    adapted.unload()
    return logits
