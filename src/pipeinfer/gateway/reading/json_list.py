"""Calls as a JSON list of {"name": ..., "parameters": {...}}, which is all that the answer is.

Of models that have no form of their own: they say it because a grammar holds them to it.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeinfer.gateway.pieces import Piece
from pipeinfer.gateway.reading.mistral import OPENING, Mistral


class JsonList:
    """The list is Mistral's, without what stands before it."""

    def __init__(self) -> None:
        self._reader = Mistral()
        self._reader.read(OPENING)

    def read(self, text: str) -> Sequence[Piece]:
        return _said(self._reader.read(text))

    def end(self) -> Sequence[Piece]:
        return _said(self._reader.end())


def _said(pieces: Sequence[Piece]) -> Sequence[Piece]:
    return [
        piece._replace(text=piece.text.removeprefix(OPENING)) if piece.call < 0 else piece
        for piece in pieces
    ]
