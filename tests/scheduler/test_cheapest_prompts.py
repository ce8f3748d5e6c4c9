"""What a step that decodes holds of prompts, where nobody waits: the policy `throughput`."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_prefill_budget import LARGE, SMALL, US, Composed, Watched, costs, linear

from pipeinfer.messages import TokenizedRequest
from pipeinfer.offline.llm import batch_defaults
from pipeinfer.params import RequestParams
from pipeinfer.scheduler.core import SchedulerOptions
from pipeinfer.scheduler.engine_state import Slots
from pipeinfer.scheduler.request import Request, request_of
from pipeinfer.step_cost import MIN_PROMPT_TOKENS, Prompt, StepCost, prefill_budget
from pipeinfer.wire import pack

waiting = st.lists(
    st.builds(Prompt, st.integers(1, 3000), st.integers(0, 2000)), min_size=1, max_size=9
)


def prices(cost: StepCost, rows: int, prompts: list[Prompt], worth: float) -> dict[int, float]:
    """{tokens of prompts: picoseconds for each}, by going through the prompts token by token, each
    of which sees those before it and half of itself."""
    before = [at + 0.5 for p in prompts for at in range(p.before, p.before + p.tokens)]
    found: dict[int, float] = {}
    for tokens, time, more in cost.mixed:
        held = min(tokens - rows, len(before))
        if held < min(MIN_PROMPT_TOKENS, len(before)):
            continue
        # Measured with all tokens of one prompt.
        pairs = sum(before[:held]) - tokens * tokens / 2
        found[tokens - rows] = (time + more * pairs / tokens - worth) / held
        if held == len(before):
            break
    return found


@settings(deadline=None)
@given(costs, st.integers(1, 256), st.integers(0, 10**6), waiting, st.integers(0, 300))
def test_a_token_of_a_prompt_costs_as_little_as_in_any_size(cost, rows, context, prompts, left):
    every = sum(prompt.tokens for prompt in prompts)
    alone = max(time for size, time in cost.decodes if size <= rows)
    most, full = cost.decodes[-1]
    most_more = max(more for _, _, more in cost.mixed) + 1  # pairs are counted in whole ones

    def cheapest(found: int, worth: float) -> bool:
        known = prices(cost, rows, prompts, worth)
        if not known:
            return found == MIN_PROMPT_TOKENS
        close = len(prompts) * most_more + 1e-9 * max(map(abs, known.values()))
        return found in known and known[found] <= min(known.values()) + close

    found = prefill_budget(0, 8192, cost).best_rate_prompt_tokens(rows, context, prompts, left)
    beside = cheapest(found, alone) and every <= found * left
    assert beside or cheapest(found, min(alone, rows * full / most))


@pytest.mark.parametrize(
    ("rows", "left", "prompts"),
    [
        # All prompts go beside 1,000 steps that there will be anyway: up to 256 tokens cost little.
        (10, 1000, 256 - 10), (90, 1000, 256 - 90), (128, 1000, 256 - 128),
        # That is too little beside more of them.
        (200, 1000, 384 - 200), (250, 1000, 768 - 250),
        # Others wait for a slot: the more decodes there are, the less is lost beside few prompts.
        (8, 0, 1024 - 8), (64, 0, 1024 - 64), (90, 0, 768 - 90), (250, 0, 768 - 250),
    ],
)  # fmt: skip
def test_prompts_of_a_large_model_go_where_weights_are_read_anyway(rows, left, prompts):
    found = prefill_budget(0, 8192, LARGE).best_rate_prompt_tokens(
        rows, rows * 700, [Prompt(500)] * 40, left
    )
    assert found == prompts


def test_what_does_not_fit_into_the_steps_that_are_left_is_computed_in_full_ones():
    budget = prefill_budget(0, 8192, LARGE)
    prompts = [Prompt(500)] * 40
    assert (
        budget.best_rate_prompt_tokens(128, 0, prompts, steps_left=157) == 128
    )  # 20,096 tokens beside them
    assert budget.best_rate_prompt_tokens(128, 0, prompts, steps_left=156) == 768 - 128


def test_where_nothing_was_measured_it_is_as_many_as_ever():
    for asked, cost in ((0, None), (300, SMALL)):
        budget = prefill_budget(asked, 2048, cost)
        one = budget.prompt_tokens(7, 700, [Prompt(1000)])
        assert budget.best_rate_prompt_tokens(7, 700, [Prompt(1000)], 100) == one


def batch(policy: str, slots: int, requests: int, prompt: int, outputs: int) -> list[Composed]:
    """The plans of a batch with equal requests, whose prompts differ."""
    options = SchedulerOptions(policy, 2, slots, 1024)
    pipeline = Watched(options, linear(900 * US, US // 2, 42 * US // 10, 27_000))
    for number in range(requests):
        pipeline.submit([5 + number] + [5] * (prompt - 1), outputs, min_tokens=outputs)
    pipeline.run()
    assert all(client.finish for client in pipeline.clients.values())
    return pipeline.plans


def test_a_batch_of_short_answers_is_over_after_fewer_and_fuller_steps():
    fast, steady = batch("throughput", 8, 40, 300, 4), batch("mixed", 8, 40, 300, 4)
    for plans in (fast, steady):
        assert sum(plan.prompts for plan in plans) == 40 * 300
    assert len(fast) < 0.8 * len(steady)
    beside = [plan.prompts for plan in fast if plan.decodes and plan.prompts]
    assert max(beside) > max(plan.prompts for plan in steady if plan.decodes)


def test_a_batch_has_that_policy_unless_its_user_asks_for_another_or_for_targets():
    assert batch_defaults({"seed": 3}) == {
        "itl_target": 0.0, "ttft_target": 0.0, "policy": "throughput", "all_graphs_first": True,
        "seed": 3,
    }  # fmt: skip
    assert batch_defaults({"policy": "prefill-first"})["policy"] == "prefill-first"
    assert batch_defaults({"itl_target": 0.02})["policy"] == "mixed"
    assert batch_defaults({"itl_target": 0})["policy"] == "throughput"
    assert batch_defaults({"itl_target": 0.02, "policy": "throughput"})["policy"] == "throughput"


def ended(slots: Slots, prompt: int, most: int, outputs: int, ignore_eos: bool = False) -> None:
    """A request of so many outputs at most has ended after some of them."""
    one = decoding("ended", prompt, most, ignore_eos)
    one.outputs.extend(range(outputs))
    slots.running[one.id] = one
    one.move("finished")
    slots.release(one)


def decoding(name: str, prompt: int, most: int, ignore_eos: bool = False) -> Request:
    """One whose prompt is computed, and that may have `most` outputs."""
    params = RequestParams(max_tokens=most, ignore_eos=ignore_eos)
    one = request_of(TokenizedRequest(name, 1, 0, 0, pack([5] * prompt), params, 0), 0, 0.0)
    one.phase = "running"
    one.admitted_len = one.known_len = one.computed = one.projected = prompt
    one.max_total = prompt + most
    return one


def test_how_long_decodes_go_on_is_guessed_by_those_that_ended():
    slots = Slots()
    rows = [(decoding("a", 20, 1000), 1), (decoding("b", 20, 300), 1)]
    assert slots.remaining_steps(rows) == 1000 and slots.remaining_steps([]) == 0
    for _ in range(100):
        ended(slots, 30, 400, 40)
    assert slots.remaining_steps(rows) == pytest.approx(100, abs=2), "a tenth of what they may have"
    sure = (decoding("c", 20, 250, ignore_eos=True), 1)
    assert slots.remaining_steps([*rows, sure]) == 250
    guessed = slots.remaining_steps(rows)
    ended(slots, 30, 400, 400, ignore_eos=True)
    assert slots.remaining_steps(rows) == guessed, "the model had no part in their lengths"
