"""What every process has to know of a checkpoint's model, whoever implements it.

Our own implementations go by a ModelConfig. Of what transformers is to build, only a few fields are
read here: what the others mean is transformers' business. Knows no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeinfer.checkpoint.architectures import ARCHITECTURES
from pipeinfer.checkpoint.config import ModelConfig, read_config, read_dtype
from pipeinfer.checkpoint.fields import Fields, read_json
from pipeinfer.checkpoint.quantization import read_quantization
from pipeinfer.gguf.filename import is_gguf
from pipeinfer.settings import ConfigurationError

# What configurations call the most tokens of a sequence.
CONTEXTS = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "max_seq_len")
DECODERS = ("ForCausalLM", "LMHeadModel")  # how transformers ends the names of decoders


@dataclass(frozen=True)
class ModelOutline:
    """own: what our own implementation goes by; None: transformers builds the model."""

    architecture: str
    vocab_size: int
    context_length: int
    dtype: str
    config: ModelConfig | None = None


def read_outline(checkpoint: Path, model_impl: str = "auto") -> ModelOutline:
    """`model_impl` as in Settings. Raises ConfigurationError in one line."""
    if model_impl == "transformers" and is_gguf(checkpoint):
        raise ConfigurationError(
            f"--model-impl transformers: {checkpoint} is a GGUF file, read by pipeinfer's own"
        )
    fields = read_json(checkpoint, "config.json")
    named = [str(name) for name in fields.raw.get("architectures") or []]
    have = any(name in ARCHITECTURES for name in named)
    foreign = [name for name in named if name.endswith(DECODERS)]
    if model_impl == "pipeinfer" or (model_impl == "auto" and have) or not foreign:
        return _own(read_config(checkpoint))
    return _foreign(fields, foreign[0])


def _own(config: ModelConfig) -> ModelOutline:
    return ModelOutline(
        config.architecture, config.vocab_size, config.context_length, config.dtype, config
    )


def _foreign(fields: Fields, architecture: str) -> ModelOutline:
    if read_quantization(fields) is not None:
        raise fields.error(
            f"quantization_config is not supported for {architecture}, which transformers builds"
        )
    context = next((name for name in CONTEXTS if fields.raw.get(name) is not None), CONTEXTS[0])
    return ModelOutline(
        architecture, fields.integer("vocab_size"), fields.integer(context), read_dtype(fields)
    )
