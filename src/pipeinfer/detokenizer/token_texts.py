"""What a token stands for by itself: its bytes, whatever stands before and after it.

Log-probs are shown with these. Texts of answers are made otherwise (incremental.py): there, bytes
of several tokens become one character, and special tokens may be hidden. Knows no request.
"""

from __future__ import annotations

import re

from tokenizers import Tokenizer, decoders

from pipeinfer.logprobs import NO_ID

# A byte of a character that has no token, as SentencePiece writes it.
BYTE = re.compile("<0x([0-9A-F]{2})>")


def byte_alphabet() -> dict[str, int]:
    """GPT-2's character for each byte, inverted: printable Latin-1 stands for itself."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + n): byte for n, byte in enumerate(others)})
    return table


_ALPHABET = byte_alphabet()


def byte_level(token: str) -> bytes | None:
    """The bytes of a byte-level token; None for one with characters outside the alphabet (an added
    one), which stands for itself."""
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:
        return None


class TokenTexts(dict[int, bytes]):
    """Over one tokenizer, filled as ids are asked for; without a tokenizer no token has bytes, nor
    has padding of the vocabulary, nor NO_ID."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        super().__init__({NO_ID: b""})
        self._tokenizer = tokenizer
        self._special: frozenset[int] = frozenset()
        self._byte_level = False
        if tokenizer is not None:
            added = tokenizer.get_added_tokens_decoder()
            self._special = frozenset(i for i, token in added.items() if token.special)
            self._byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)

    def __missing__(self, token: int) -> bytes:
        self[token] = text = self._learn(token)
        return text

    def _learn(self, token: int) -> bytes:
        name = None if self._tokenizer is None else self._tokenizer.id_to_token(token)
        if self._tokenizer is None or name is None:
            return b""
        if token in self._special:
            return name.encode()
        if self._byte_level:
            raw = byte_level(name)
            return name.encode() if raw is None else raw
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        byte = BYTE.fullmatch(name)
        if byte is not None and text != name:
            return bytes([int(byte[1], 16)])
        # Decoders strip the space before a text's first word; behind itself a token keeps its own.
        twice = self._tokenizer.decode([token, token], skip_special_tokens=False)
        return twice.removeprefix(text).encode()
