"""Pages that plans may take: what is promised is there, in whatever order engines say so."""

from __future__ import annotations

from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler_core import pipeline

from pipeinfer.scheduler.engine_state import PageAllowance, PageCredits
from pipeinfer.settings import POLICIES


@settings(max_examples=60, deadline=None)
@given(
    policy=st.sampled_from([*POLICIES]),
    depth=st.integers(1, 3),
    pages=st.sampled_from([14, 20, 30]),
    budget=st.sampled_from([5, 16, 64]),
    caching=st.booleans(),
    chance=st.randoms(use_true_random=False),
)
def test_nothing_is_deferred_where_no_two_prompts_begin_alike(
    policy, depth, pages, budget, caching, chance
):
    """The credits are exact, also where one that was taken back finds its own pages again."""
    overtakes = partial(chance.randint, 0)
    p = pipeline(policy, depth, pages, budget=budget, caching=caching, overtakes=overtakes)
    for i in range(12):
        p.submit([i] * chance.randint(1, 30), 20)
        for _ in range(chance.randint(0, 4)):
            p.deliver()
    p.settle()
    assert p.engine.deferred == 0


@settings(max_examples=25, deadline=None)
@given(
    policy=st.sampled_from([*POLICIES]),
    depth=st.integers(1, 3),
    common=st.sampled_from([1, 64]),
    chance=st.randoms(use_true_random=False),
)
def test_where_there_is_room_for_all_nothing_is_deferred_and_nobody_is_taken_back(
    policy, depth, common, chance
):
    """With a cache, in which half of them find their beginnings."""
    longest, many = 30 + 20, 12
    pages = many * -(-longest // 4)
    overtakes = partial(chance.randint, 0)
    p = pipeline(policy, depth, pages, slots=many, common=common, overtakes=overtakes)
    for i in range(many):
        own = chance.randint(1, 15)
        p.submit([1] * chance.choice((0, 15)) + [2 + i] * own, 20)
        for _ in range(chance.randint(0, 4)):
            p.deliver()
    p.settle()
    assert (p.engine.deferred, p.core.counts["preemptions"]) == (0, 0)


def test_what_a_later_plan_left_stands_when_an_earlier_one_reports():
    credits = PageCredits(page_size=4, pages=20)
    for number in range(3):
        credits.reserve(number, 5)
    assert credits.on_page_counts(1, free=10, evictable=0)
    assert credits.available == 10 - 5
    assert not credits.on_page_counts(0, free=15, evictable=0)
    assert credits.available == 10 - 5
    assert credits.on_page_counts(1, free=10, evictable=0), "the same plan says the same twice"
    assert credits.on_page_counts(2, free=3, evictable=1)
    assert credits.available == 4


@given(start=st.integers(0, 40), left=st.integers(0, 9), size=st.integers(1, 8))
def test_room_is_as_many_tokens_as_the_pages_that_are_left_can_take(start, left, size):
    credits = PageCredits(size, left)
    room = PageAllowance(credits).tokens_that_fit(start)
    assert credits.between(start, start + room) <= left
    assert credits.between(start, start + room + 1) == left + 1
