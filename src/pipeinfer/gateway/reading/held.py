"""Text that waits: whether a marker begins in it, or whether white space stands before one.

Knows texts only.
"""

from __future__ import annotations

from collections.abc import Sequence


class MarkerMatch:
    """`before`: text that is certainly no marker. `marker`: the first one behind it, or None.
    `rest`: what follows the marker; without one, what may become a marker."""

    __slots__ = ("before", "marker", "tail")

    def __init__(self, before: str, marker: str | None, rest: str) -> None:
        self.before = before
        self.marker = marker
        self.tail = rest


def find_marker(text: str, markers: Sequence[str]) -> MarkerMatch:
    """The first of `markers` in `text`; none of them begins another."""
    first = min(
        ((at, marker) for marker in markers if (at := text.find(marker)) >= 0), default=None
    )
    if first is not None:
        at, marker = first
        return MarkerMatch(text[:at], marker, text[at + len(marker) :])
    begun = max(_begun(text, marker) for marker in markers)
    return MarkerMatch(text[: len(text) - begun], None, text[len(text) - begun :])


def _begun(text: str, marker: str) -> int:
    """Letters at the end of `text` that begin `marker`."""
    for many in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-many:]):
            return many
    return 0
