"""What one measurement took too long does not keep steps of that size from being made; what is not
measured is near to what would be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.engine.calibrate import (
    SLOWER,
    PageGeometry,
    interpolated,
    measured,
    padded,
    priced,
    slow,
    without_outliers,
)
from pipeinfer.engine.device import HostDevice
from pipeinfer.engine.graphs import Graphs
from pipeinfer.engine.loading import all_find
from pipeinfer.step_cost import MEASURED_TOKENS, Prompt, StepCost, Targets, prefill_budget

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
        budget = prefill_budget(0, 8192, cost, Targets(0.025, 0.5))
        return 8 + budget.prompt_tokens(8, 8000, [Prompt(8000, 2000, 1.0)] * 8)

    assert tokens(MEASURED) == 448
    assert tokens(without_outliers(MEASURED)) == 512


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=20))
def test_prices_only_fall_and_no_size_costs_more_than_a_larger_one(prices):
    sizes = [(64 * (at + 1), 10**9, price) for at, price in enumerate(prices)]
    found = [price for *_, price in without_outliers(sizes)]
    assert found == sorted(found)
    assert all(new == min(prices[at:]) for at, new in enumerate(found))


def test_steps_that_take_longer_than_larger_ones_are_padded_to_those():
    """Of Qwen3-14B on an H100."""
    times = {256: 13.8, 320: 20.2, 384: 17.0, 448: 28.9, 512: 21.4, 640: 30.0, 768: 30.6}
    decodes = ((1, 10 * MS),)
    cost = StepCost(decodes, tuple((n, round(t * MS), n) for n, t in times.items()), 64_000)
    assert slow(cost) == {320, 448}
    found = padded(cost, slow(cost))
    assert (found.decodes, found.kv_token) == (cost.decodes, cost.kv_token)
    assert found.mixed == tuple(
        (n, round({320: 17.0, 448: 21.4}.get(n, t) * MS), n) for n, t in times.items()
    )


@given(st.lists(st.integers(10**6, 10**10), min_size=1, max_size=20))
def test_no_step_takes_much_longer_than_a_larger_one_and_the_largest_stays(times):
    sizes = tuple((64 * (at + 1), time, 0) for at, time in enumerate(times))
    cost = StepCost(((1, 1),), sizes)
    few = slow(cost)
    found = padded(cost, few)
    assert sizes[-1][0] not in few and slow(found) == frozenset()
    for at, ((tokens, time, _), (_, new, _)) in enumerate(zip(sizes, found.mixed, strict=True)):
        assert new == (found.mixed[at + 1][1] if tokens in few else time)
        assert new <= time and new * 100 <= min(times[at:]) * SLOWER + 100
        assert (tokens in few) == (new < time)


def test_ranks_leave_out_only_what_all_of_them_find_slow():
    finds = [{320, 448}, {320, 640}, {320, 448, 640}]

    asked = iter(MEASURED_TOKENS)

    def smallest(value: int) -> int:
        """As the first rank hears it."""
        tokens = next(asked)
        assert value == (tokens in finds[0])
        return min(tokens in others for others in finds)

    assert all_find(smallest, finds[0]) == {320}
    assert all_find(int, finds[0]) == {320, 448}


def test_sizes_that_no_prompt_is_deep_in_have_the_price_of_others_by_the_token():
    """Else the largest would have none, and with it all others."""
    sizes = [(512, 9, None), (1024, 10, 300), (2048, 20, 620), (4096, 40, None), (8192, 80, None)]
    found = priced(sizes)
    assert [size[:2] for size in found] == [size[:2] for size in sizes]
    assert [more for *_, more in found] == [155, 300, 620, 1240, 2480]
    assert without_outliers(found) == found
    assert [more for *_, more in priced([(64, 5, None), (128, 6, None)])] == [0, 0]


# Of Qwen3-0.6B on an H200, of prompts of at most 32,768 tokens.
EACH = (
    (2048, 5_054_000_000, 598_000), (3072, 7_605_000_000, 1_041_000),
    (4096, 10_196_000_000, 1_221_000), (6144, 16_797_000_000, 2_220_000),
    (8192, 24_574_000_000, 2_613_000),
)  # fmt: skip


def test_what_is_not_measured_is_near_to_what_a_gpu_took():
    every = [size[0] for size in EACH]
    found = interpolated([EACH[0], EACH[-1]], every, 32_768)
    assert [size[0] for size in found] == every
    assert found[0] == EACH[0] and found[-1] == EACH[-1]
    for (_, time, more), (_, took, deep) in zip(found, EACH, strict=True):
        assert abs(time / took - 1) < 0.015 and abs(more / deep - 1) < 0.15


@given(
    st.integers(0, 10**9),
    st.integers(0, 10**6),
    st.integers(0, 10**3),
    st.sampled_from([1000, 2048, 4096, 10_000]),
    st.lists(st.sampled_from(MEASURED_TOKENS), min_size=2, unique=True),
    st.data(),
)
def test_steps_between_those_that_were_measured_lie_on_a_curve(
    fixed, each, pair, longest, sizes, data
):
    """A GPU whose steps take so long, and that long for each token and for each pair of tokens of a
    prompt; steps are of as few prompts as may be, all alike."""
    sizes = sorted(sizes)

    def step(tokens):
        more = pair * tokens if tokens < longest else 0
        prompts = -(-tokens // longest)
        time = fixed + each * tokens + pair * tokens * tokens // (2 * prompts)
        return tokens, time, more

    inner = st.sets(st.sampled_from(sizes[1:-1])) if sizes[1:-1] else st.just(set[int]())
    known = sorted({sizes[0], sizes[-1], *data.draw(inner)})
    found = interpolated([step(tokens) for tokens in known], sizes, longest)
    assert [size[0] for size in found] == sizes
    for size in found:
        low = max(one for one in known if one <= size[0])
        high = min(one for one in known if one >= size[0])
        if low < longest or low == high:
            assert abs(size[1] - step(size[0])[1]) <= 2 + size[1] // 10**9, (size, step(size[0]))
        else:  # nobody knows what pairs cost
            times = sorted(step(end)[1] for end in (low, high))
            assert times[0] - 2 <= size[1] <= times[1] + 2


@given(rows=st.integers(1, 6), pages=st.integers(2, 40), tokens=st.integers(1, 9000))
def test_no_step_is_measured_with_more_rows_or_longer_ones_than_there_may_be(rows, pages, tokens):
    def run(step) -> float:
        assert len(step.counts) <= rows
        assert (step.starts + step.counts).max() <= pages * 64
        return 1e-3

    frame, graphs = PageGeometry(pages, 64), Graphs(HostDevice())
    measured(graphs, (rows, max(tokens, rows)), frame, 10_000, lambda _shape, step: run(step), run)
