"""Random low-rank adapters of a dense shape, as PEFT stores them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pipeinfer import LoRARequest

STRENGTH = 0.01  # of random weights


def linear_layers(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """{name within a decoder layer: (inputs, outputs)} of all linear layers of config.json."""
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    return {
        "self_attn.q_proj": (hidden, heads * head_dim),
        "self_attn.k_proj": (hidden, kv_heads * head_dim),
        "self_attn.v_proj": (hidden, kv_heads * head_dim),
        "self_attn.o_proj": (heads * head_dim, hidden),
        "mlp.gate_proj": (hidden, intermediate),
        "mlp.up_proj": (hidden, intermediate),
        "mlp.down_proj": (intermediate, hidden),
    }


def write_adapter(folder: Path, config: Mapping[str, Any], rank: int, seed: int) -> Path:
    """An adapter of all linear layers of a dense model, with random weights in bfloat16."""
    folder.mkdir(parents=True)
    layers, generator = linear_layers(config), torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (inputs, outputs) in layers.items():
            for part, size in (("A", (rank, inputs)), ("B", (outputs, rank))):
                key = f"base_model.model.model.layers.{layer}.{name}.lora_{part}.weight"
                weights[key] = STRENGTH * torch.randn(size, generator=generator).bfloat16()
    save_file(weights, folder / "adapter_model.safetensors")
    fields = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": [name.rpartition(".")[2] for name in layers],
    }
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


def write_adapters(folder: Path, model: Path, count: int, rank: int) -> Sequence[LoRARequest]:
    """`count` of them in folders below `folder`, for the checkpoint in the folder `model`."""
    config = json.loads((model / "config.json").read_text())
    return [
        LoRARequest(f"adapter-{n}", n + 1, str(write_adapter(folder / str(n), config, rank, n)))
        for n in range(count)
    ]
