"""Token ids to text, one id at a time, never with half a character; stop strings in that text.

DecoderFactory opens the incremental decoders of requests: their text depends on the context ids and
the output ids alone, not on how they arrived in batches. TokenTexts has the bytes that a token
stands for by itself, which log-probs are shown with; answers are made otherwise, because bytes of
several tokens become one character, and special tokens may be hidden. StopStrings says what of a
streamed text may be shown; TokenOffsets where in a text its tokens begin. Knows tokenizers; no
request and no message.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from tokenizers import Tokenizer, decoders

from pipeinfer.wire import NO_ID, pack_few

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
        self._token_bytes: dict[bool, dict[int, str | bytes]] = {True: {}, False: {}}
        if tokenizer is not None:
            # Made once, so that a snapshot of a decoder recognises them.
            self._token_text = tokenizer.id_to_token
            self._decode = partial(tokenizer.decode, skip_special_tokens=False)

    def open(self, context: Sequence[int], skip_special_tokens: bool) -> IncrementalDecoder:
        """A decoder for outputs that follow `context`, the last ids of the prompt.

        The context gives no text; it decides about a leading space and completes a character
        that the prompt began.
        """
        if self._tokenizer is None:
            return NoText()
        hidden = self.texts.special if skip_special_tokens else frozenset[int]()
        if self.texts.byte_level:
            token_bytes = self._token_bytes[skip_special_tokens]
            return ByteDecoder(self._token_text, token_bytes, hidden, context)
        return WindowDecoder(self._decode, hidden, context)  # special tokens never get that far


class NoText:
    """Stands in where a checkpoint has no tokenizer."""

    def step(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def _bytes_of_token(token: str) -> str | bytes:
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
    """Byte-level tokens; `token_bytes` is shared by all requests and filled as ids turn up.

    `pending` holds the bytes of an unfinished character, at most three. Invalid bytes become one
    U+FFFD for each maximal subpart (Unicode 15, section 3.9), as in the tokenizer's own decode.
    """

    __slots__ = ("_hidden", "_pending", "_token_bytes", "_token_text")

    def __init__(
        self,
        token_text: Callable[[int], str | None],
        token_bytes: dict[int, str | bytes],
        hidden: frozenset[int],
        context: Sequence[int],
    ) -> None:
        self._token_text = token_text
        self._token_bytes = token_bytes
        self._hidden = hidden
        self._pending = b""
        for token in context:
            self.step(token)

    def step(self, token: int) -> str:
        piece = self._token_bytes.get(token)
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
        piece = (
            "" if text is None else _bytes_of_token(text)
        )  # padding of the vocabulary has no text
        self._token_bytes[token] = piece
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
        """The number of ids up to the context's last whole character, and the text up to there. The
        bytes behind it, at most three, are pending: the output may complete the character."""
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


# A byte of a character that has no token, as SentencePiece writes it.
BYTE = re.compile("<0x([0-9A-F]{2})>")


def byte_alphabet() -> dict[str, int]:
    """GPT-2's character for each byte, inverted: printable Latin-1 stands for itself."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + n): byte for n, byte in enumerate(unprintable)})
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
    """{id: bytes of the token} over one tokenizer, filled as ids are looked up. Without a tokenizer
    no token has bytes, nor has padding of the vocabulary, nor NO_ID.

    special: ids of special tokens. byte_level: whether tokens stand for bytes, as in GPT-2.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        super().__init__({NO_ID: b""})
        self._tokenizer = tokenizer
        self.special: frozenset[int] = frozenset()
        self.byte_level = False
        if tokenizer is not None:
            added = tokenizer.get_added_tokens_decoder()
            self.special = frozenset(i for i, token in added.items() if token.special)
            self.byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)

    def __missing__(self, token: int) -> bytes:
        self[token] = text = self._learn(token)
        return text

    def _learn(self, token: int) -> bytes:
        name = None if self._tokenizer is None else self._tokenizer.id_to_token(token)
        if self._tokenizer is None or name is None:
            return b""
        if token in self.special:
            return name.encode()
        if self.byte_level:
            raw = byte_level(name)
            return name.encode() if raw is None else raw
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        byte = BYTE.fullmatch(name)
        if byte is not None and text != name:
            return bytes([int(byte[1], 16)])
        # Decoders strip the space before a text's first word, so the token's text is what a second
        # token adds to a first one.
        twice = self._tokenizer.decode([token, token], skip_special_tokens=False)
        return twice.removeprefix(text).encode()


class StopStrings:
    """Watches one text for several stop strings. Each character is looked at once per stop string
    (Knuth, Morris and Pratt: Fast pattern matching in strings, 1977), however long the text is.

    Text that may be the beginning of a stop string is withheld, and only that: the longest suffix
    of the text that is a prefix of a stop string. The first occurrence within the added text
    that completes one wins; of two that begin together, the one named first.
    """

    __slots__ = ("_include", "_searches", "_withheld")

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        """`stops`: non-empty strings. `include`: the stop string itself belongs to the text."""
        self._searches = [_Search(stop) for stop in stops]
        self._include = include
        self._withheld = ""

    def feed(self, added: str, armed: bool = True) -> tuple[str, str | None]:
        """(text that is final now, the stop string that ended it or None).

        Unarmed, occurrences that end inside `added` do not count. After a hit nothing more may be
        fed.
        """
        if not added:
            return "", None
        withheld = self._withheld
        best: tuple[int, str] | None = None
        longest = 0
        for search in self._searches:
            end = search.feed(added, armed)
            if end:
                start = len(withheld) + end - len(search.stop)
                if best is None or start < best[0]:
                    best = (start, search.stop)
            elif search.matched > longest:
                longest = search.matched
        text = withheld + added if withheld else added
        if best is not None:
            start, stop = best
            self._withheld = ""
            return text[: start + len(stop) if self._include else start], stop
        if not longest:
            self._withheld = ""
            return text, None
        self._withheld = text[-longest:]
        return text[:-longest], None

    def flush(self) -> str:
        """The withheld text: the request ended without a stop string."""
        withheld, self._withheld = self._withheld, ""
        return withheld


class _Search:
    """The search for one stop string; `matched` of its characters are the text's last ones."""

    __slots__ = ("_fallback", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._fallback = _fallbacks(stop)

    def feed(self, added: str, armed: bool) -> int:
        """The end of the first occurrence, counted in characters of `added`; 0 if there is none."""
        stop, matched, position = self.stop, self.matched, 0
        while True:
            if not matched:
                # The common case: nothing begun, and the added text does not begin anything.
                position = added.find(stop[0], position)
                if position < 0:
                    self.matched = 0
                    return 0
            elif position == len(added):
                self.matched = matched
                return 0
            if added[position] == stop[matched]:
                matched += 1
                position += 1
                if matched == len(stop):
                    if armed:
                        return position
                    matched = self._fallback[matched]
            else:
                matched = self._fallback[matched]


def _fallbacks(stop: str) -> list[int]:
    """For n matched characters, how many still match when the next one does not: [len + 1]."""
    table = [0] * (len(stop) + 1)
    matched = 0
    for n in range(1, len(stop)):
        while matched and stop[n] != stop[matched]:
            matched = table[matched]
        if stop[n] == stop[matched]:
            matched += 1
        table[n + 1] = matched
    return table


class TokenOffsets:
    """Positions in the text of one output at which its tokens begin, in characters. All tokens of a
    character begin where the character begins. A token behind bytes that never become a character
    begins behind their U+FFFD."""

    __slots__ = ("_num_chars", "_offsets", "_texts", "_waits")

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._num_chars = 0  # of all text so far
        self._waits = False  # the last token gave no text: it may be part of a character
        self._offsets: list[int] = []  # of tokens since `take`

    def add_token(self, token: int, text: str) -> None:
        """The next token, and the text that is certain since it came."""
        start = self._num_chars
        if self._waits and text:
            raw = self._texts[token]
            characters = raw.decode("utf-8", "ignore")
            if characters.encode() == raw and text.endswith(characters):
                start += len(text) - len(characters)  # before it stands text of other tokens
        self._offsets.append(start)
        self._num_chars += len(text)
        self._waits = not text

    def take(self, tokens: int) -> bytes:
        """Characters of text before each of the first `tokens` tokens since the last call, int32
        bytes. The other tokens are not shown."""
        offsets, self._offsets = self._offsets[:tokens], []
        return pack_few(offsets)
