"""Every page has one owner, their order is a function of the calls, and the page table tells what
changed. What rows begin with in common: against a search through all ways to group a few rows, and
for requests whose prompts lie in a prefix cache.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeinfer.memory.pages import (
    MIN_SHARED_TOKENS,
    IntegrityError,
    PageAllocator,
    PageTable,
    find_groups,
    find_shared_prefixes,
)
from pipeinfer.wire import MAX_SHARED_PREFIXES, PREFIX_UPPER


def test_dummy_page_is_never_handed_out():
    allocator = PageAllocator(9)
    assert sorted(allocator.allocate(8).tolist()) == list(range(1, 9))
    assert allocator.num_free == 0
    with pytest.raises(IntegrityError, match="1 pages wanted, 0 of 8 free"):
        allocator.allocate(1)


@pytest.mark.parametrize("pages", [[3], [0], [9], [-1], [1, 1]])
def test_pages_that_are_not_taken_cannot_be_given(pages: list[int]):
    allocator = PageAllocator(9)
    allocator.allocate(1)
    with pytest.raises(IntegrityError):
        allocator.free(np.array(pages, np.int32))
        allocator.free_pages()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-12, 12), max_size=60))
def test_no_page_is_owned_twice_and_order_repeats(moves: list[int]):
    first, second = PageAllocator(40), PageAllocator(40)
    held: list[int] = []
    for move in moves:
        if move > 0 and move <= first.num_free:
            pages = first.allocate(move)
            assert pages.tolist() == second.allocate(move).tolist()
            held += pages.tolist()
        elif move < 0:
            back, held = held[:-move], held[-move:]
            first.free(np.array(back, np.int32))
            second.free(np.array(back, np.int32))
        free = first.free_pages().tolist()
        assert sorted(held + free) == list(range(1, 40))
        assert first.num_free == len(free)


def test_a_single_page_beside_the_dummy_is_enough():
    allocator = PageAllocator(2)
    assert allocator.allocate(1).tolist() == [1]
    with pytest.raises(ValueError, match="not 1"):
        PageAllocator(1)


def pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def changes_of(table: PageTable) -> list[tuple[int, int, int]]:
    """(slot, column, page) of all changes."""
    changes = table.take_changes()
    if changes is None:
        return []
    assert all(part.dtype == np.int32 for part in changes)
    return sorted(zip(*(part.tolist() for part in changes), strict=True))


def test_pages_of_the_cache_come_first_and_are_not_the_requests_own():
    table = PageTable(3, 5)
    table.set_prefix(1, pages(4, 5))
    table.append(pages(1, 2), pages(2, 1), pages(6, 7, 8))
    assert table.pages_of(1).tolist() == [4, 5, 6, 7] and table.owned_pages(1).tolist() == [6, 7]
    assert table.pages_of(2).tolist() == table.owned_pages(2).tolist() == [8]
    assert table.num_owned == 3
    table.set_prefix(1, pages(4, 5, 9))
    assert table.owned_pages(1).tolist() == [7] and table.num_owned == 2
    table.clear(1)
    assert (table.num_owned, table.pages_of(1).tolist(), table.owned_pages(1).tolist()) == (
        1,
        [],
        [],
    )
    table.append(pages(1), pages(2), pages(3, 4))
    assert table.owned_pages(1).tolist() == [3, 4], "nothing of who had it before is shared"


def test_every_page_that_is_written_is_told_once():
    table = PageTable(2, 4)
    table.set_prefix(0, pages(1, 2))
    table.append_one(pages(0, 1), pages(3, 4))
    assert changes_of(table) == [(0, 0, 1), (0, 1, 2), (0, 2, 3), (1, 0, 4)]
    assert changes_of(table) == []
    table.set_prefix(0, pages(1, 7))
    assert changes_of(table) == [(0, 1, 7)], "the first is known"


def test_a_row_that_was_emptied_is_told_anew_whatever_its_pages_are():
    table = PageTable(1, 4)
    for end in (table.reset, lambda: table.clear(0)):
        table.append(pages(0), pages(3), pages(1, 2, 3))
        changes_of(table)
        end()
        table.set_prefix(0, pages(1, 2, 3))
        assert changes_of(table) == [(0, 0, 1), (0, 1, 2), (0, 2, 3)]
        table.clear(0)


def test_reset_empties_all_rows_and_tells_nothing_of_what_was_in_them():
    table = PageTable(2, 4)
    table.set_prefix(0, pages(1))
    table.append(pages(0, 1), pages(1, 2), pages(2, 3, 4))
    table.reset()
    assert changes_of(table) == [] and table.num_owned == 0
    assert not table.num_pages.any() and not table.num_shared.any() and not table._rows.any()


PAGE = 16
MIN_PAGES = MIN_SHARED_TOKENS // PAGE


class Tree:
    """Pages by prefix: the same prefix has the same page, every other has another."""

    def __init__(self):
        self.known = {}

    def pages(self, path):
        return [
            self.known.setdefault(tuple(path[: end + 1]), len(self.known) + 1)
            for end in range(len(path))
        ]


def table_of(paths, own=True):
    """int32 [R, W], a page of its own behind each path, then the dummy page."""
    tree, width = Tree(), max(map(len, paths)) + 2
    rows = np.zeros((len(paths), width), dtype=np.int32)
    for row, path in enumerate(paths):
        rows[row, : len(path)] = tree.pages(path)
        if own:
            rows[row, len(path)] = 10_000 + row
    return rows


def alike(pages, rows):
    """How many first pages the rows have in common."""
    same = (pages[rows] == pages[rows[0]]).all(axis=0)
    return len(same) if same.all() else int(same.argmin())


def most_saved(pages, rows=None):
    """By trying every way to put rows into groups."""
    rows = list(range(len(pages))) if rows is None else rows
    if len(rows) < 2:
        return 0
    first, others = rows[0], rows[1:]
    found = []
    for bits in range(1 << len(others)):
        group = [first] + [row for at, row in enumerate(others) if bits >> at & 1]
        rest = [row for at, row in enumerate(others) if not bits >> at & 1]
        saved = (len(group) - 1) * alike(pages, group)
        found.append(saved + most_saved(pages, rest))
    return max(found)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=6))
@example([[0] * 2, [0] * 3, [0] * 5, [0] * 5])  # a row leaves a group for a shorter one
def test_groups_save_as_much_as_any_could(paths):
    pages = table_of(paths)
    groups = find_groups(pages, 1)
    rows = [row for group in groups for row in group.rows.tolist()]
    assert len(rows) == len(set(rows))
    for group in groups:
        assert 0 < group.num_pages <= alike(pages, group.rows) and len(group.rows) > 1
    assert sum(group.num_saved for group in groups) == most_saved(pages)


def test_a_system_prompt_of_all_or_longer_prompts_of_some_whatever_saves_more():
    some = [[1] * 4 + [2] * 40, [1] * 4 + [2] * 40, [1] * 4 + [3] * 40, [1] * 4 + [3] * 40]
    groups = find_groups(table_of(some), 1)
    assert sorted((group.rows.tolist(), group.num_pages) for group in groups) == [
        ([0, 1], 44), ([2, 3], 44),
    ]  # fmt: skip
    every = [[1] * 100 + [number] for number in (2, 2, 3, 3)]
    assert [
        (group.rows.tolist(), group.num_pages) for group in find_groups(table_of(every), 1)
    ] == [([0, 1, 2, 3], 100)]


class Memory:
    """A page table with these prefixes, given to slots in any order."""

    def __init__(self, paths, order):
        self.table = PageTable(len(paths) + 3, 64)
        self.slots = np.array(order, dtype=np.int32)
        tree, own = Tree(), 10_000
        for slot, path in zip(order, paths, strict=True):
            self.table.set_prefix(slot, np.array(tree.pages(path), dtype=np.int32))
            self.table.append_one(np.array([slot]), np.array([own + slot], dtype=np.int32))


def groups_of(found, slots):
    """The groups that the words speak of, as (rows in rank order, pages)."""
    leaders, ranks = found.leaders, found.ranks
    groups = {}
    for row, (leader, rank) in enumerate(zip(leaders.tolist(), ranks.tolist(), strict=True)):
        if leader:
            groups.setdefault(leader, []).append((rank // PREFIX_UPPER, row, rank % PREFIX_UPPER))
        else:
            assert not rank
    result = []
    for leader, members in groups.items():
        members.sort()
        assert [rank for rank, _, _ in members] == list(range(len(members)))
        assert {size for _, _, size in members} == {len(members)} and len(members) > 1
        rows = [row for _, row, _ in members]
        assert leader // PREFIX_UPPER in rows
        result.append((rows, leader % PREFIX_UPPER))
    return sorted(result)


def test_decodes_are_told_what_their_prompts_begin_with_in_common():
    long = [1] * MIN_PAGES
    paths = [[*long, 5], [7] * 30, [*long, 6], [2], [*long, 5, 5], [7] * 30]
    memory = Memory(paths, [4, 2, 6, 0, 5, 1])
    found = find_shared_prefixes(memory.table, memory.slots, PAGE)
    assert groups_of(found, memory.slots) == [([0, 2, 4], MIN_PAGES), ([1, 5], 30)]
    lines = found.leaders
    assert (
        lines.dtype == np.int32 and lines[0] // PREFIX_UPPER == 0 and lines[1] // PREFIX_UPPER == 1
    )


@pytest.mark.parametrize(
    "paths",
    [
        [[1] * 40],
        [[1] * 40, [2] * 40],
        [[1] * (MIN_PAGES - 1)] * 4,  # too short to be worth it
        [[1] * (MIN_PAGES - 1) + [n] * 9 for n in range(3)],
        [[], []],
    ],
)
def test_nothing_is_told_where_nothing_is_saved(paths):
    memory = Memory(paths, list(range(len(paths))))
    assert find_shared_prefixes(memory.table, memory.slots, PAGE) is None


def test_no_slots_have_nothing_in_common():
    assert find_shared_prefixes(PageTable(2, 4), np.zeros(0, dtype=np.int32), PAGE) is None


def test_of_more_beginnings_than_there_is_room_for_those_that_save_most_are_told():
    paths = [
        [n] * (MIN_PAGES + (n % 40)) for n in range(1, MAX_SHARED_PREFIXES + 9) for _ in range(2)
    ]
    memory = Memory(paths, list(range(len(paths))))
    groups = groups_of(find_shared_prefixes(memory.table, memory.slots, PAGE), memory.slots)
    lengths = sorted((len(path) for path in paths[::2]), reverse=True)
    assert sorted((pages for _, pages in groups), reverse=True) == lengths[:MAX_SHARED_PREFIXES]
