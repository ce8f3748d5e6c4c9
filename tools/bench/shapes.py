"""Shapes of models to measure with random weights, as config.json files, and a tokenizer to match.

Knows file formats only; no torch.
"""

from __future__ import annotations

import argparse
import json
import random
import string
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pipeinfer.checkpoint.config import read_outline
from pipeinfer.checkpoint.source import resolve_model
from pipeinfer.settings import ConfigurationError

HIGHEST_ID = 10_000  # of prompts, as other servers' benchmarks draw them
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
SHAPES: dict[str, dict[str, Any]] = {
    # 100.1 million parameters
    "llama-100m": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 32_000,
        "hidden_size": 768,
        "intermediate_size": 2_048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 2_048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    },
    "qwen3-0.6b": QWEN3 | {
        "hidden_size": 1_024, "intermediate_size": 3_072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "tie_word_embeddings": True,
    },
    "qwen3-14b": QWEN3 | {
        "hidden_size": 5_120, "intermediate_size": 17_408, "num_hidden_layers": 40,
        "num_attention_heads": 40,
    },
    "qwen3-30b-a3b": QWEN3 | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
        "hidden_size": 2_048, "intermediate_size": 6_144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
    "qwen3-32b": QWEN3 | {
        "hidden_size": 5_120, "intermediate_size": 25_600, "num_hidden_layers": 64,
        "num_attention_heads": 64,
    },
}  # fmt: skip


def shape(name: str) -> dict[str, Any]:
    """The config.json of a shape's name, or of a file; ConfigurationError if there is neither."""
    if name in SHAPES:
        return SHAPES[name]
    path = Path(name)
    if not path.is_file():
        raise ConfigurationError(f"--config {name}: no such file; shapes: {', '.join(SHAPES)}")
    return json.loads(path.read_text())


def add_config(parser: argparse.ArgumentParser) -> None:
    """The flag --config, for `settings_of`."""
    text = f"random weights: {', '.join(SHAPES)} or a file"
    parser.add_argument("--config", metavar="SHAPE", help=text)


@contextmanager
def settings_of(config: str | None, settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """`settings`; with the shape `config` those of a folder of that shape, which goes at the end,
    and of random weights. `speculate` may also be a shape then."""
    if not config:
        yield dict(settings)
        return
    with tempfile.TemporaryDirectory(prefix="pipeinfer-bench-") as folder:
        model, draft = Path(folder, "model"), Path(folder, "draft")
        chosen = {
            "load_format": "dummy",
            **settings,
            "model": str(write_folder(model, shape(config))),
        }
        if settings.get("speculate") in SHAPES:
            chosen["speculate"] = str(write_folder(draft, shape(settings["speculate"])))
        yield chosen


def write_folder(folder: Path, config: dict[str, Any]) -> Path:
    """A checkpoint's folder without weights, for `--load-format dummy`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    write_tokenizer(folder, config["vocab_size"])
    return folder


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Writes make_tokenizer's tokenizer.json and its tokenizer_config.json into `folder`."""
    make_tokenizer(vocab_size).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """Byte-level tokens: the 256 bytes, then made-up words; their text costs what real text does.

    Prompts are token ids, so there are no merges: text would be encoded byte by byte.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = dict.fromkeys(alphabet)
    source = random.Random(0)
    while len(words) < vocab_size:
        word = "".join(source.choices(string.ascii_lowercase, k=source.randint(2, 7)))
        words[source.choice(["Ġ", ""]) + word] = None  # Ġ is the byte-level alphabet's space
    vocabulary = {word: index for index, word in enumerate(list(words)[:vocab_size])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def highest_id(settings: Mapping[str, Any]) -> int:
    """The highest token id of the prompts that are drawn for a server with these settings."""
    folder = resolve_model(settings.get("model", ""))
    return min(HIGHEST_ID, read_outline(folder).vocab_size - 1)
