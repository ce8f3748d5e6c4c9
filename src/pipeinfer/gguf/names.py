"""Where in a GGUF file a checkpoint's tensor lies, under the name that transformers gives it.

Three things differ beside the names: llama.cpp rotates neighbouring values of a Llama head where
transformers rotates its halves, so rows of queries and keys stand in another order; Gemma's norms
are stored with their one added; and all experts of a layer are one tensor. Reads no weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeinfer.gguf.header import Header, TensorInfo
from pipeinfer.gguf.hyperparameters import Keys

WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
SANDWICH = PARTS | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
PLAIN = ("F32", "F16", "BF16", "F64")
UNUSED = ("rope_freqs.weight",)  # read as a configuration, see hyperparameters.py


@dataclass(frozen=True)
class GgufTensor:
    """A checkpoint's tensor in a GGUF file, in the fields of a stored tensor and three more.

    dtype: its type there. offset: in bytes, from the file's begin. turned_heads: of how many heads
    the rows stand in the order of neighbours; 0: as they shall. added: what was added to all
    values.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int
    interleaved_heads: int = 0
    norm_offset: float = 0.0


def few_bits(header: Header) -> bool:
    """Whether all matrices have eight bits a value or less, but the small ones that choose
    experts."""
    return all(
        tensor.type not in PLAIN
        for tensor in header.tensors.values()
        if len(tensor.shape) > 1 and "ffn_gate_inp" not in tensor.name
    )


def model_tensors(header: Header) -> dict[str, GgufTensor]:
    """All tensors by transformers' names, those it does not know by their own."""
    keys = Keys(header)
    return dict(pair for tensor in header.tensors.values() for pair in _named(header, keys, tensor))


def _named(header: Header, keys: Keys, tensor: TensorInfo) -> Iterator[tuple[str, GgufTensor]]:
    stem, _, kind = tensor.name.rpartition(".")
    if tensor.name in UNUSED:
        return
    if stem in WHOLE:
        yield f"{WHOLE[stem]}.{kind}", _packed(header, keys, tensor)
    elif (found := LAYER.fullmatch(tensor.name)) is None:
        yield tensor.name, _packed(header, keys, tensor)
    else:
        layer, part = f"model.layers.{int(found[1])}", found[2]
        parts = SANDWICH if keys.architecture == "gemma3" else PARTS
        if part in EXPERTS and len(tensor.shape) == 3:
            for index in range(tensor.shape[0]):
                name = f"{layer}.mlp.experts.{index}.{EXPERTS[part]}.{kind}"
                yield name, _expert(header, tensor, index)
        else:
            name = f"{layer}.{parts.get(part, part)}.{kind}"
            yield name, _packed(header, keys, tensor, part)


def _packed(header: Header, keys: Keys, tensor: TensorInfo, part: str = "") -> GgufTensor:
    heads = 0
    if keys.architecture == "llama" and part in ("attn_q", "attn_k"):
        heads = keys.heads if part == "attn_q" else keys.kv_heads
        if tensor.shape[0] % (2 * heads):
            raise header.error(f"{tensor.name} has {tensor.shape[0]} rows for {heads} heads")
    shifted = keys.architecture == "gemma3" and tensor.name.endswith("norm.weight")
    return GgufTensor(
        header.path,
        tensor.type,
        tensor.shape,
        tensor.nbytes,
        tensor.offset,
        heads,
        1.0 if shifted else 0.0,
    )


def _expert(header: Header, tensor: TensorInfo, index: int) -> GgufTensor:
    share = tensor.nbytes // tensor.shape[0]
    offset = tensor.offset + index * share
    return GgufTensor(header.path, tensor.type, tensor.shape[1:], share, offset)
