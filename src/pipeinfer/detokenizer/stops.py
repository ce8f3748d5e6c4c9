"""Stop strings in streamed text: what may be shown, what must wait, where the text ends.

Each character is looked at once per stop string (Knuth, Morris and Pratt: Fast pattern matching in
strings, 1977), however long the text is. Knows only strings: no tokens and no requests.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches one text for several stop strings.

    Text that may be the beginning of a stop string is held back, and only that: the longest suffix
    of the text that is a prefix of a stop string. The first occurrence within the piece that
    completes one wins; of two that begin together, the one named first.
    """

    __slots__ = ("_held", "_include", "_searches")

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        """`stops`: non-empty strings. `include`: the stop string itself belongs to the text."""
        self._searches = [_Search(stop) for stop in stops]
        self._include = include
        self._held = ""

    def feed(self, piece: str, armed: bool = True) -> tuple[str, str | None]:
        """(text that is final now, the stop string that ended it or None).

        Unarmed, occurrences that end inside `piece` do not count. After a hit nothing more may be
        fed.
        """
        if not piece:
            return "", None
        held = self._held
        best: tuple[int, str] | None = None
        longest = 0
        for search in self._searches:
            end = search.feed(piece, armed)
            if end:
                start = len(held) + end - len(search.stop)
                if best is None or start < best[0]:
                    best = (start, search.stop)
            elif search.matched > longest:
                longest = search.matched
        text = held + piece if held else piece
        if best is not None:
            start, stop = best
            self._held = ""
            return text[: start + len(stop) if self._include else start], stop
        if not longest:
            self._held = ""
            return text, None
        self._held = text[-longest:]
        return text[:-longest], None

    def flush(self) -> str:
        """The held text: the request ended without a stop string."""
        held, self._held = self._held, ""
        return held


class _Search:
    """One stop string; `matched` of its characters are the text's last ones."""

    __slots__ = ("_fallback", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._fallback = _fallbacks(stop)

    def feed(self, piece: str, armed: bool) -> int:
        """The end of the first occurrence, counted in characters of `piece`; 0 if there is none."""
        stop, matched, position = self.stop, self.matched, 0
        while True:
            if not matched:
                # The common case: nothing begun, and this piece does not begin anything.
                position = piece.find(stop[0], position)
                if position < 0:
                    self.matched = 0
                    return 0
            elif position == len(piece):
                self.matched = matched
                return 0
            if piece[position] == stop[matched]:
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
