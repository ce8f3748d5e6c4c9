"""Reads the tokens of a GGUF file: their texts, kinds, and which of them have a name.

Knows no merges and no splitting of text.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from pipeinfer.gguf.values import (
    Metadata,
    metadata_error,
    quote,
    read_index,
    read_integers,
    read_texts,
)

TOKENS = "tokenizer.ggml.tokens"
TYPES = "tokenizer.ggml.token_type"
# What tokenizer_config.json calls a token, and the key of its id. The file format spells
# "separator" so.
NAMED = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "sep_token": "tokenizer.ggml.seperator_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
    "cls_token": "tokenizer.ggml.cls_token_id",
    "mask_token": "tokenizer.ggml.mask_token_id",
}
# Bounds on the work and memory that a lying file can ask for. SentencePiece's tokens have 16
# characters unless its trainer was told otherwise, and a vocabulary some thousand added tokens.
LONGEST = 512  # characters of a token that is looked for, or made from others
MOST_ADDED = 1 << 20  # characters of all tokens that are looked for


class Kind(IntEnum):
    """The numbers in `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Found in a text before anything else splits it; of these, USER_DEFINED ones are shown to users.
ADDED = frozenset((Kind.UNKNOWN, Kind.CONTROL, Kind.USER_DEFINED))
# Made from shorter ones. Files that give no kind to a token mean an ordinary token.
ORDINARY = frozenset((Kind.UNDEFINED, Kind.NORMAL))


class Vocabulary(NamedTuple):
    """`tokens`: all different, by id. `kinds`: of the same length, each a Kind. `ids`: the id of
    each token. `named`: ids by the names of tokenizer_config.json, as far as the file has them."""

    tokens: list[str]
    kinds: list[int]
    ids: dict[str, int]
    named: dict[str, int]

    def of_kinds(self, kinds: frozenset[Kind]) -> list[int]:
        """The ids of all tokens of one of these kinds, ascending."""
        return [number for number, kind in enumerate(self.kinds) if kind in kinds]

    def added(self) -> list[int]:
        """The ids of the tokens that are looked for in a text. Raises ConfigurationError where
        they are too long to be meant."""
        numbers = self.of_kinds(ADDED)
        for number in numbers:
            self.check_length(number)
        if sum(len(self.tokens[number]) for number in numbers) > MOST_ADDED:
            raise metadata_error(
                TYPES, f"control and user-defined tokens exceed {MOST_ADDED} characters"
            )
        return numbers

    def check_length(self, number: int) -> None:
        """Raises ConfigurationError for a token of more than LONGEST characters."""
        size = len(self.tokens[number])
        if size > LONGEST:
            raise metadata_error(TOKENS, f"{number} has {size} characters, more than {LONGEST}")


def read_vocabulary(metadata: Metadata) -> Vocabulary:
    """Raises ConfigurationError for keys that are absent, contradict each other or lie."""
    tokens = read_texts(metadata, TOKENS)
    if not tokens:
        raise metadata_error(TOKENS, "empty")
    if "" in tokens:
        # Nothing can be encoded as an empty token, but its id needs some text.
        tokens = [token or f"[EMPTY_{number}]" for number, token in enumerate(tokens)]
    ids = {token: number for number, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        twice = next(n for n, token in enumerate(tokens) if ids[token] != n)
        other = ids[tokens[twice]]
        raise metadata_error(TOKENS, f"{twice} and {other} are the same, {quote(tokens[twice])}")
    kinds = read_integers(metadata, TYPES, len(tokens))
    unknown = set(kinds) - set(Kind)
    if unknown:
        raise metadata_error(TYPES, f"a token's type must be one of 0 to 6, not {min(unknown)}")
    return Vocabulary(tokens, kinds, ids, _named(metadata, len(tokens)))


def _named(metadata: Metadata, size: int) -> dict[str, int]:
    found = {name: read_index(metadata, key, size) for name, key in NAMED.items()}
    return {name: number for name, number in found.items() if number is not None}
