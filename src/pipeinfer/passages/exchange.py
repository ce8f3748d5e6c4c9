"""What an observer is shown: one input of a core and all that came of it, with the times.

Knows no stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from pipeinfer.core import Send
from pipeinfer.messages import Message
from pipeinfer.passages.book import Book


class Exchange(NamedTuple):
    """`event` came at `began`, and `outputs` had left at `ended` (Unix seconds)."""

    event: Message
    outputs: Sequence[Send]
    began: float
    ended: float


class Observer(Protocol):
    """Reads a stage's messages, and notes in `book` what they did to each request."""

    book: Book

    def saw(self, exchange: Exchange) -> None:
        """The next one of the stage's core, in its order."""
        ...
