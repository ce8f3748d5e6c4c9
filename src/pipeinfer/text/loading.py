"""Reads a checkpoint's tokenizer files: tokenizer.json and the JSON files beside it.

Gives the same ids as the tokenizer that transformers would load from the folder, without importing
it. Knows no request and no template.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from pipeinfer.checkpoint.config import read_generation, read_outline
from pipeinfer.gguf.config import tokenizer as gguf_tokenizer
from pipeinfer.gguf.header import is_gguf
from pipeinfer.grammars.bounds import VocabularySetup
from pipeinfer.json_values import JsonObject
from pipeinfer.settings import ConfigurationError
from pipeinfer.text.files import TokenFlags, read_tokenizer_config, special_tokens, tokens_by_files
from pipeinfer.text.thoughts import HARMONY_ENDS, HARMONY_TOKENS

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


def read_end_ids(folder: Path, tokenizer: Tokenizer | None, config: JsonObject) -> tuple[int, ...]:
    """The union of what config.json, generation_config.json and the tokenizer say, and of what ends
    a harmony answer; `config`: what read_tokenizer_config gave."""
    ids = dict.fromkeys(read_generation(folder).eos_ids)
    text = special_tokens(config).get("eos_token")
    token = tokenizer.token_to_id(text) if tokenizer is not None and text is not None else None
    if token is not None:
        ids[token] = None
    if tokenizer is not None:
        ids |= dict.fromkeys(_harmony_ends(tokenizer))
    return tuple(ids)


def grammar_setup(folder: Path, model_impl: str = "auto") -> VocabularySetup:
    """For grammars of the checkpoint in `folder`; `model_impl` as in Settings. Raises
    ConfigurationError where it has no tokenizer or no end."""
    config = read_tokenizer_config(folder)
    tokenizer = load_tokenizer(folder, config)
    ends = read_end_ids(folder, tokenizer, config)
    return vocabulary_setup(tokenizer, read_outline(folder, model_impl).vocab_size, ends)


def vocabulary_setup(
    tokenizer: Tokenizer | None, width: int, ends: Sequence[int]
) -> VocabularySetup:
    """For grammars of a model with logits of `width` ids, `ends` of which end a text. Raises
    ConfigurationError."""
    if tokenizer is None:
        raise ConfigurationError("the checkpoint has no tokenizer")
    ends = tuple(i for i in ends if 0 <= i < width)
    if not ends:
        raise ConfigurationError("the checkpoint names no token that ends a text")
    return VocabularySetup(
        tokenizer=tokenizer.to_str(),
        width=width,
        end_ids=ends,
        known_ids=tuple(sorted(tokenizer.get_vocab().values())),
    )


def _harmony_ends(tokenizer: Tokenizer) -> list[int]:
    """Ids of ENDS, where the tokenizer has the format's tokens as special ones; else none. Some
    checkpoints name only one of them, or another token."""
    added = tokenizer.get_added_tokens_decoder()
    special = {token.content: i for i, token in added.items() if token.special}
    if not special.keys() >= HARMONY_TOKENS:
        return []
    return [special[text] for text in HARMONY_ENDS]
