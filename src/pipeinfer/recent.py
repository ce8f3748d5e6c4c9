"""What happened last, by name: for some seconds, and never more than so much of it.

Knows neither what it was nor a clock: the time is passed in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

Value = TypeVar("Value")
SLICES = 8


class _Span(Generic[Value]):
    """What was put between two times, in seconds."""

    __slots__ = ("begun", "last", "values")

    def __init__(self, begun: float) -> None:
        self.begun = self.last = begun
        self.values: dict[str, Value] = {}


class RecentTable(Generic[Value]):
    """What was put in the last `seconds`, oldest first; of more than `max_size` the latest, at
    least seven eighths of so many.

    It lies in spans of time, which go as a whole. A single table from which the oldest goes for
    each that comes has holes at its beginning, over which one looks for the oldest, and which make
    it large.
    """

    __slots__ = ("_max_size", "_seconds", "_spans")

    def __init__(self, seconds: float, max_size: int) -> None:
        self._seconds = seconds
        self._max_size = max_size
        self._spans: list[_Span[Value]] = []

    def put(self, name: str, value: Value, now: float) -> None:
        """In place of what the name had."""
        for span in self._spans:
            span.values.pop(name, None)
        span = self._span(now)
        span.values[name] = value
        span.last = now

    def get(self, name: str) -> Value | None:
        """What was put last."""
        for span in self._spans:
            if name in span.values:
                return span.values[name]
        return None

    def items(self) -> Iterator[tuple[str, Value]]:
        """Oldest first."""
        for span in self._spans:
            yield from span.values.items()

    def __contains__(self, name: str) -> bool:
        return any(name in span.values for span in self._spans)

    def __len__(self) -> int:
        return sum(len(span.values) for span in self._spans)

    def _span(self, now: float) -> _Span[Value]:
        """The one of now; those that are too old go."""
        spans = self._spans
        while spans and now - spans[0].last >= self._seconds:
            del spans[0]
        full = spans and len(spans[-1].values) >= self._max_size // SLICES
        if not spans or full or now - spans[-1].begun >= self._seconds / SLICES:
            spans.append(_Span(now))
        while len(self) >= self._max_size:
            del spans[0]
        return spans[-1]
