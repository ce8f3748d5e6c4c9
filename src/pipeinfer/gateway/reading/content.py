"""The content around calls: without the white space that only sets calls apart.

Knows pieces; no marker and no model.
"""

from __future__ import annotations

from pipeinfer.gateway.pieces import WHITESPACE, ParsedDelta


class ContentBuffer:
    """Content before, between and after calls."""

    __slots__ = ("_no_content_since_call", "_pending_space")

    def __init__(self) -> None:
        self._pending_space: list[str] = []
        self._no_content_since_call = False

    @property
    def after_call(self) -> bool:
        """Nothing but white space came since a call."""
        return self._no_content_since_call

    def add(self, text: str, deltas: list[ParsedDelta]) -> None:
        """White space at its end waits for what follows it."""
        if self._no_content_since_call:
            text = text.lstrip(WHITESPACE)
        if not text:
            return
        self._no_content_since_call = False
        bare = text.rstrip(WHITESPACE)
        if bare:
            deltas.append(ParsedDelta("content", "".join((*self._pending_space, bare))))
            self._pending_space = [text[len(bare) :]]
        else:
            self._pending_space.append(text)

    def start_call(self) -> None:
        """A call comes or came."""
        self._pending_space, self._no_content_since_call = [], True

    def flush(self, deltas: list[ParsedDelta]) -> None:
        """Nothing comes behind."""
        if pending := "".join(self._pending_space):
            deltas.append(ParsedDelta("content", pending))
        self._pending_space = []
