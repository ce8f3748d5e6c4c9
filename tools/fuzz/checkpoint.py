"""Checkpoints with a damaged or hostile header of their safetensors file, or quantization_config.

An input is the two JSON texts and the length of the data behind the header. The rest of the
checkpoint is a small model that fits. Only ConfigurationError comes out, in one line and soon, and
memory stays in relation to the files.
"""

from __future__ import annotations

import json
import os
import resource
import struct
import tempfile
import time
from math import prod
from pathlib import Path
from random import Random
from typing import Any

from fuzz import inputs
from fuzz.engines import Wrong
from pipeinfer.checkpoint.config import read_config
from pipeinfer.checkpoint.files import SINGLE, SIZES
from pipeinfer.models.loading import build_model, check_checkpoint, load_weights
from pipeinfer.settings import ConfigurationError

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 16, "hidden_size": 64,
    "intermediate_size": 64, "moe_intermediate_size": 32, "num_experts": 2,
    "num_experts_per_tok": 1, "num_hidden_layers": 2, "mlp_only_layers": [1],
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "max_position_embeddings": 64, "torch_dtype": "float32",
}  # fmt: skip
SCHEME = {"targets": ["Linear"], "input_activations": None}
FLOAT = {"type": "float", "num_bits": 8, "strategy": "channel", "symmetric": True}
WHOLE = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}
KNOWN: list[Any] = [
    None,
    {"quant_method": "fp8", "weight_block_size": [32, 32], "modules_to_not_convert": ["lm_head"]},
    {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
    {"quant_method": "compressed-tensors", "format": "float-quantized",
     "config_groups": {"group_0": SCHEME | {"weights": FLOAT}},
     "ignore": ["lm_head", "re:.*\\.1\\.mlp.*"]},
    {"quant_method": "compressed-tensors", "format": "pack-quantized",
     "config_groups": {"group_0": SCHEME | {"weights": WHOLE}}, "ignore": ["model.layers.*.mlp"]},
]  # fmt: skip
MOST_DATA = 1 << 22
MOST_SECONDS = 2.0
GROWTH, TIMES = 64 << 20, 64  # bytes of memory for an input, and for each of its bytes


def make() -> Checkpoint:
    """The target."""
    return Checkpoint()


class Checkpoint:
    """See Target."""

    instrumented = (
        "pipeinfer.checkpoint.quantization", "pipeinfer.checkpoint.files",
        "pipeinfer.checkpoint.files", "pipeinfer.models.loading",
    )  # fmt: skip

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pipeinfer-fuzz-")
        self._path = Path(self._folder.name)

    def seeds(self) -> list[bytes]:
        """A checkpoint that fits, for each format."""
        return [self._fitting(how) for how in KNOWN]

    def _fitting(self, how: Any) -> bytes:
        self._write_config(json.dumps(how).encode())
        config = read_config(self._path)
        header: dict[str, Any] = {}
        end = 0
        for source in build_model(config, device="meta").sources():
            dtype = source.stored_dtypes[0] if source.stored_dtypes else "F32"
            size = prod(source.shape) * SIZES[dtype]
            header[source.name] = {
                "dtype": dtype, "shape": list(source.shape), "data_offsets": [end, end + size],
            }  # fmt: skip
            end += size
        return _input(how, header, end)

    def mutated(self, data: bytes, source: Random) -> bytes:
        """Another value in one of the texts, other bytes there, or another length."""
        pieces = _three(data)
        at = source.randrange(8)
        if at == 0:
            length = int.from_bytes(pieces[2][:4], "big") + source.choice((-4, -1, 1, 64))
            pieces[2] = (length % (1 << 32)).to_bytes(4, "big")
        elif at == 1:
            pieces[source.randrange(2)] = inputs.mutated_bytes(pieces[source.randrange(2)], source)
        else:
            pieces[at % 2] = _other_values(pieces[at % 2], source)
        return inputs.joined(pieces)

    def one(self, data: bytes) -> None:
        """Loads the checkpoint as an engine does."""
        how, header, length = _three(data)
        self._write_config(how)
        size = min(int.from_bytes(length[:4], "big"), MOST_DATA)
        file = self._path / SINGLE
        file.write_bytes(struct.pack("<Q", len(header)) + header)
        os.truncate(file, 8 + len(header) + size)
        before, begun = _resident(), time.thread_time()
        try:
            config = read_config(self._path)
            config, stored = check_checkpoint(self._path, config)
            load_weights(build_model(config), self._path, tensors=stored)
        except ConfigurationError as error:
            if not str(error).strip() or "\n" in str(error).strip():
                raise Wrong("an error that is not one line") from None
        taken, grown = time.thread_time() - begun, _resident() - before
        if taken > MOST_SECONDS:
            raise Wrong(f"a checkpoint of {len(data)} bytes took {taken:.1f} s")
        if grown > GROWTH + TIMES * (len(data) + size):
            raise Wrong(f"a checkpoint of {len(data)} bytes took {grown >> 20} MiB")

    def _write_config(self, how: bytes) -> None:
        """With `how` as it is: it need not be JSON."""
        text = json.dumps(CONFIG)[:-1].encode()
        (self._path / "config.json").write_bytes(
            text + b', "quantization_config": ' + how + b"}" if how else text + b"}"
        )

    def close(self) -> None:
        """Removes the files."""
        self._folder.cleanup()


def _resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _three(data: bytes) -> list[bytes]:
    return [*inputs.parts(data), b"", b"", b""][:3]


def _input(how: Any, header: Any, length: int) -> bytes:
    texts = (json.dumps(how).encode(), json.dumps(header).encode())
    return inputs.joined([*texts, length.to_bytes(4, "big")])


def _other_values(text: bytes, source: Random) -> bytes:
    try:
        value = json.loads(text)
        return json.dumps(inputs.mutated_value(value, source, _raw)).encode()
    except (ValueError, TypeError, OverflowError, RecursionError):
        return inputs.mutated_bytes(text, source)


def _raw(source: Random) -> Any:
    """What formats are made of, and what would take long or much."""
    name = source.choice(("(a+)+$", "re:(.*)*x", "re:.*.*.*.*x", "re:[", "*" * 40, "../x"))
    size = source.choice((2**62, 10**30, 4096, 128, 8, 0))
    return source.choice((name, size, [size, size], [name] * 200, {"group_1": name}, [[[]]] * 3))
