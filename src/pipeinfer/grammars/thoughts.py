"""Where an answer's thoughts begin and end, told by the text of its tokens.

A tag may be one token of the model or several, and a token may hold the end of a tag and more.
Everything here is a function of the answer's ids.
"""

from __future__ import annotations

import numpy as np

from pipeinfer.grammars.compiling import Vocabulary
from pipeinfer.params import Thoughts, ThoughtState


class ThoughtTracker:
    """Of one answer. `where`: its thoughts. `rest`: bytes behind the closing tag, of the token that
    ended it."""

    def __init__(self, vocabulary: Vocabulary, thoughts: Thoughts) -> None:
        self._vocabulary = vocabulary
        self._opening, self._closing = thoughts.opening.encode(), thoughts.closing.encode()
        self._tail = b""  # before: all of it; open: what the closing tag may begin with
        self.state: ThoughtState = thoughts.state
        self.text_after_closing = b""

    def read(self, token: int) -> None:
        """The next one of the answer."""
        if self.state == "over":
            return
        self._tail += self._vocabulary.bytes_of(token)
        if self.state == "before":
            bare = self._tail.lstrip()
            if bare.startswith(self._opening):
                self.state, self._tail = "open", bare[len(self._opening) :]
            elif not self._opening.startswith(bare):
                self.state = "over"
        if self.state == "open":
            _, closed, rest = self._tail.partition(self._closing)
            if closed:
                self.state, self.text_after_closing = "over", rest
            else:
                self._tail = self._tail[max(len(self._tail) - len(self._closing) + 1, 0) :]

    @property
    def only_white_space(self) -> bool:
        """Whether nothing but white space has come so far."""
        return self.state == "before" and not self._tail.strip()

    def closing_and_more(self) -> np.ndarray | None:
        """Tokens that would end the thoughts and go on with something else at once: int32 [words]
        of a mask. None if there are none."""
        begun = next(n for n in range(len(self._closing), -1, -1) if self._ends_with(n))
        return self._vocabulary.tokens_completing(self._closing, begun)

    def _ends_with(self, many: int) -> bool:
        """Whether the text ends with so many bytes of the closing tag."""
        return self._tail.endswith(self._closing[:many]) if many else True
