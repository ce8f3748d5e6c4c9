"""The page allocator: every page has one owner, and the order is a function of the calls."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeinfer.memory.allocator import PageAllocator
from pipeinfer.memory.errors import IntegrityError


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
