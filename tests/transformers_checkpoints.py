"""Tiny random checkpoints of decoders that pipeinfer has no implementation of, by transformers.

Knows nothing of pipeinfer. Import it as `import transformers_checkpoints`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from checkpoints import VOCAB_SIZE, write_tokenizer

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": 258, "pad_token_id": 256,
}  # fmt: skip
WINDOW = 24
TYPES = ["sliding_attention", "full_attention"]
# What each has of its own is set to something that shows: scales, caps, windows, experts, biases.
SERVED: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.4, "use_qk_norm": True},
    "exaone4": {"sliding_window": WINDOW, "layer_types": TYPES},
    "gemma2": {
        "head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0,
    },
    "gpt2": {"n_inner": 96},
    "gpt_bigcode": {"multi_query": True},
    "gpt_neox": {"use_parallel_residual": True},
    "gpt_oss": {
        "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW,
    },
    "granite": {
        "attention_multiplier": 0.2, "logits_scaling": 3.0, "residual_multiplier": 0.7,
        "embedding_multiplier": 2.0,
    },
    "helium": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 32},
    "llama": {},
    "ministral": {"head_dim": 16, "sliding_window": WINDOW, "layer_types": TYPES},
    "nemotron": {},
    "olmo2": {},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 32},
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {"sliding_window": WINDOW},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layer_interval": 4},
    "stablelm": {"use_qkv_bias": True},
    "starcoder2": {"sliding_window": WINDOW},
}  # fmt: skip


def configuration(model_type: str, **overrides: Any) -> PreTrainedConfig:
    """A small one; `overrides` are fields of transformers' class."""
    fields = SMALL | SERVED.get(model_type, {}) | overrides
    return CONFIG_MAPPING[model_type](**fields)


def random_model(config: PreTrainedConfig, seed: int = 0) -> torch.nn.Module:
    """All its parameters are random, so that leaving one out shows."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, weight in model.named_parameters():
            one = weight.dim() == 1 and name.endswith("weight") and "gemma" not in config.model_type
            torch.nn.init.normal_(weight.data, float(one), 0.2)
    return model.eval()


def write_transformers_checkpoint(folder: Path, model_type: str, **overrides: Any) -> Path:
    """A checkpoint with a tokenizer; returns the folder."""
    random_model(configuration(model_type, **overrides)).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_configuration(folder: Path, model_type: str, architecture: str, **overrides: Any) -> Path:
    """config.json alone: no weights, which nobody reads of what is refused."""
    config = configuration(model_type, **overrides)
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return folder
