"""The content around calls: without the white space that only sets calls apart.

Knows pieces; no marker and no model.
"""

from __future__ import annotations

from pipeinfer.gateway.pieces import SPACE, Piece


class Content:
    """Content before, between and after calls."""

    __slots__ = ("_held", "_leading")

    def __init__(self) -> None:
        self._held: list[str] = []
        self._leading = False

    @property
    def after_call(self) -> bool:
        """Nothing but white space came since a call."""
        return self._leading

    def say(self, text: str, pieces: list[Piece]) -> None:
        """White space at its end waits for what follows it."""
        if self._leading:
            text = text.lstrip(SPACE)
        if not text:
            return
        self._leading = False
        bare = text.rstrip(SPACE)
        if bare:
            pieces.append(Piece("content", "".join((*self._held, bare))))
            self._held = [text[len(bare) :]]
        else:
            self._held.append(text)

    def call(self) -> None:
        """A call comes or came."""
        self._held, self._leading = [], True

    def end(self, pieces: list[Piece]) -> None:
        """Nothing comes behind."""
        if held := "".join(self._held):
            pieces.append(Piece("content", held))
        self._held = []
