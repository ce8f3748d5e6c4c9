"""Token ids to text, one id at a time, never with half a character.

The text depends on the context ids and the output ids alone, not on how they arrived in batches.
Knows tokenizers, but no request, no stop string and no message.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from tokenizers import Tokenizer, decoders

from pipeinfer.detokenizer.token_texts import TokenTexts, byte_level

REPLACEMENT = "\ufffd"
# A character has at most four bytes, so after more pending ids than this the bytes are invalid and
# waiting for the rest of the character would only make every step slower.
MAX_PENDING = 8


class IncrementalDecoder(Protocol):
    """The text of one growing sequence."""

    def step(self, token: int) -> str:
        """Adds one id; returns the text that is now certain, often the token's, maybe empty."""
        ...

    def flush(self) -> str:
        """The text of what is still pending: U+FFFD for bytes that never became a character."""
        ...


class DecoderFactory:
    """Opens decoders over one tokenizer; without a tokenizer all text is empty. `texts`: of single
    tokens.

    Tokenizers whose decoder is ByteLevel (GPT-2, Llama 3, Qwen ...) get a table from id to bytes,
    which is exact and fast; all others go through the tokenizer's own `decode` on a short window.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self.texts = TokenTexts(tokenizer)
        self._special: frozenset[int] = frozenset()
        self._pieces: dict[bool, dict[int, str | bytes]] = {True: {}, False: {}}
        if tokenizer is not None:
            added = tokenizer.get_added_tokens_decoder()
            self._special = frozenset(i for i, token in added.items() if token.special)
            # Made once, so that a snapshot of a decoder can say that it has these.
            self._token_text = tokenizer.id_to_token
            self._decode = partial(tokenizer.decode, skip_special_tokens=False)
        self._byte_level = tokenizer is not None and isinstance(
            tokenizer.decoder, decoders.ByteLevel
        )

    def open(self, context: Sequence[int], skip_special_tokens: bool) -> IncrementalDecoder:
        """A decoder for outputs that follow `context`, the last ids of the prompt.

        The context gives no text; it decides about a leading space and completes a character
        that the prompt began.
        """
        if self._tokenizer is None:
            return NoText()
        hidden = self._special if skip_special_tokens else frozenset[int]()
        if self._byte_level:
            pieces = self._pieces[skip_special_tokens]
            return ByteDecoder(self._token_text, pieces, hidden, context)
        return WindowDecoder(self._decode, hidden, context)  # special tokens never get that far


class NoText:
    """Stands in where a checkpoint has no tokenizer."""

    def step(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def _piece(token: str) -> str | bytes:
    """A byte-level token as str if its bytes are whole characters, else as bytes.

    A token with characters outside the alphabet (an added one) stands for its own UTF-8.
    """
    raw = byte_level(token)
    if raw is None:
        return token
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


class ByteDecoder:
    """Byte-level tokens; `pieces` is shared by all requests and filled as ids turn up.

    `pending` holds the bytes of an unfinished character, at most three. Invalid bytes become one
    U+FFFD for each maximal subpart (Unicode 15, section 3.9), as in the tokenizer's own decode.
    """

    __slots__ = ("_hidden", "_pending", "_pieces", "_token_text")

    def __init__(
        self,
        token_text: Callable[[int], str | None],
        pieces: dict[int, str | bytes],
        hidden: frozenset[int],
        context: Sequence[int],
    ) -> None:
        self._token_text = token_text
        self._pieces = pieces
        self._hidden = hidden
        self._pending = b""
        for token in context:
            self.step(token)

    def step(self, token: int) -> str:
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._learn(token)
        if isinstance(piece, str):
            if not self._pending:
                return piece
            piece = piece.encode()
        raw = self._pending + piece
        text, used = codecs.utf_8_decode(raw, "replace", False)
        self._pending = raw[used:]
        return text

    def flush(self) -> str:
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text

    def _learn(self, token: int) -> str | bytes:
        text = None if token in self._hidden else self._token_text(token)
        piece = "" if text is None else _piece(text)  # padding of the vocabulary has no text
        self._pieces[token] = piece
        return piece


class WindowDecoder:
    """Any tokenizer: decodes the ids of the last two pieces of text and takes the difference.

        ids = | given: gave the last piece | pending: no text yet |

    What a decoder does to the first token (a stripped space) it does to both decodings alike.
    """

    __slots__ = ("_decode", "_given", "_hidden", "_ids", "_prefix")

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        hidden: frozenset[int],
        context: Sequence[int],
    ) -> None:
        self._decode = decode
        self._hidden = hidden
        self._ids = [token for token in context if token not in hidden]
        self._given, self._prefix = self._boundary()

    def step(self, token: int) -> str:
        if token in self._hidden:
            return ""
        self._ids.append(token)
        text = self._decode(self._ids)
        stuck = len(self._ids) - self._given >= MAX_PENDING
        if text.endswith(REPLACEMENT) and not stuck:
            return ""
        new = self._difference(text)
        if new or stuck:
            del self._ids[: self._given]
            self._given = len(self._ids)
            self._prefix = self._decode(self._ids)
        return new

    def flush(self) -> str:
        if len(self._ids) == self._given:
            return ""
        text = self._difference(self._decode(self._ids))
        self._ids, self._given, self._prefix = [], 0, ""
        return text

    def _boundary(self) -> tuple[int, str]:
        """Where the context's last whole character ends, and the text up to there.

        The bytes behind it, at most three, are pending: the output may complete the character.
        """
        end = len(self._ids)
        for given in range(end, max(end - 4, -1), -1):
            text = self._decode(self._ids[:given])
            if not text.endswith(REPLACEMENT):
                return given, text
        return end, self._decode(self._ids)

    def _difference(self, text: str) -> str:
        if text.startswith(self._prefix):
            return text[len(self._prefix) :]
        # A byte that spoils the run it stands in changes text that is already out (byte fallback
        # replaces whole runs). That stays; the new ids count as a run of their own.
        return self._decode(self._ids[self._given :])
