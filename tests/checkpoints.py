"""Tiny random checkpoints, written by transformers, for any test that needs a real model on disk.

Knows nothing of pipeinfer: what it writes is what `save_pretrained` writes, with a byte-level
tokenizer and a ChatML template beside it. Import it as `import checkpoints`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

ARCHITECTURES = {
    "Gemma3ForCausalLM": "gemma3_text",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
# Put together from what those are made of, so what lies above models is tested with those alone.
MORE_ARCHITECTURES = {
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4_moe",
    "GlmForCausalLM": "glm",
    "GptOssForCausalLM": "gpt_oss",
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen2_moe",
}
ALL_ARCHITECTURES = ARCHITECTURES | MORE_ARCHITECTURES
VOCAB_SIZE = 264
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 256, 257, 258
EOS_IDS = (258, 256)
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 258,
    "pad_token_id": 256,
}
# A full layer behind five with a window, then one more of the latter; prompts outgrow the window.
SMALL_GEMMA: dict[str, Any] = {
    "num_hidden_layers": 7,
    "sliding_window": 24,
    "query_pre_attn_scalar": 24,
}
SMALL_MOE: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
FURTHER: dict[str, dict[str, Any]] = {
    "qwen3_moe": SMALL_MOE,
    "gemma3_text": SMALL_GEMMA,
    "glm4_moe": {
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "attention_bias": True,
        "use_qk_norm": True,
    },
    "gpt_oss": {
        "intermediate_size": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "sliding_window": 24,
        "swiglu_limit": 2.0,  # so that it matters
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "truncate": False,
        },
    },
    "qwen2_moe": SMALL_MOE | {"shared_expert_intermediate_size": 48, "norm_topk_prob": False},
    "mixtral": {"intermediate_size": 32},
}


def make_checkpoint(
    folder: Path,
    architecture: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str | int = "5GB",
    tokenizer: bool = True,
    router_gain: float = 1.0,
    poison: int | None = None,
    merged: bool = False,
    **overrides: Any,
) -> Path:
    """Writes a random checkpoint of `architecture` into `folder` and returns the folder.

    `router_gain` scales the routers of experts: trained ones are decisive, random ones choose at
    near ties, where any rounding takes other experts. `overrides` are fields of the transformers
    configuration (rope_parameters, sliding_window ...). Norm weights and biases are random too, so
    that leaving one out shows. `poison`: whoever has that token id gets logits that are NaN.
    `merged`: all experts of a layer as one tensor, as transformers 5 has them in memory.
    """
    model = _random_model(architecture, seed, dtype, router_gain, overrides)
    if poison is not None:
        model.get_input_embeddings().weight.data[poison] = float("nan")
    model.save_pretrained(folder, max_shard_size=max_shard_size, save_original_format=not merged)
    generation = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "eos_token_id": [*EOS_IDS]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    if tokenizer:
        write_tokenizer(folder)
    return folder


def _random_model(
    architecture: str,
    seed: int,
    dtype: torch.dtype,
    router_gain: float,
    overrides: dict[str, Any],
) -> PreTrainedModel:
    model_type = ALL_ARCHITECTURES[architecture]
    fields = SMALL | FURTHER.get(model_type, {}) | overrides
    norms = 0.0 if model_type == "gemma3_text" else 1.0  # it has one plus its weights
    config = CONFIG_MAPPING[model_type](**fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, weight in model.named_parameters():
            if weight.dim() == 1 or name.endswith("_bias"):
                torch.nn.init.normal_(weight.data, norms if "norm" in name else 0.0, 0.2)
            elif name.endswith(("mlp.gate.weight", "mlp.router.weight")):
                weight.data *= router_gain
        for name, values in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                torch.nn.init.normal_(values, 0.0, 0.2)
    model.generation_config = GenerationConfig(eos_token_id=[*EOS_IDS])
    return model.to(dtype).eval()


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer (id n is byte n in the GPT-2 alphabet's order) with ChatML tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


class CheckpointCache:
    """Makes each checkpoint once: `cache("Qwen3ForCausalLM", tie_word_embeddings=True)`.

    Wrap it in a session fixture: `CheckpointCache(tmp_path_factory.mktemp("checkpoints"))`. The
    folders are shared, so a test that changes a checkpoint copies it first.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[str, Path] = {}

    def __call__(self, architecture: str = "Qwen3ForCausalLM", **overrides: Any) -> Path:
        key = repr((architecture, sorted(overrides.items(), key=lambda item: item[0])))
        if key not in self._made:
            folder = self._root / f"{architecture}-{len(self._made)}"
            self._made[key] = make_checkpoint(folder, architecture, **overrides)
        return self._made[key]


def load_reference(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The checkpoint in transformers, with its eager attention."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model.eval()
