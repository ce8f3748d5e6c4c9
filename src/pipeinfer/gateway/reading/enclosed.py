"""An answer between tags of its own, which are no part of it; the text in between is for the next
reader.

Knows no thoughts and no calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pipeinfer.gateway.pieces import WHITESPACE, OutputParser, ParsedDelta
from pipeinfer.gateway.reading.held import find_marker


class AnswerTagParser:
    """An answer that does not begin with the `opening` tag is left as it is."""

    def __init__(self, next_parser: OutputParser, opening: str, closing: str) -> None:
        self._next_parser = next_parser
        self._opening = opening
        self._closing = closing
        self._state: Literal["begin", "space", "inside", "over", "bare"] = "begin"
        self._buffer = ""
        self._pending_space: list[str] = []  # that may stand before the closing tag

    def feed(self, text: str) -> Sequence[ParsedDelta]:
        self._buffer += text
        if self._state == "begin":
            self._find_opening()
        if self._state == "space":
            self._buffer = self._buffer.lstrip(WHITESPACE)
            self._state = "inside" if self._buffer else "space"
        if self._state == "inside":
            return self._feed_inside()
        return self._feed_rest() if self._state in ("over", "bare") else ()

    def finish(self) -> Sequence[ParsedDelta]:
        if self._state == "begin":
            self._state = "bare"
        inside = "".join((*self._pending_space, self._buffer)) if self._state == "inside" else ""
        deltas_after = self._next_parser.feed(inside) if inside else self._feed_rest()
        return (*deltas_after, *self._next_parser.finish())

    def _find_opening(self) -> None:
        bare = self._buffer.lstrip(WHITESPACE)
        if bare.startswith(self._opening):
            self._buffer, self._state = bare[len(self._opening) :], "space"
        elif not self._opening.startswith(bare):
            self._state = "bare"

    def _feed_inside(self) -> Sequence[ParsedDelta]:
        found = find_marker(self._buffer, (self._closing,))
        self._buffer, bare = found.tail, found.before.rstrip(WHITESPACE)
        deltas: list[ParsedDelta] = []
        if bare:
            deltas += self._next_parser.feed("".join((*self._pending_space, bare)))
            self._pending_space = []
        self._pending_space.append(found.before[len(bare) :])
        if found.marker is not None:
            self._pending_space, self._state = [], "over"
            deltas += self._feed_rest()
        return deltas

    def _feed_rest(self) -> Sequence[ParsedDelta]:
        """What stands behind the closing tag, but for white space before it; or all of an answer
        that has none."""
        text, self._buffer = self._buffer, ""
        if self._state == "over":
            text = text.lstrip(WHITESPACE)
            self._state = "bare" if text else "over"
        return self._next_parser.feed(text) if text else ()
