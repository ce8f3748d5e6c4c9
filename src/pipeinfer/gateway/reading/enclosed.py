"""An answer between tags of its own, which are no part of it; the text in between is for the next
reader.

Knows no thoughts and no calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pipeinfer.gateway.pieces import SPACE, Piece, Reader
from pipeinfer.gateway.reading.held import find


class Enclosed:
    """An answer that does not begin with the `opening` tag is left as it is."""

    def __init__(self, behind: Reader, opening: str, closing: str) -> None:
        self._behind = behind
        self._opening = opening
        self._closing = closing
        self._state: Literal["begin", "space", "inside", "over", "bare"] = "begin"
        self._text = ""
        self._space: list[str] = []  # that may stand before the closing tag

    def read(self, text: str) -> Sequence[Piece]:
        self._text += text
        if self._state == "begin":
            self._begin()
        if self._state == "space":
            self._text = self._text.lstrip(SPACE)
            self._state = "inside" if self._text else "space"
        if self._state == "inside":
            return self._inside()
        return self._rest() if self._state in ("over", "bare") else ()

    def end(self) -> Sequence[Piece]:
        if self._state == "begin":
            self._state = "bare"
        inside = "".join((*self._space, self._text)) if self._state == "inside" else ""
        rest = self._behind.read(inside) if inside else self._rest()
        return (*rest, *self._behind.end())

    def _begin(self) -> None:
        bare = self._text.lstrip(SPACE)
        if bare.startswith(self._opening):
            self._text, self._state = bare[len(self._opening) :], "space"
        elif not self._opening.startswith(bare):
            self._state = "bare"

    def _inside(self) -> Sequence[Piece]:
        found = find(self._text, (self._closing,))
        self._text, bare = found.rest, found.before.rstrip(SPACE)
        pieces: list[Piece] = []
        if bare:
            pieces += self._behind.read("".join((*self._space, bare)))
            self._space = []
        self._space.append(found.before[len(bare) :])
        if found.marker is not None:
            self._space, self._state = [], "over"
            pieces += self._rest()
        return pieces

    def _rest(self) -> Sequence[Piece]:
        """What stands behind the closing tag, but for white space before it; or all of an answer
        that has none."""
        text, self._text = self._text, ""
        if self._state == "over":
            text = text.lstrip(SPACE)
            self._state = "bare" if text else "over"
        return self._behind.read(text) if text else ()
