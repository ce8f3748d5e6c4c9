"""How long steps with decodes get while prompts wait: --itl-target and --ttft-target."""

from __future__ import annotations

import sys
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_prefill_budget import US, Watched, linear

from pipeinfer.scheduler.core import SchedulerOptions
from pipeinfer.step_cost import PER_SECOND, PrefillBudget, Prompt, StepCost, Targets, prefill_budget

SIZES = (*range(128, 513, 64), 640, 768, 1024, 1536, 2048, 4096, 6144, 8192)


def device(fixed: int, row: int, token: int, kv_token: int, more: int = 0) -> StepCost:
    """Whose attention takes `more` for each pair of tokens of a prompt."""
    decodes = linear(fixed, row, token, kv_token).decodes
    sizes = ((n, fixed + n * token + more * n * n // 2, more * n) for n in SIZES)
    return StepCost(decodes, tuple(sizes), kv_token)


# About 0.6B on an H200.
GPU = device(900 * US, US // 2, 18 * US // 10, 31_000, 310)
devices = st.builds(
    device, st.integers(1, 10**10), st.integers(0, 10**8), st.integers(1, 10**8),
    st.integers(0, 10**6), st.integers(0, 10**4),
)  # fmt: skip
prompts = st.lists(
    st.builds(Prompt, st.integers(1, 9000), st.integers(0, 20_000), st.floats(0, 2)),
    min_size=1, max_size=12,
)  # fmt: skip
beside = st.integers(1, 256), st.integers(0, 10**6)
targets = st.builds(Targets, st.sampled_from((0.0, 0.005, 0.025, 0.2)), st.floats(0.05, 3.0))


def spared(cost: StepCost, rows: int, context: int, waiting: list[Prompt]) -> int:
    """What prompts get however few they are."""
    return prefill_budget(0, 8192, cost).prompt_tokens(rows, context, waiting)


def taken(cost: StepCost, tokens: int, rows: int, context: int, waiting: list[Prompt]) -> float:
    """Seconds of such a step, each token of a prompt counted by itself."""
    before = list(chain.from_iterable(range(p.before, p.before + p.tokens) for p in waiting))
    time, more = next((time, more) for size, time, more in cost.mixed if size == tokens)
    pairs = sum(before[: tokens - rows]) - tokens * tokens / 2
    return (time + context * cost.kv_token + more * pairs / tokens) / PER_SECOND


@settings(deadline=None)
@given(devices, *beside, prompts, targets)
def test_a_step_is_the_shortest_in_which_all_are_in_time_or_the_longest_within_the_target(
    cost, rows, context, waiting, asked
):
    found = prefill_budget(0, 8192, cost, asked).prompt_tokens(rows, context, waiting)
    least = spared(cost, rows, context, waiting)
    assert found >= least
    all_of_them = sum(prompt.tokens for prompt in waiting)
    held = next((size for size in SIZES if size - rows >= all_of_them), SIZES[-1])
    times = {
        size: taken(cost, size, rows, context, waiting) for size in SIZES if rows < size <= held
    }
    close = 1e-9 + 1e-6 * max(times.values(), default=0)  # of whole picoseconds and halves
    within = {n: t for n, t in times.items() if not asked.itl or t <= asked.itl + close}
    if found > least:
        assert found + rows in within, "the target of streams holds"
    if found + rows in times and found > least:
        sums, pace = 0, 0.0
        for prompt in waiting:
            sums += prompt.tokens
            left = asked.ttft - prompt.age
            pace = max(pace, sums / left if left > 0 else float("inf"))
        enough = [n for n, t in within.items() if (n - rows) / t >= pace * (1 + 1e-6)]
        if enough:
            assert times[found + rows] <= min(times[n] for n in enough) + 2 * close
        elif not any((n - rows) / t >= pace * (1 - 1e-6) for n, t in within.items()):
            surely = [n for n, t in times.items() if not asked.itl or t <= asked.itl - close]
            assert found + rows >= max(surely, default=0)


@pytest.mark.parametrize("tokens", [100, 1000, 4000, 8000])
def test_one_prompt_that_comes_is_no_reason_for_longer_steps(tokens):
    waiting = [Prompt(tokens)]
    usual = spared(GPU, 64, 64 * 500, waiting)
    assert (
        prefill_budget(0, 8192, GPU, Targets(0.025, 0.5)).prompt_tokens(64, 64 * 500, waiting)
        == usual
    )


def test_a_server_full_of_long_prompts_computes_them_nearly_at_the_full_rate():
    budget = prefill_budget(0, 8192, GPU, Targets(0.025, 0.5))
    waiting = [Prompt(8000) for _ in range(64)]
    found = budget.prompt_tokens(8, 8 * 8000, waiting)
    seconds = taken(GPU, found + 8, 8, 8 * 8000, waiting)
    assert 0.015 < seconds <= 0.025
    alone = taken(GPU, 8192, 0, 0, waiting)
    assert found / seconds > 0.85 * 8192 / alone
    assert found > 8 * spared(GPU, 8, 8 * 8000, waiting)


def test_without_a_target_of_streams_steps_may_be_as_long_as_they_can():
    budget = prefill_budget(0, 8192, GPU, Targets(0.0, 0.5))
    assert budget.prompt_tokens(8, 8 * 8000, [Prompt(8000) for _ in range(64)]) == 8192 - 8


def test_without_a_target_of_prompts_nothing_is_looked_ahead():
    budget = prefill_budget(0, 8192, GPU, Targets(0.025, 0.0))
    waiting = [Prompt(8000, 0, 99.0) for _ in range(64)]
    assert not budget.looks_ahead
    assert budget.prompt_tokens(8, 8 * 8000, waiting) == spared(GPU, 8, 8 * 8000, waiting)
    assert not PrefillBudget(128, None, None, Targets(0.025, 0.5)).looks_ahead, "nothing is known"


@given(devices, *beside, prompts, st.integers(1, 10**6))
def test_what_waits_behind_makes_no_step_shorter_where_any_length_will_do(
    cost, rows, context, waiting, behind
):
    budget = prefill_budget(0, 8192, cost, Targets(0.0, 0.5))
    late = [prompt._replace(age=1.0) for prompt in waiting]
    found = budget.prompt_tokens(rows, context, late)
    assert budget.prompt_tokens(rows, context, [*late, Prompt(behind)]) >= found


def test_what_the_targets_allow_is_what_a_server_full_of_prompts_does():
    targets = Targets(0.025, 0.5)
    tokens, rate = prefill_budget(0, 8192, GPU, targets).within_itl_target()
    waiting = [Prompt(8192)]
    assert taken(GPU, tokens, 64, 64_000, waiting) <= 0.025
    assert rate == pytest.approx((tokens - 64) / taken(GPU, tokens, 64, 64_000, waiting), rel=1e-3)
    assert prefill_budget(0, 8192, GPU, Targets(0.001, 0.5)).within_itl_target() == (0, 0.0)
    assert prefill_budget(0, 8192).within_itl_target() == (0, 0.0)


def hurried(age: float, asked: Targets, prompts: int = 12, tokens: int = 1000) -> list[int]:
    """Prompt tokens of the steps beside 8 streams after so many prompts came, and the engine said
    nothing for `age` seconds."""
    pipeline = Watched(SchedulerOptions("mixed", 2, 64, 8192, targets=asked), BATCH)
    for _ in range(8):
        pipeline.submit([5] * 3, 60, min_tokens=60)
    while not any(plan.decodes == 8 for plan in pipeline.plans):
        assert pipeline.deliver()
    known = len(pipeline.plans)
    for other in range(prompts):
        pipeline.submit([6 + other] + [5] * (tokens - 1), 1)
    pipeline.now += age
    pipeline.run()
    assert all(client.finish for client in pipeline.clients.values())
    return [plan.prompts for plan in pipeline.plans[known:] if plan.decodes and plan.prompts]


BATCH = linear(900 * US, US // 2, 42 * US // 10, 27_000)


def test_prompts_that_have_waited_long_get_longer_steps():
    asked = Targets(0.025, 0.5)
    calm, late = hurried(0.0, Targets()), hurried(2.0, asked)
    assert max(calm) < 400 and late[1] == 1024 - 8, (calm, late)
    assert hurried(0.0, Targets(0.025, 60.0)) == calm, "nobody is late"
    assert len(late) < len(calm)


def test_looking_ahead_costs_the_same_however_many_wait():
    """In Python function calls: for 200 and for 3,000 prompts behind."""

    def calls(waiting: int) -> int:
        pipeline = Watched(
            SchedulerOptions("mixed", 2, 64, 2048, targets=Targets(0.025, 0.5)), BATCH
        )
        for _ in range(8):
            pipeline.submit([5] * 3, 60, min_tokens=60)
        while not any(plan.decodes == 8 for plan in pipeline.plans):
            assert pipeline.deliver()
        for other in range(waiting):
            pipeline.submit([6 + other] + [5] * 199, 1)
        pipeline.deliver()
        count = 0

        def profile(_frame, event, _arg):
            nonlocal count
            count += event == "call"

        message = pipeline.engine.outbox.popleft()
        sys.setprofile(profile)
        try:
            sends = pipeline.core.handle(message, pipeline.now)
        finally:
            sys.setprofile(None)
        assert any(send.channel == "plan" for send in sends)
        return count

    assert calls(3_000) <= calls(200) * 1.2 + 20


def test_a_target_that_the_decodes_alone_exceed_changes_nothing():
    assert hurried(2.0, Targets(0.0005, 0.5)) == hurried(2.0, Targets())


def test_many_short_prompts_count_though_few_of_them_are_looked_at():
    few, many = (hurried(0.0, Targets(0.025, 0.05), count, 10) for count in (40, 1200))
    assert max(few) < 400 < max(many)
