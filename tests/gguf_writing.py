"""Writes a checkpoint folder's weights and configuration as a GGUF file, as llama.cpp's converter
lays them out: Llama's queries and keys in the order of neighbours, Gemma's norms with their one,
experts stacked.

Knows nothing of pipeinfer; the gguf package writes. Import it as `import gguf_writing`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, quants
from safetensors.numpy import load_file

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
GEMMA = NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
KINDS = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Gemma3ForCausalLM": "gemma3",
}
MERGE = ("\u0100", "\u0101")  # of the bytes 0 and 1: the form wants one, and no text has it
EXPERT = re.compile(r"(model\.layers\.\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")


def write_gguf(
    folder: Path,
    path: Path,
    kind: str = "F32",
    beside: dict[str, np.ndarray] | None = None,
    **more: Any,
) -> Path:
    """The checkpoint in `folder` (one safetensors file, tests/checkpoints.py's tokenizer) as GGUF.

    kind: type of the matrices whose rows are whole blocks of it; all else is F32. beside: further
    tensors. more: key-values beside or instead of the usual ones, without the architecture's
    prefix where they begin with a dot; None leaves one out.
    """
    config = json.loads((folder / "config.json").read_text())
    arch = KINDS[config["architectures"][0]]
    writer = gguf.GGUFWriter(path, arch)
    pairs = hyperparameters(config, arch) | tokenizer(folder)
    for key, value in (pairs | more).items():
        if value is not None:
            add(writer, arch + key if key.startswith(".") else key, value)
    for name, values in (tensors(folder, config, arch) | (beside or {})).items():
        add_tensor(writer, name, values, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """One key-value, its type by Python's."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: str) -> None:
    """In type `kind` if it is a matrix of whole blocks."""
    chosen = GGMLQuantizationType[kind]
    block = gguf.GGML_QUANT_SIZES[chosen][0]
    if values.ndim < 2 or values.shape[-1] % block or kind == "F32":
        writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))
    elif kind == "F16":
        writer.add_tensor(name, values.astype(np.float16))
    else:
        writer.add_tensor(name, quants.quantize(values, chosen), raw_dtype=chosen)


def hyperparameters(config: dict[str, Any], arch: str) -> dict[str, Any]:
    """Of the architecture, their keys without its name."""
    rope = config.get("rope_parameters") or {}
    theta = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
    pairs = {
        ".block_count": config["num_hidden_layers"],
        ".context_length": config["max_position_embeddings"],
        ".embedding_length": config["hidden_size"],
        ".feed_forward_length": config["intermediate_size"],
        ".attention.head_count": config["num_attention_heads"],
        ".attention.head_count_kv": config["num_key_value_heads"],
        ".attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        ".attention.key_length": config["head_dim"],
        ".attention.value_length": config["head_dim"],
        ".rope.freq_base": float(theta),
    }
    if arch == "qwen3moe":
        pairs |= {
            ".expert_count": config.get("num_experts") or config["num_local_experts"],
            ".expert_used_count": config["num_experts_per_tok"],
            ".expert_feed_forward_length": config["moe_intermediate_size"],
        }
    if arch == "gemma3":
        pairs[".attention.sliding_window"] = config["sliding_window"]
        pairs[".rope.freq_base"] = float(rope["full_attention"]["rope_theta"])
    return pairs


def tokenizer(folder: Path) -> dict[str, Any]:
    """Byte-level BPE with control tokens, and the chat template."""
    written = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    control = {token["content"]: token["id"] for token in written["added_tokens"]}
    ids = written["model"]["vocab"] | control
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    ids["".join(MERGE)] = len(ids)
    texts = {number: text for text, number in ids.items()}
    tokens = [texts.get(number, f"[PAD{number}]") for number in range(vocab)]
    types = [
        3 if text in control else 1 if number in texts else 5 for number, text in enumerate(tokens)
    ]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(MERGE)],
        "tokenizer.ggml.eos_token_id": control[settings["eos_token"]],
        "tokenizer.ggml.padding_token_id": control[settings["pad_token"]],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": settings["chat_template"],
    }


def tensors(folder: Path, config: dict[str, Any], arch: str) -> dict[str, np.ndarray]:
    """All of them under llama.cpp's names, float32."""
    named: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, values in load_file(folder / "model.safetensors").items():
        found = EXPERT.fullmatch(name)
        if found is not None:
            stack = f"{found[1].replace('model.layers', 'blk')}.ffn_{found[3]}_exps.weight"
            experts.setdefault(stack, {})[int(found[2])] = values
        else:
            named[_renamed(name, arch)] = _laid_out(name, values, config, arch)
    for name, stack in experts.items():
        named[name] = np.stack([stack[number] for number in sorted(stack)])
    return named


def _renamed(name: str, arch: str) -> str:
    stem, _, kind = name.rpartition(".")
    names = GEMMA if arch == "gemma3" else NAMES
    if stem in names:
        return f"{names[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{names[part]}.{kind}"


def _laid_out(name: str, values: np.ndarray, config: dict[str, Any], arch: str) -> np.ndarray:
    if arch == "gemma3" and name.endswith("norm.weight"):
        return values + 1
    if arch == "llama" and ("q_proj" in name or "k_proj" in name):
        query = "q_proj" in name
        heads = config["num_attention_heads" if query else "num_key_value_heads"]
        halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        return halves.swapaxes(1, 2).reshape(values.shape)
    return values
