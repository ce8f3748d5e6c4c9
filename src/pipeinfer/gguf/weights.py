"""Decodes parts of a GGUF file's tensors as float32, a few megabytes at a time.

Knows how rows lie in the file and which slice of them is wanted; no model and no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeinfer.gguf.config import Keys
from pipeinfer.gguf.header import BLOCKS, GgufHeader, TensorInfo

PIECE = 1 << 20  # values that are decoded together; as float32 they fit into a CPU's cache


class WeightFile:
    """The weights of one file. Pages of it are mapped, and stay the kernel's."""

    def __init__(self, path: Path) -> None:
        self._bytes = np.memmap(path, np.uint8, "r")

    def pieces(
        self, packed: GgufTensor, slices: tuple[slice, ...]
    ) -> Iterator[tuple[slice, np.ndarray]]:
        """`slices` of a tensor of one or two dimensions: runs along the first dimension, counted
        from where these begin, with their values, float32."""
        columns, size = slices[-1], BLOCKS[packed.dtype][0]
        first, last = columns.start // size, -(-columns.stop // size)
        inner = slice(columns.start - first * size, columns.stop - first * size)
        if len(packed.shape) == 1:
            yield slice(0, columns.stop - columns.start), self._vector(packed)[columns]
            return
        blocks = self._blocks(packed)
        begin, end = slices[0].start, slices[0].stop
        step = max(PIECE // packed.shape[1], 1)
        for start in range(begin, end, step):
            stop = min(start + step, end)
            rows = blocks[_order(start, stop, packed)]
            values = decode(packed.dtype, rows[:, first:last].reshape(stop - start, -1))
            yield slice(start - begin, stop - begin), _plain(values[:, inner], packed)

    def _vector(self, packed: GgufTensor) -> np.ndarray:
        """A tensor of one dimension, whole: they are small."""
        values = decode(packed.dtype, self._blocks(packed).reshape(1, -1))[0]
        if packed.interleaved_heads:
            values = values[_order(0, len(values), packed)]
        return _plain(values, packed)

    def _blocks(self, packed: GgufTensor) -> np.ndarray:
        """uint8 [rows, blocks, bytes of a block], a view."""
        raw = self._bytes[packed.offset : packed.offset + packed.nbytes]
        return raw.reshape(
            packed.shape[0] if len(packed.shape) > 1 else 1, -1, BLOCKS[packed.dtype][1]
        )


def _plain(values: np.ndarray, packed: GgufTensor) -> np.ndarray:
    return values - np.float32(packed.norm_offset) if packed.norm_offset else values


def _order(start: int, stop: int, packed: GgufTensor) -> np.ndarray | slice:
    """Which rows of the file are rows start..stop of the tensor."""
    if not packed.interleaved_heads:
        return slice(start, stop)
    # A head's rows in the file: 0, half, 1, half + 1 ...; neighbours are rotated together.
    size = packed.shape[0] // packed.interleaved_heads
    rows = np.arange(start, stop)
    within = rows % size
    return rows - within + within % (size // 2) * 2 + within // (size // 2)


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


def is_low_bit(header: GgufHeader) -> bool:
    """Whether all matrices have eight bits a value or less, but the small ones that choose
    experts."""
    return all(
        tensor.type not in PLAIN
        for tensor in header.tensors.values()
        if len(tensor.shape) > 1 and "ffn_gate_inp" not in tensor.name
    )


def model_tensors(header: GgufHeader) -> dict[str, GgufTensor]:
    """All tensors by transformers' names, those it does not know by their own."""
    keys = Keys(header)
    return dict(pair for tensor in header.tensors.values() for pair in _named(header, keys, tensor))


def _named(header: GgufHeader, keys: Keys, tensor: TensorInfo) -> Iterator[tuple[str, GgufTensor]]:
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


def _packed(header: GgufHeader, keys: Keys, tensor: TensorInfo, part: str = "") -> GgufTensor:
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


def _expert(header: GgufHeader, tensor: TensorInfo, index: int) -> GgufTensor:
    share = tensor.nbytes // tensor.shape[0]
    offset = tensor.offset + index * share
    return GgufTensor(header.path, tensor.type, tensor.shape[1:], share, offset)


def decode(kind: str, raw: np.ndarray) -> np.ndarray:
    """uint8 [rows, bytes of whole blocks] to float32 [rows, values]."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    values = dequantize(raw, GGMLQuantizationType[kind])
    # What is stored as float32 comes as a view of the file, which nobody may write to.
    return np.require(values, np.float32, "W")
