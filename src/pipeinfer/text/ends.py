"""Which tokens a model ends with, and the vocabulary that grammars are about: from its files.

Knows no request and no template.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from pipeinfer.checkpoint.generation import read_generation
from pipeinfer.checkpoint.outline import read_outline
from pipeinfer.grammars.trial import VocabularySetup
from pipeinfer.json_values import JsonObject
from pipeinfer.settings import ConfigurationError
from pipeinfer.text.harmony import HARMONY_ENDS, HARMONY_TOKENS
from pipeinfer.text.loading import load_tokenizer, special_tokens
from pipeinfer.text.template_sources import read_tokenizer_config


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
