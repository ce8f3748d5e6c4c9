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

OBSERVERS: dict[str, Callable[[Book], Observer]] = {
    "gateway": GatewayObserver,
    "tokenizer": TokenizerObserver,
    "scheduler": SchedulerObserver,
    "engine": EngineObserver,
    "detokenizer": DetokenizerObserver,
}


def observer(name: str, book: Book) -> Observer:
    """Of a stage called `name`."""
    return OBSERVERS[name](book)
