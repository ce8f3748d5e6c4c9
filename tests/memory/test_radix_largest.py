"""The largest prefixes of a radix tree are those that a list of all its sequences gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.memory import radix
from pipeinfer.memory.naive import NaiveCache
from pipeinfer.memory.radix import RadixCache

PAGE = 2
sequences = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=6).map(lambda pages: tuple(pages)),
    min_size=1,
    max_size=12,
)


def filled(pages_of: list[tuple[int, ...]]) -> RadixCache:
    """A tree of these sequences, a page of equal ids for each number."""
    cache, free = RadixCache(PAGE), 0
    for clock, pages in enumerate(pages_of):
        tokens = np.repeat(np.array(pages, np.int32), PAGE)
        cache.insert(tokens, np.arange(free, free + len(pages), dtype=np.int32), "", clock)
        free += len(pages)
    return cache


@given(sequences)
def test_forks_come_by_what_they_save_then_ends_by_their_length(
    inserted: list[tuple[int, ...]],
) -> None:
    ends = {s for s in inserted if not any(o[: len(s)] == s and o != s for o in inserted)}
    prefixes = {s[:n] for s in ends for n in range(1, len(s) + 1)}
    following = {p: {s[len(p)] for s in ends if s[: len(p)] == p and len(s) > len(p)}
                 for p in prefixes}  # fmt: skip
    forks = {p: sum(s[: len(p)] == p for s in ends) for p in prefixes if len(following[p]) > 1}
    found = filled(inserted).largest(100, 100)
    told = {tuple(one.first_ids[::PAGE].tolist()): one for one in found}
    assert set(told) == set(forks) | ends
    assert all(told[p].num_sequences == n for p, n in forks.items())
    assert all(told[p].num_tokens == PAGE * len(p) for p in told)
    saved = [one.num_tokens * (one.num_sequences - 1) for one in found[: len(forks)]]
    assert saved == sorted(saved, reverse=True)
    lengths = [one.num_tokens for one in found[len(forks) :]]
    assert lengths == sorted(lengths, reverse=True)


def test_few_are_told_of_many_and_first_ids_are_cut() -> None:
    cache = filled([(0, n) for n in range(1, 50)])
    found = cache.largest(3, 3)
    assert len(found) == 3
    assert found[0].num_sequences == 49 and found[0].first_ids.tolist() == [0, 0]
    assert found[1].first_ids.tolist()[:2] == [0, 0] and len(found[1].first_ids) == 3


def test_locks_are_told() -> None:
    cache = filled([(0, 1), (0, 2)])
    match = cache.match(np.repeat(np.array([0, 1], np.int32), PAGE), "", 9)
    cache.lock(match.node)
    held = {tuple(one.first_ids.tolist()): one.num_locks for one in cache.largest(9, 9)}
    assert held == {(0, 0): 1, (0, 0, 1, 1): 1, (0, 0, 2, 2): 0}


def test_of_what_lies_under_a_salt_sizes_alone_are_told() -> None:
    cache = filled([(0, 1), (0, 2)])
    tokens = np.repeat(np.array([0, 1, 5], np.int32), PAGE)
    cache.insert(tokens, np.arange(90, 93, dtype=np.int32), "a tenant's own", 9)
    told = {one.num_tokens: one.first_ids.tolist() for one in cache.largest(9, 9)}
    assert told == {2: [0, 0], 4: told[4], 6: []} and len(told[4]) == 4


def test_of_a_very_large_tree_a_part_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(radix, "MAX_VISITED_NODES", 10)
    cache = filled([(0, n) for n in range(1, 50)])
    found = cache.largest(100, 1)
    assert found[0].num_tokens == PAGE and found[0].num_sequences == 9


def test_nothing_is_cached_nothing_is_told() -> None:
    assert RadixCache(PAGE).largest(5, 5) == [] == NaiveCache(PAGE).largest(5, 5)
