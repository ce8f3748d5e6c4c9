"""Where an answer's thoughts begin and end, told by the text of its tokens.

A tag may be one token of the model or several, and a token may hold the end of a tag and more.
Everything here is a function of the answer's ids.
"""

from __future__ import annotations

import numpy as np

from pipeinfer.grammars.compiling import Vocabulary
from pipeinfer.params import Thoughts, ThoughtState


class ThoughtReader:
    """Of one answer. `where`: its thoughts. `rest`: bytes behind the closing tag, of the token that
    ended it."""

    def __init__(self, vocabulary: Vocabulary, thoughts: Thoughts) -> None:
        self._vocabulary = vocabulary
        self._opening, self._closing = thoughts.opening.encode(), thoughts.closing.encode()
        self._text = b""  # before: all of it; open: what the closing tag may begin with
        self.where: ThoughtState = thoughts.state
        self.rest = b""

    def read(self, token: int) -> None:
        """The next one of the answer."""
        if self.where == "over":
            return
        self._text += self._vocabulary.text(token)
        if self.where == "before":
            bare = self._text.lstrip()
            if bare.startswith(self._opening):
                self.where, self._text = "open", bare[len(self._opening) :]
            elif not self._opening.startswith(bare):
                self.where = "over"
        if self.where == "open":
            _, closed, rest = self._text.partition(self._closing)
            if closed:
                self.where, self.rest = "over", rest
            else:
                self._text = self._text[max(len(self._text) - len(self._closing) + 1, 0) :]

    @property
    def blank(self) -> bool:
        """Whether nothing but white space has come so far."""
        return self.where == "before" and not self._text.strip()

    def unfit(self) -> np.ndarray | None:
        """Tokens that would end the thoughts and go on with something else at once: int32 [words]
        of a mask. None if there are none."""
        begun = next(n for n in range(len(self._closing), -1, -1) if self._ends_with(n))
        return self._vocabulary.beyond(self._closing, begun)

    def _ends_with(self, many: int) -> bool:
        """Whether the text ends with so many bytes of the closing tag."""
        return self._text.endswith(self._closing[:many]) if many else True
