"""Reads a checkpoint's tokenizer files: tokenizer.json and the JSON files beside it.

Gives the same ids as the tokenizer that transformers would load from the folder, without importing
it. Knows no request and no template.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from pipeinfer.gguf.documents import tokenizer as gguf_tokenizer
from pipeinfer.gguf.filename import is_gguf
from pipeinfer.json_values import JsonObject
from pipeinfer.settings import ConfigurationError
from pipeinfer.text.added import TokenFlags, special_tokens, tokens_by_files

__all__ = ["load_tokenizer", "special_tokens"]


def load_tokenizer(folder: Path, config: JsonObject) -> Tokenizer | None:
    """The tokenizer of a checkpoint, or None where there is no tokenizer.json.

    `config`: what `read_tokenizer_config` gave; of `add_bos_token` and `add_eos_token` there,
    tokenizer.json knows better. Raises ConfigurationError for a broken file.
    """
    tokenizer = _read(folder)
    if tokenizer is None:
        return None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _add_tokens(tokenizer, folder, config)
    return tokenizer


def _read(folder: Path) -> Tokenizer | None:
    if is_gguf(folder):
        return gguf_tokenizer(folder)
    path = folder / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path)) if path.exists() else None
    except Exception as error:  # the library raises bare Exception
        raise ConfigurationError(f"cannot read {path}: {error}") from None


def _add_tokens(tokenizer: Tokenizer, folder: Path, config: JsonObject) -> None:
    """Tokens that only other files know, and the flags that they say of those that are there."""
    own = {
        n: TokenFlags(t.content, t.special, t.single_word, t.lstrip, t.rstrip, t.normalized)
        for n, t in tokenizer.get_added_tokens_decoder().items()
    }
    adding = [AddedToken(**t._asdict()) for _, t in tokens_by_files(folder, config, own)]
    # A bare list in the library's stub.
    tokenizer.add_tokens(adding)  # pyright: ignore[reportUnknownMemberType]
