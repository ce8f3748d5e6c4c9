"""The model of a GGUF file in the terms of other checkpoints: its configuration in the fields of
config.json, its tensors under transformers' names.

- `config_json`, `document`, `tokenizer`: the content of a folder's files. Every size is checked
  against a bound or against the file's own tensors before anything is allocated by it.
  checkpoint/config.py reads the fields.
- `GgufTensor`, `model_tensors`: the file's tensors under transformers' names, with the changes that
  have to be undone in their values.
- `WeightFile`: decodes slices of tensors as float32, a few megabytes at a time.

Imports no torch.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np

from pipeinfer.gguf.header import (
    BLOCKS,
    INT4_GROUP,
    INT4_TYPES,
    GgufHeader,
    Metadata,
    TensorInfo,
    quote,
    read_header,
)
from pipeinfer.gguf.tokenizer import MODEL, TokenType, load_tokenizer, tokenizer_config
from pipeinfer.params import JsonObject
from pipeinfer.settings import ConfigurationError

# The bound of all sizes but those in UPPER_BOUNDS. The product of three sizes, in bytes, fits into
# 64 bits.
LARGEST = 1 << 19
# Bounds in tokens. Tables of angles have such a length; the longest contexts today are 10 million.
UPPER_BOUNDS = {"context_length": 1 << 24, "rope.scaling.original_context_length": 1 << 24}
# Texts of control tokens that end a turn, for files that name only the token that ends a text.
# llama.cpp finds these tokens by their texts, too.
END_OF_TURN_TEXTS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<EOT>",
)
END_ID_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
LOCAL_BASE = 10_000.0  # theta of RoPE in Gemma 3's layers with a sliding window
PATTERN = 6  # each sixth layer of Gemma 3 has no sliding window
LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


class Keys:
    """The key-values of a model, without the architecture's name that their keys begin with.

    Attributes:
    - architecture: llama.cpp's name, such as "qwen3moe"

    All methods that read a value raise ConfigurationError, which names the key, for a wrong one.
    """

    def __init__(self, header: GgufHeader) -> None:
        self._header = header
        name = header.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise header.error("general.architecture is missing or no text")
        self.architecture = name

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive whole number, at most the bound in UPPER_BOUNDS, or LARGEST if there is none.

        - default: stands for a missing key; None: the key is required
        """
        value = self._header.metadata.get(f"{self.architecture}.{name}", default)
        most = UPPER_BOUNDS.get(name, LARGEST)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self._wrong(name, value, f"a whole number from 1 to {most:,}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive finite number.

        - default: stands for a missing key; None: the key is required
        """
        value = self._header.metadata.get(f"{self.architecture}.{name}", default)
        if isinstance(value, (bool, str, list)) or value is None or not 0 < value < math.inf:
            raise self._wrong(name, value, "a positive number")
        return float(value)

    def text(self, name: str, default: str) -> str:
        """The text of a key; `default` if the key is missing."""
        value = self._header.metadata.get(f"{self.architecture}.{name}", default)
        if not isinstance(value, str):
            raise self._wrong(name, value, "a text")
        return value

    def has(self, name: str) -> bool:
        """Whether the file has the key."""
        return f"{self.architecture}.{name}" in self._header.metadata

    @property
    def heads(self) -> int:
        return self.integer("attention.head_count")

    @property
    def kv_heads(self) -> int:
        return self.integer("attention.head_count_kv", self.heads)

    def _wrong(self, name: str, value: object, expected: str) -> Exception:
        found = "is missing" if value is None else f"must be {expected}, not {quote(str(value))}"
        return self._header.error(f"{quote(self.architecture)[1:-1]}.{name} {found}")


@dataclass(frozen=True)
class Architecture:
    """An architecture that can be read.

    Attributes:
    - name: in config.json
    - extra_fields: makes the fields of config.json that only this architecture has
    """

    name: str
    extra_fields: Callable[[GgufHeader, Keys], dict[str, object]]


def config_json(header: GgufHeader) -> dict[str, object]:
    """The fields of config.json. Raises ConfigurationError, which names the key, for missing, wrong
    or unsupported values.
    """
    keys = Keys(header)
    found = ARCHITECTURES.get(keys.architecture)
    if found is None:
        asked, known = quote(keys.architecture), ", ".join(ARCHITECTURES)
        raise header.error(f"unsupported architecture {asked}; supported: {known}")
    if header.metadata.get("split.count", 1) not in (0, 1):
        raise header.error("it is one part of several; llama-gguf-split --merge makes one file")
    layers, heads = keys.integer("block_count"), keys.heads
    hidden = keys.integer("embedding_length")
    if layers > len(header.tensors):
        raise header.error(f"block_count is {layers} with {len(header.tensors)} tensors")
    head_dim = _head_dim(header, keys, hidden, heads)
    context = keys.integer("context_length")
    return {
        "architectures": [found.name],
        "vocab_size": _vocab_size(header),
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_theta": keys.number("rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(header, keys, head_dim),
        "max_position_embeddings": context,
        "dtype": "bfloat16",  # used on GPUs; the range of float16 is too small for some models
        "eos_token_id": end_ids(header),
        **found.extra_fields(header, keys),
    }


def end_ids(header: GgufHeader) -> list[int]:
    """Ids of the tokens that end a request: the ends of a text, of a turn and of a message."""
    named = [header.metadata.get(f"tokenizer.ggml.{name}") for name in END_ID_KEYS]
    ids = [value for value in named if isinstance(value, int) and value >= 0]
    if named[1] is None:
        tokens, types = (header.metadata.get(f"tokenizer.ggml.{name}") for name in
                         ("tokens", "token_type"))  # fmt: skip
        if isinstance(tokens, list) and isinstance(types, list):
            both = zip(tokens, types, strict=False)
            ends = [(text, TokenType.CONTROL) for text in END_OF_TURN_TEXTS]
            ids += [at for at, token in enumerate(both) if token in ends]
    return list(dict.fromkeys(ids))


def _head_dim(header: GgufHeader, keys: Keys, hidden: int, heads: int) -> int:
    if hidden % heads and not keys.has("attention.key_length"):
        raise header.error(f"embedding_length {hidden} is not a multiple of {heads} heads")
    head_dim = keys.integer("attention.key_length", max(hidden // heads, 1))
    for name in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(name, head_dim) != head_dim:
            raise header.error(f"{name} {keys.integer(name)} is not the key length {head_dim}")
    return head_dim


def _vocab_size(header: GgufHeader) -> int:
    """The rows of the embedding; they may be more than the tokens."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise header.error("token_embd.weight is missing or no matrix")
    return embedding.shape[0]


def _rope_scaling(header: GgufHeader, keys: Keys, head_dim: int) -> dict[str, object] | None:
    kind = keys.text("rope.scaling.type", "none")
    if "rope_freqs.weight" in header.tensors:
        return _llama3(header, keys, head_dim)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise header.error(f"RoPE scaling {quote(kind)} is not supported, only linear and yarn")
    scaling: dict[str, object] = {"rope_type": kind, "factor": keys.number("rope.scaling.factor")}
    if kind == "yarn":
        name = "rope.scaling.original_context_length"
        scaling["original_max_position_embeddings"] = keys.integer(name)
    return scaling


def _llama3(header: GgufHeader, keys: Keys, head_dim: int) -> dict[str, object]:
    """The RoPE scaling of Llama 3.1 and later. The file has only `rope_freqs.weight`, the divisor
    of each frequency. The parameters in LLAMA3 are the same in all of these models; raises
    ConfigurationError if the divisors do not follow from them.
    """
    tensor = header.tensors["rope_freqs.weight"]
    if tensor.type != "F32" or tensor.shape != (head_dim // 2,):
        raise header.error(f"rope_freqs.weight is {tensor.type} {list(tensor.shape)}")
    raw = header.data[tensor.offset : tensor.offset + tensor.nbytes]
    stored = struct.unpack(f"<{len(raw) // 4}f", raw)
    base = keys.number("rope.freq_base", 10_000.0)
    factor = max(stored)
    if not 0 < factor < math.inf or not all(
        math.isclose(value, _divisor(base ** (-2 * at / head_dim), factor), rel_tol=1e-3)
        for at, value in enumerate(stored)
    ):
        raise header.error("rope_freqs.weight holds other factors than Llama 3's")
    return {"rope_type": "llama3", "factor": round(factor, 6), **LLAMA3}


def _divisor(frequency: float, factor: float) -> float:
    """The divisor of a frequency (radians a token) in Llama 3's RoPE scaling. Source: Llama 3.1's
    code.
    """
    waves = LLAMA3["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    blend = min(max((waves - low) / (high - low), 0.0), 1.0)
    return 1 / ((1 - blend) / factor + blend)


def _llama(header: GgufHeader, keys: Keys) -> dict[str, object]:
    if keys.has("expert_count") and keys.integer("expert_count", 1) > 1:
        raise header.error("mixtures of experts of the llama architecture are not supported")
    return {
        "attention_bias": "blk.0.attn_output.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in header.tensors,
    }


def _nothing(header: GgufHeader, keys: Keys) -> dict[str, object]:
    return {}


def _experts(header: GgufHeader, keys: Keys) -> dict[str, object]:
    number = keys.integer("expert_count")
    tensor = header.tensors.get("blk.0.ffn_gate_exps.weight")
    if tensor is None or tensor.shape[0] != number:
        raise header.error(f"expert_count {number} is not what blk.0.ffn_gate_exps.weight holds")
    return {
        "num_experts": number,
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,  # as in all checkpoints of the architecture, and in llama.cpp
    }


def _gemma3(header: GgufHeader, keys: Keys) -> dict[str, object]:
    layers, heads = keys.integer("block_count"), keys.heads
    head_dim = keys.integer("attention.key_length", 256)
    # Only the 27B model, which has 62 layers, scales queries by hidden size / heads.
    scalar = keys.integer("embedding_length") // heads if layers == 62 else head_dim
    return {
        "head_dim": head_dim,
        "query_pre_attn_scalar": scalar,
        "rope_theta": keys.number("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", LOCAL_BASE),
        "sliding_window": keys.integer("attention.sliding_window"),
        "sliding_window_pattern": keys.integer("attention.sliding_window_pattern", PATTERN),
    }


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", _llama),
    "qwen2": Architecture("Qwen2ForCausalLM", _nothing),
    "qwen3": Architecture("Qwen3ForCausalLM", _nothing),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", _experts),
    "gemma3": Architecture("Gemma3ForCausalLM", _gemma3),
}


if TYPE_CHECKING:
    from tokenizers import Tokenizer

Made = TypeVar("Made")


def document(path: Path, name: str) -> JsonObject | None:
    """The object in JSON file `name` of a checkpoint, made from the GGUF file at `path`; None: a
    GGUF file has nothing for that name.

    Raises ConfigurationError, in one line that names `path`.
    """
    make = DOCUMENTS.get(name)
    return None if make is None else cast(JsonObject | None, make(read_header(path)))


def tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer of the GGUF file at `path`; None: the file has no vocabulary. Raises
    ConfigurationError.
    """
    return _of_vocabulary(read_header(path), load_tokenizer)


def _tokenizer_config(header: GgufHeader) -> dict[str, object] | None:
    return _of_vocabulary(header, tokenizer_config)


def _of_vocabulary(header: GgufHeader, make: Callable[[Metadata], Made]) -> Made | None:
    if header.metadata.get(MODEL, "none") in ("none", "no_vocab"):
        return None
    try:
        return make(header.metadata)
    except ConfigurationError as error:
        text = str(error)
        raise error if str(header.path) in text else header.error(text) from None


DOCUMENTS: dict[str, Callable[[GgufHeader], dict[str, object] | None]] = {
    "config.json": config_json,
    "tokenizer_config.json": _tokenizer_config,
}


CHUNK_VALUES = 1 << 18  # values that are decoded at a time; as float32 they fit into a CPU's cache


class WeightFile:
    """The weights of one file, which is mapped. A tensor that was read is let go of, so that a
    process never counts a whole file as its memory; the kernel may keep it in its page cache."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as stream:
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        self._bytes = np.frombuffer(self._map, np.uint8)

    def pieces(
        self, packed: GgufTensor, slices: tuple[slice, ...], as_int4_blocks: bool = False
    ) -> Iterator[tuple[slice, np.ndarray]]:
        """Decodes a part of a tensor, piece by piece.

        - packed: a tensor of one or two dimensions
        - slices: the part, one slice for each dimension
        - as_int4_blocks: of a matrix whose type is one of INT4_TYPES, and whose columns begin and
          end between groups of INT4_GROUP

        Yields (rows, values): a slice of the part's first dimension, counted from the part's
        beginning, and float32 values, or what `int4_blocks` returns.
        """
        columns, size = slices[-1], BLOCKS[packed.dtype][0]
        first, last = columns.start // size, -(-columns.stop // size)
        inner = slice(columns.start - first * size, columns.stop - first * size)
        groups = slice(columns.start // INT4_GROUP, columns.stop // INT4_GROUP)
        if len(packed.shape) == 1:
            yield slice(0, columns.stop - columns.start), self._vector(packed)[columns]
            return
        blocks = self._blocks(packed)
        begin, end = slices[0].start, slices[0].stop
        step = max(CHUNK_VALUES // packed.shape[1], 1)
        for start in range(begin, end, step):
            stop = min(start + step, end)
            rows = blocks[_order(start, stop, packed)]
            if as_int4_blocks:
                found = int4_blocks(packed.dtype, rows)[:, groups]
            else:
                values = decode(packed.dtype, rows[:, first:last].reshape(stop - start, -1))
                found = _plain(values[:, inner], packed)
            yield slice(start - begin, stop - begin), found
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
UNUSED = ("rope_freqs.weight",)  # part of the configuration, see _llama3


@dataclass(frozen=True)
class GgufTensor:
    """A model's tensor in a GGUF file. The first four attributes are those of StoredTensor.

    Attributes:
    - file: the file with the tensor
    - dtype: the file's type, such as "Q4_K"
    - shape: slowest dimension first
    - nbytes: its size
    - offset: in bytes from the file's beginning
    - interleaved_heads: heads whose rows the file has in RoPE's interleaved order; 0: rows are in
      the model's order
    - norm_offset: number that was added to all values when the file was written, and is subtracted
      again
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


def int4_modules(header: GgufHeader) -> frozenset[str]:
    """The modules whose matrices have one of INT4_TYPES."""
    return frozenset(
        name.removesuffix(".weight")
        for name, tensor in model_tensors(header).items()
        if tensor.dtype in INT4_TYPES and len(tensor.shape) == 2
    )


def int4_blocks(kind: str, raw: np.ndarray) -> np.ndarray:
    """Returns uint8 [rows, groups, 24] of raw uint8 [rows, blocks, bytes of a block]: the same
    layout for all types.

    A group has the numbers n of 32 values, the first 16 in the lower bits of 16 bytes, the others
    in the upper ones, then a scale and a zero in float32: a value is (n - 8) * scale + zero.

    - kind: one of INT4_TYPES
    """
    rows = raw.shape[0]
    scale, zero, numbers = _INT4_PARTS[kind](raw)
    floats = np.stack((scale, zero), -1).astype(np.float32).view(np.uint8)
    shape = (rows, -1)
    return np.concatenate((numbers.reshape(*shape, 16), floats.reshape(*shape, 8)), -1)


def _halves(raw: np.ndarray, begin: int, end: int) -> list[np.ndarray]:
    """Returns float32 [..., 1] each, of float16 in bytes begin .. end - 1 of blocks [...,
    bytes].
    """
    halves = np.ascontiguousarray(raw[..., begin:end]).view(np.float16).astype(np.float32)
    return np.split(halves, halves.shape[-1], -1)


def _q4_0(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    (scale,) = _halves(raw, 0, 2)
    return scale, np.zeros_like(scale), raw[..., 2:]


def _q4_1(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    scale, least = _halves(raw, 0, 4)
    return scale, least + 8 * scale, raw[..., 4:]


def _q4_k(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Blocks of eight groups, whose scales have 6 bits: 32 bytes have the numbers of two groups."""
    from gguf.quants import Q4_K

    scale, least = _halves(raw, 0, 4)
    scales, leasts = Q4_K.get_scale_min(raw[..., 4:16].reshape(-1, 12))
    shape = (*raw.shape[:-1], 8)
    scale, least = scale * scales.reshape(shape), least * leasts.reshape(shape)
    pairs = raw[..., 16:].reshape(*raw.shape[:-1], 4, 1, 32)
    numbers = np.concatenate((pairs & 15, pairs >> 4), -2)
    return scale, 8 * scale - least, numbers[..., :16] | numbers[..., 16:] << 4


_INT4_PARTS = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k}


def decode(kind: str, raw: np.ndarray) -> np.ndarray:
    """Returns float32 [rows, values] of raw uint8 [rows, bytes of whole blocks].

    - kind: the type, of BLOCKS
    """
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    values = dequantize(raw, GGMLQuantizationType[kind])
    # For float32 tensors dequantize returns a read-only view of the file, so they are copied.
    return np.require(values, np.float32, "W")
