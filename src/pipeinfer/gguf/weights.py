"""Decodes slices of a GGUF file's tensors as float32, a few megabytes at a time.

- WeightFile: decodes.
- GgufTensor, model_tensors: the file's tensors under transformers' names, with what has to be
  undone in their values.

Imports no torch.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeinfer.gguf.config import Keys
from pipeinfer.gguf.header import BLOCKS, GgufHeader, TensorInfo

CHUNK_VALUES = 1 << 18  # values that are decoded at a time; as float32 they fit into a CPU's cache


class WeightFile:
    """The weights of one file, which is mapped. A tensor that was read is let go of, so that a
    process never counts a whole file as its memory; the kernel may keep it in its page cache."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as stream:
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        self._bytes = np.frombuffer(self._map, np.uint8)

    def pieces(
        self, packed: GgufTensor, slices: tuple[slice, ...]
    ) -> Iterator[tuple[slice, np.ndarray]]:
        """Decodes a part of a tensor, piece by piece.

        packed: a tensor of one or two dimensions.
        slices: the part, one slice for each dimension.

        Yields (rows, values): a slice of the part's first dimension, counted from the part's
        beginning, and float32 values.
        """
        columns, size = slices[-1], BLOCKS[packed.dtype][0]
        first, last = columns.start // size, -(-columns.stop // size)
        inner = slice(columns.start - first * size, columns.stop - first * size)
        if len(packed.shape) == 1:
            yield slice(0, columns.stop - columns.start), self._vector(packed)[columns]
            return
        blocks = self._blocks(packed)
        begin, end = slices[0].start, slices[0].stop
        step = max(CHUNK_VALUES // packed.shape[1], 1)
        for start in range(begin, end, step):
            stop = min(start + step, end)
            rows = blocks[_order(start, stop, packed)]
            values = decode(packed.dtype, rows[:, first:last].reshape(stop - start, -1))
            yield slice(start - begin, stop - begin), _plain(values[:, inner], packed)
        self._let_go(packed)

    def _let_go(self, packed: GgufTensor) -> None:
        begin = packed.offset // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, begin, packed.offset + packed.nbytes - begin)

    def _vector(self, packed: GgufTensor) -> np.ndarray:
        """A whole tensor of one dimension, which is small: float32 [values]."""
        values = decode(packed.dtype, self._blocks(packed).reshape(1, -1))[0]
        if packed.interleaved_heads:
            values = values[_order(0, len(values), packed)]
        return _plain(values, packed)

    def _blocks(self, packed: GgufTensor) -> np.ndarray:
        """A view of a tensor, uint8 [rows, blocks of a row, bytes of a block]."""
        raw = self._bytes[packed.offset : packed.offset + packed.nbytes]
        return raw.reshape(
            packed.shape[0] if len(packed.shape) > 1 else 1, -1, BLOCKS[packed.dtype][1]
        )


def _plain(values: np.ndarray, packed: GgufTensor) -> np.ndarray:
    return values - np.float32(packed.norm_offset) if packed.norm_offset else values


def _order(start: int, stop: int, packed: GgufTensor) -> np.ndarray | slice:
    """Rows of the file that are rows start .. stop - 1 of the tensor."""
    if not packed.interleaved_heads:
        return slice(start, stop)
    # The file has a head's rows in the order 0, half, 1, half + 1 ...: RoPE rotates neighbours.
    size = packed.shape[0] // packed.interleaved_heads
    rows = np.arange(start, stop)
    within = rows % size
    return rows - within + within % (size // 2) * 2 + within // (size // 2)


UNLAYERED = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
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
UNUSED = ("rope_freqs.weight",)  # part of the configuration, see gguf/config.py


@dataclass(frozen=True)
class GgufTensor:
    """A model's tensor in a GGUF file. The first four attributes are those of StoredTensor.

    file: where it is.
    dtype: the file's type, such as "Q4_K".
    shape: slowest dimension first.
    nbytes: its size.
    offset: in bytes from the file's beginning.
    interleaved_heads: heads whose rows the file has in RoPE's interleaved order; 0: rows are in the
        model's order.
    norm_offset: what was added to all values when the file was written, and is subtracted again.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int
    interleaved_heads: int = 0
    norm_offset: float = 0.0


def is_low_bit(header: GgufHeader) -> bool:
    """Whether all matrices but the routers of experts have a type of eight bits or less."""
    return all(
        tensor.type not in PLAIN
        for tensor in header.tensors.values()
        if len(tensor.shape) > 1 and "ffn_gate_inp" not in tensor.name
    )


def model_tensors(header: GgufHeader) -> dict[str, GgufTensor]:
    """All tensors by transformers' names. Tensors without one keep the file's name."""
    keys = Keys(header)
    return dict(pair for tensor in header.tensors.values() for pair in _named(header, keys, tensor))


def _named(header: GgufHeader, keys: Keys, tensor: TensorInfo) -> Iterator[tuple[str, GgufTensor]]:
    stem, _, kind = tensor.name.rpartition(".")
    if tensor.name in UNUSED:
        return
    if stem in UNLAYERED:
        yield f"{UNLAYERED[stem]}.{kind}", _packed(header, keys, tensor)
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
    """float32 [rows, values] of raw uint8 [rows, bytes of whole blocks].

    kind: the type, of BLOCKS.
    """
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    values = dequantize(raw, GGMLQuantizationType[kind])
    # For float32 tensors dequantize returns a read-only view of the file, so they are copied.
    return np.require(values, np.float32, "W")
