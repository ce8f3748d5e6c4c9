"""Fixtures of the tests that need a GPU; run them with `pytest -o addopts= tests/gpu`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "parity")]

from checkpoints import CheckpointCache  # noqa: E402

MIXTURES = ("Glm4MoeForCausalLM", "GptOssForCausalLM", "MixtralForCausalLM", "Qwen2MoeForCausalLM")


def pytest_collection_modifyitems(items):
    """GPU_PART=2/4: of four processes that share the tests the second, counted from 0."""
    if "GPU_PART" in os.environ:
        part, of = map(int, os.environ["GPU_PART"].split("/"))
        items[:] = items[part::of]


@pytest.fixture(scope="session")
def gpu_checkpoints(tmp_path_factory):
    """Random checkpoints by architecture and overrides, in bfloat16, with heads GPUs have."""
    cache = CheckpointCache(tmp_path_factory.mktemp("checkpoints"))

    def make(architecture, head_dim=128, **overrides):
        sizes = {
            "hidden_size": 512,
            "intermediate_size": 768,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 1024,
            "head_dim": head_dim,
            "max_position_embeddings": 1024,
            "initializer_range": 0.02,  # transformers' own default
        }
        if architecture == "Qwen3MoeForCausalLM":
            sizes |= {"moe_intermediate_size": 256, "num_experts": 16, "num_experts_per_tok": 4}
            sizes |= {"router_gain": 8.0}
        if architecture in MIXTURES:
            sizes |= {"intermediate_size": 256, "router_gain": 8.0}
        if architecture == "Gemma3ForCausalLM":
            kinds = ["sliding_attention", "full_attention", "sliding_attention"]
            sizes |= {"layer_types": kinds, "sliding_window": 100}
            sizes |= {"query_pre_attn_scalar": head_dim}
        return cache(architecture, dtype=torch.bfloat16, tokenizer=False, **(sizes | overrides))

    return make
