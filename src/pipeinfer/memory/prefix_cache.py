"""What a prefix cache is, and which kinds there are.

A cache maps token prefixes, whole pages at a time, to pages that hold their KV. Knows no slot, no
plan and no tensor; implementations are imported when they are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple, Protocol

import numpy as np

from pipeinfer.close_names import none_of
from pipeinfer.settings import ConfigurationError

CACHES = {
    "radix": "pipeinfer.memory.radix:RadixCache",
    "naive": "pipeinfer.memory.naive:NaiveCache",
}


class PrefixMatch(NamedTuple):
    """A cached prefix: the node it ends in (None: nothing cached) and its pages, int32 [n]."""

    node: object
    pages: np.ndarray


class CachedPath(NamedTuple):
    """A path from the root to some node: a cached prefix, for operators to look at.

    num_tokens: its length.
    num_sequences: cached sequences that begin with it.
    num_locks: locks of requests on it.
    first_ids: int32, its first token ids; none under a salt, whose texts nobody else may see.
    """

    num_tokens: int
    num_sequences: int
    num_locks: int
    first_ids: np.ndarray


class PrefixCache(Protocol):
    """Owns the pages that were inserted until it evicts them. `clock` is the plan's number."""

    num_evictable: int  # pages that evict() could return
    num_locked: int  # pages on a path that somebody has locked

    def match(self, tokens: np.ndarray, salt: str, clock: int) -> PrefixMatch:
        """The longest cached prefix of `tokens` (int32 [n], whole pages count) under `salt`."""
        ...

    def lock(self, node: object) -> None:
        """Keeps the path from the root to `node` from eviction; None is no path. Locks nest."""
        ...

    def unlock(self, node: object) -> None:
        """Undoes one lock; raises IntegrityError if there is none."""
        ...

    def insert(self, tokens: np.ndarray, pages: np.ndarray, salt: str, clock: int) -> PrefixMatch:
        """Offers `pages` int32 [n] holding the KV of `tokens` int32 [n * page_size].

        Returns the pages that the cache has for these tokens now. Where it had a page already it
        keeps its own, and the offered one stays the caller's; all others returned are now its own.
        An empty match means that nothing was taken.
        """
        ...

    def evict(self, count: int) -> np.ndarray:
        """Gives up at count `count` pages, least recently used first; int32, now the caller's."""
        ...

    def remove(self, tokens: np.ndarray, salt: str) -> np.ndarray:
        """Gives up the pages of `tokens` (int32 [n]), from the last cached one backwards, as far as
        nobody has locked them and no other tokens follow; int32, now the caller's.
        """
        ...

    def largest(self, count: int, max_ids: int) -> list[CachedPath]:
        """At count so many paths: those that several sequences begin with, by the tokens that this
        saves, then single ones by their length. `max_ids`: of each, so many are told. Its cost is
        bounded: of a very large tree it sees a part.
        """
        ...

    def reset(self) -> None:
        """Forgets everything, locks included."""
        ...

    def check_integrity(self, holders: Sequence[object]) -> np.ndarray:
        """Raises IntegrityError unless all is consistent; `holders` has one node for each lock.

        Returns all pages that the cache owns, int32.
        """
        ...


def make_cache(name: str, page_size: int) -> PrefixCache:
    """The cache called `name`; raises ConfigurationError, which lists the names there are."""
    if name not in CACHES:
        raise ConfigurationError(f"--cache: {none_of(name, CACHES)}")
    module, _, cls = CACHES[name].partition(":")
    return getattr(import_module(module), cls)(page_size)
