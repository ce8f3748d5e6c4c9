"""What one measurement took too long does not keep steps of that size from being made."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.engine.step_times import without_outliers
from pipeinfer.step_budget import Targets, mixed_budget
from pipeinfer.step_cost import Prompt, StepCost

MS, US = 10**9, 10**6
# Of Qwen3-14B on an H200: tokens, and what a step of them took; then for 1,000 tokens before.
TIMES = {256: 12.0, 320: 18.0, 384: 16.6, 448: 20.4, 512: 21.2, 640: 26.9, 768: 29.0}
DEPTHS = {256: 1.06, 320: 0.35, 384: 0.55, 448: 0.52, 512: 2.85, 640: 0.77, 768: 0.82}
MEASURED = [(size, round(time * MS), round(DEPTHS[size] * US)) for size, time in TIMES.items()]


def test_a_price_of_depth_that_larger_steps_do_not_have_is_theirs():
    found = without_outliers(MEASURED)
    assert [size[:2] for size in found] == [size[:2] for size in MEASURED]
    assert [size[2] for size in found] == [
        round(price * US) for price in (0.35, 0.35, 0.52, 0.52, 0.77, 0.77, 0.82)
    ]


def test_steps_of_a_size_are_made_although_its_depth_was_measured_too_long():
    def tokens(mixed) -> int:
        cost = StepCost(((1, 7 * MS), (64, 9 * MS)), tuple(mixed))
        budget = mixed_budget(0, 8192, cost, Targets(0.025, 0.5))
        return 8 + budget.prompts(8, 8000, [Prompt(8000, 2000, 1.0)] * 8)

    assert tokens(MEASURED) == 448
    assert tokens(without_outliers(MEASURED)) == 512


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=20))
def test_prices_only_fall_and_no_size_costs_more_than_a_larger_one(prices):
    sizes = [(64 * (at + 1), 10**9, price) for at, price in enumerate(prices)]
    found = [price for *_, price in without_outliers(sizes)]
    assert found == sorted(found)
    assert all(new == min(prices[at:]) for at, new in enumerate(found))
