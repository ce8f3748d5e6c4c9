"""The radix tree against a model that has one entry for each cached page."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from pipeinfer.memory import prefix_cache
from pipeinfer.memory.pages import IntegrityError
from pipeinfer.memory.prefix_cache import NaiveCache, RadixCache, make_cache
from pipeinfer.settings import ConfigurationError

Prefix = tuple[str, tuple[int, ...]]


@dataclass
class ModelPage:
    page: int
    used: int
    protected: bool = True
    locks: int = 0


class RadixMachine(RuleBasedStateMachine):
    """The model keys every page by its salt and the whole prefix that ends with it."""

    page_size = 1
    locks = Bundle("locks")

    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixCache(self.page_size)
        self.model: dict[Prefix, ModelPage] = {}
        self.clock = 0
        self.next_page = 1
        self.held: list = []

    def ids(self, blocks: list[int]) -> np.ndarray:
        """A page of tokens for each block; pages of different blocks differ in their last id."""
        ids = np.zeros((len(blocks), self.page_size), np.int32)
        ids[:, -1] = blocks
        return ids.reshape(-1)

    def prefixes(self, salt: str, blocks: list[int]) -> list[Prefix]:
        return [(salt, tuple(blocks[:n])) for n in range(1, len(blocks) + 1)]

    blocks = st.lists(st.integers(0, 2), max_size=7)
    salts = st.sampled_from(["", "a"])

    def found(self, salt: str, blocks: list[int], protect: bool = True) -> list[Prefix]:
        chain = self.prefixes(salt, blocks)
        have = next((i for i, key in enumerate(chain) if key not in self.model), len(chain))
        for key in chain[:have]:
            self.model[key].used = self.clock
            self.model[key].protected |= protect
        return chain[:have]

    @rule()
    def next_plan(self) -> None:
        self.clock += 1

    @rule(target=locks, salt=salts, blocks=blocks, extra=st.integers(0, 3), lock=st.booleans())
    def match(self, salt: str, blocks: list[int], extra: int, lock: bool):
        chain = self.found(salt, blocks)
        tail = np.full(min(extra, self.page_size - 1), 9, np.int32)  # never a whole page
        match = self.tree.match(np.concatenate((self.ids(blocks), tail)), salt, self.clock)
        assert match.pages.tolist() == [self.model[key].page for key in chain]
        assert (match.node is None) == (not chain)
        return self.hold(match.node, chain) if lock else multiple()

    @rule(target=locks, salt=salts, blocks=blocks, lock=st.booleans(), prompt_only=st.booleans())
    def insert(self, salt: str, blocks: list[int], lock: bool, prompt_only: bool):
        chain = self.prefixes(salt, blocks)
        have = self.found(salt, blocks, protect=not prompt_only)
        offered = np.arange(self.next_page, self.next_page + len(blocks), dtype=np.int32)
        self.next_page += len(blocks)
        match = self.tree.insert(self.ids(blocks), offered, salt, self.clock, prompt_only)
        for key, page in list(zip(chain, offered.tolist(), strict=True))[len(have) :]:
            self.model[key] = ModelPage(page, self.clock, not prompt_only)
        assert match.pages.tolist() == [self.model[key].page for key in chain]
        return self.hold(match.node, chain) if lock else multiple()

    def hold(self, node, chain: list[Prefix]):
        self.tree.lock(node)
        for key in chain:
            self.model[key].locks += 1
        if node is not None:
            self.held.append(node)
        return node, chain

    @rule(lock=consumes(locks))
    def unlock(self, lock):
        node, chain = lock
        self.tree.unlock(node)
        for key in chain:
            self.model[key].locks -= 1
        if node is not None:
            self.held.remove(node)

    @rule(count=st.integers(0, 12))
    def evict(self, count: int):
        pages = self.tree.evict(count).tolist()
        unlocked = sum(entry.locks == 0 for entry in self.model.values())
        assert len(pages) == min(count, unlocked)
        for page in pages:
            self.check_victim(page)

    @rule(salt=salts, blocks=blocks, extra=st.integers(0, 3))
    def forget(self, salt: str, blocks: list[int], extra: int):
        tail = np.full(min(extra, self.page_size - 1), 9, np.int32)
        expected = []
        for key in reversed(self.prefixes(salt, blocks)):
            inner = {(salt, blocks[:-1]) for salt, blocks in self.model}
            if key in self.model and (key in inner or self.model[key].locks):
                break
            if key in self.model:
                expected.append(self.model.pop(key).page)
        given = self.tree.remove(np.concatenate((self.ids(blocks), tail)), salt)
        assert given.tolist() == expected

    def check_victim(self, page: int) -> None:
        """Page by page, the tree gives up an unlocked leaf that no other was used before; none that
        is protected while another is not."""
        inner = {(salt, blocks[:-1]) for salt, blocks in self.model}
        leaves = {
            key: entry for key, entry in self.model.items() if key not in inner and entry.locks == 0
        }
        key = next(key for key, entry in leaves.items() if entry.page == page)
        ranks = {key: (entry.protected, entry.used) for key, entry in leaves.items()}
        assert ranks[key] == min(ranks.values())
        del self.model[key]

    @invariant()
    def sizes_and_pages_agree(self):
        locked = sum(entry.locks > 0 for entry in self.model.values())
        assert (self.tree.num_evictable, self.tree.num_locked) == (len(self.model) - locked, locked)
        pages = self.tree.check_integrity(self.held)
        assert sorted(pages.tolist()) == sorted(entry.page for entry in self.model.values())


@pytest.mark.parametrize("page_size", [1, 4])  # larger ones have longer tails, which count as none
def test_tree_agrees_with_a_dictionary_of_pages(page_size: int):
    machine = type("Machine", (RadixMachine,), {"page_size": page_size})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=40, stateful_step_count=50, deadline=None)
    )


def ids(*blocks: int) -> np.ndarray:
    return np.array(blocks, np.int32)


def pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def test_least_recently_used_leaf_goes_first_whatever_the_order_of_insertion():
    tree = RadixCache(1)
    tree.insert(ids(1, 2), pages(1, 2), "", 1)
    tree.insert(ids(5, 6), pages(5, 6), "", 2)
    tree.match(ids(1, 2), "", 3)
    assert tree.evict(1).tolist() == [6]
    assert tree.evict(2).tolist() == [5, 2]
    assert tree.match(ids(1, 2), "", 4).pages.tolist() == [1]


def test_locked_path_survives_eviction_of_everything():
    tree = RadixCache(2)
    tree.insert(ids(1, 1, 2, 2, 3, 3), pages(1, 2, 3), "", 1)
    node, found = tree.match(ids(1, 1, 2, 2, 9, 9), "", 2)
    tree.lock(node)
    assert found.tolist() == [1, 2]
    assert tree.evict(9).tolist() == [3]
    assert (tree.num_evictable, tree.num_locked) == (0, 2)
    tree.unlock(node)
    assert tree.evict(9).tolist() == [2, 1]


def test_salts_do_not_share_pages_and_leave_nothing_behind():
    tree = RadixCache(1)
    for number in range(100):
        tree.insert(ids(1, 2), pages(2 * number, 2 * number + 1), f"user {number}", number)
        assert tree.match(ids(1, 2), "stranger", number).node is None
    assert len(tree.evict(200)) == 200
    assert tree._roots == {}


def test_unlocking_twice_and_locking_the_evicted_are_errors():
    tree = RadixCache(1)
    node, _ = tree.insert(ids(1), pages(1), "", 1)
    with pytest.raises(IntegrityError, match="not locked"):
        tree.unlock(node)
    tree.evict(1)
    with pytest.raises(IntegrityError, match="not in the tree"):
        tree.lock(node)


def test_integrity_check_sees_a_lock_that_nobody_holds():
    tree = RadixCache(1)
    node, _ = tree.insert(ids(1, 2), pages(1, 2), "", 1)
    tree.lock(node)
    tree.check_integrity([node])
    with pytest.raises(IntegrityError, match="1 locks, 0 held"):
        tree.check_integrity([])
    with pytest.raises(IntegrityError, match="1 locks, 2 held"):
        tree.check_integrity([node, node])


def test_stale_candidates_do_not_pile_up():
    tree = RadixCache(1)
    tree.insert(ids(1), pages(1), "", 0)
    for clock in range(5000):
        node, _ = tree.match(ids(1), "", clock)
        tree.lock(node)
        tree.unlock(node)
    assert len(tree._evictable_leaves) < 100
    assert tree.evict(1).tolist() == [1]


def test_naive_cache_takes_nothing():
    cache = NaiveCache(4)
    assert cache.insert(ids(1, 2, 3, 4), pages(1), "", 1).node is None
    assert len(cache.match(ids(1, 2, 3, 4), "", 2).pages) == 0
    assert len(cache.evict(5)) == len(cache.remove(ids(1, 2, 3, 4), "")) == 0


def test_unknown_cache_is_refused_with_the_names_there_are():
    with pytest.raises(ConfigurationError, match="'lru' is none of radix, naive"):
        make_cache("lru", 16)


def test_a_leaf_that_was_skipped_while_locked_can_be_evicted_later():
    """At every clock, also the first ones: what marks a leaf as waiting is no time."""
    for clock in range(4):
        tree = RadixCache(1)
        node, _ = tree.insert(ids(1), pages(1), "", clock)
        tree.insert(ids(2), pages(2), "", clock)
        tree.lock(node)
        assert tree.evict(1).tolist() == [2]  # skips the locked one
        tree.unlock(node)
        tree.check_integrity([])
        assert tree.evict(1).tolist() == [1]


def test_leaves_that_are_dropped_as_stale_are_offered_again():
    """Locked ones are stale while many others come and go."""
    tree = RadixCache(1)
    node, _ = tree.insert(ids(1), pages(1), "", 7)
    tree.lock(node)
    tree.insert(ids(2), pages(2), "", 8)
    for clock in range(9, 300):
        tree.match(ids(2), "", clock)
    tree.unlock(node)
    tree.check_integrity([])
    assert sorted(tree.evict(2).tolist()) == [1, 2]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda node: setattr(node, "key", ids(1)), "1 tokens on 2 pages"),
        (lambda node: setattr(node, "key", ids(1, 2, 3)), "3 tokens on 2 pages"),
        (lambda node: setattr(node, "parent", None), "does not hang from its parent"),
        (lambda node: node.parent.children.clear(), "0 nodes with 0 unlocked"),
        (lambda node: node.parent.children.update({b"": node}), "hang from its parent|2 nodes"),
    ],
)
def test_integrity_check_sees_what_does_not_fit(spoil, message):
    tree = RadixCache(1)
    node, _ = tree.insert(ids(1, 2), pages(1, 2), "", 1)
    tree.check_integrity([])
    spoil(node)
    with pytest.raises(IntegrityError, match=message):
        tree.check_integrity([])


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
    monkeypatch.setattr(prefix_cache, "MAX_VISITED_NODES", 10)
    cache = filled([(0, n) for n in range(1, 50)])
    found = cache.largest(100, 1)
    assert found[0].num_tokens == PAGE and found[0].num_sequences == 9


def test_nothing_is_cached_nothing_is_told() -> None:
    assert RadixCache(PAGE).largest(5, 5) == [] == NaiveCache(PAGE).largest(5, 5)
