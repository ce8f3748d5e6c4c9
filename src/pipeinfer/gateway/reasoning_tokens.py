"""Counts the tokens of an answer that are thoughts.

A reader says where in the text the thoughts lie, the pipeline says where in the text each token
begins. Knows letters and tokens' offsets; no tags and no token's id.
"""

from __future__ import annotations

from collections import deque
from math import inf

from pipeinfer.packing import unpack_few


class ReasoningTokenCounter:
    """Of one choice. A token is a thought if its text begins within the thoughts: behind their
    opening tag, and before the closing one. So tags are not counted, and white space between them
    is.

    `count`: of the tokens so far whose place in the text is certain; of all at the end.
    `read`: letters of the text for which a reader has decided what they are.
    """

    __slots__ = ("_offsets", "_open_start", "_span_open", "_spans", "count", "parsed_chars")

    def __init__(self) -> None:
        self.count = 0
        self.parsed_chars = inf  # where no reader looks for thoughts there are none
        self._open_start: float = 0
        self._span_open = False
        self._spans: deque[tuple[float, float]] = deque()  # that have ended: from, to
        self._offsets: deque[int] = deque()  # of tokens that are not counted or passed over yet

    def open_span(self, at: float) -> None:
        """Thoughts begin at letter `at` of the text."""
        self._open_start, self._span_open = at, True

    def close_span(self, at: float) -> None:
        """They end before letter `at`, if any have begun."""
        if self._span_open:
            self._span_open = False
            self._spans.append((self._open_start, at))

    def add_offsets(self, offsets: bytes) -> None:
        """Further tokens: letters of text before each, int32 bytes."""
        if offsets:
            self._offsets += unpack_few(offsets)

    def update_count(self) -> None:
        """Counts tokens up to `read`."""
        offsets, spans = self._offsets, self._spans
        while offsets and offsets[0] < self.parsed_chars:
            offset = offsets.popleft()
            while spans and spans[0][1] <= offset:
                spans.popleft()
            begins = spans[0][0] if spans else self._open_start if self._span_open else inf
            self.count += begins <= offset
