"""What rows begin with in common: against a search through all ways to group a few rows, and for
requests whose prompts lie in a prefix cache."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeinfer.memory.pages import PageTable
from pipeinfer.memory.shared_prefixes import MIN_SHARED_TOKENS, find_groups, find_shared_prefixes
from pipeinfer.wire import MAX_SHARED_PREFIXES, PREFIX_UPPER

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


def told(found, slots):
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
    assert told(found, memory.slots) == [([0, 2, 4], MIN_PAGES), ([1, 5], 30)]
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
    groups = told(find_shared_prefixes(memory.table, memory.slots, PAGE), memory.slots)
    lengths = sorted((len(path) for path in paths[::2]), reverse=True)
    assert sorted((pages for _, pages in groups), reverse=True) == lengths[:MAX_SHARED_PREFIXES]
