"""Every page has one owner, their order is a function of the calls, and the page table tells what
changed.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeinfer.memory.pages import IntegrityError, PageAllocator, PageTable


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


def told(table: PageTable) -> list[tuple[int, int, int]]:
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
    assert told(table) == [(0, 0, 1), (0, 1, 2), (0, 2, 3), (1, 0, 4)]
    assert told(table) == []
    table.set_prefix(0, pages(1, 7))
    assert told(table) == [(0, 1, 7)], "the first is known"


def test_a_row_that_was_emptied_is_told_anew_whatever_its_pages_are():
    table = PageTable(1, 4)
    for end in (table.reset, lambda: table.clear(0)):
        table.append(pages(0), pages(3), pages(1, 2, 3))
        told(table)
        end()
        table.set_prefix(0, pages(1, 2, 3))
        assert told(table) == [(0, 0, 1), (0, 1, 2), (0, 2, 3)]
        table.clear(0)


def test_reset_empties_all_rows_and_tells_nothing_of_what_was_in_them():
    table = PageTable(2, 4)
    table.set_prefix(0, pages(1))
    table.append(pages(0, 1), pages(1, 2), pages(2, 3, 4))
    table.reset()
    assert told(table) == [] and table.num_owned == 0
    assert not table.num_pages.any() and not table.num_shared.any() and not table._rows.any()
