"""The observer of each kind of stage, by its name.

Knows which there are, and nothing of what they read.
"""

from __future__ import annotations

from collections.abc import Callable

from pipeinfer.passages.book import Book
from pipeinfer.passages.detokenizer import DetokenizerObserver
from pipeinfer.passages.engine import EngineObserver
from pipeinfer.passages.exchange import Observer
from pipeinfer.passages.gateway import GatewayObserver
from pipeinfer.passages.scheduler import SchedulerObserver
from pipeinfer.passages.tokenizer import TokenizerObserver

OBSERVERS: dict[str, Callable[[Book, float], Observer]] = {
    "gateway": lambda book, _target: GatewayObserver(book),
    "tokenizer": lambda book, _target: TokenizerObserver(book),
    "scheduler": SchedulerObserver,
    "engine": lambda book, _target: EngineObserver(book),
    "detokenizer": lambda book, _target: DetokenizerObserver(book),
}


def observer(name: str, book: Book, target: float = 0.0) -> Observer:
    """Of a stage called `name`. `target`: seconds that a step should take at most, 0 for none."""
    return OBSERVERS[name](book, target)
