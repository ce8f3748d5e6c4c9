"""Where in an output's text the text of each token begins.

Knows tokens' texts; no request and no stop string.
"""

from __future__ import annotations

from pipeinfer.detokenizer.token_texts import TokenTexts
from pipeinfer.packing import pack_few


class TokenOffsets:
    """Of one output. All tokens of a character begin where it begins. A token behind bytes that
    never become a character begins behind what stands for them.
    """

    __slots__ = ("_letters", "_offsets", "_texts", "_waits")

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._letters = 0  # of all text so far
        self._waits = False  # the last token gave no text: it may be part of a character
        self._offsets: list[int] = []  # of tokens since `take`

    def token(self, token: int, text: str) -> None:
        """The next one, and the text that it made certain."""
        begins = self._letters
        if self._waits and text:
            raw = self._texts[token]
            own = raw.decode("utf-8", "ignore")
            if own.encode() == raw and text.endswith(own):  # whole characters, all its own
                begins += len(text) - len(own)
        self._offsets.append(begins)
        self._letters += len(text)
        self._waits = not text

    def take(self, tokens: int) -> bytes:
        """Of the first `tokens` of those since this was asked last: letters of text before each,
        int32 bytes. The others are not shown."""
        offsets, self._offsets = self._offsets[:tokens], []
        return pack_few(offsets)
