"""What a step that decodes may hold of prompts, under the policy `mixed`."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_engine import ModelEngine
from test_scheduler_core import Pipeline

from pipeinfer.messages import CHANNELS, Plan, TokenizedRequest
from pipeinfer.params import RequestParams
from pipeinfer.scheduler.core import SchedulerCore, SchedulerOptions
from pipeinfer.step_cost import (
    MIN_PROMPT_ROWS,
    MIN_PROMPT_TOKENS,
    SHORT_ROWS,
    SHORT_SLOWDOWN_PERCENT,
    SHORT_TOKENS,
    SLOWDOWN_PERCENT,
    Prompt,
    StepCost,
    max_graph_tokens,
    prefill_budget,
)
from pipeinfer.trace.snapshot import restore, snapshot
from pipeinfer.wire import pack, unpack

US = 10**6  # picoseconds of a microsecond
SIZES = (*range(128, 513, 64), 640, 768, 1024)


def linear(fixed: int, row: int, token: int, kv_token: int, more: int = 0) -> StepCost:
    """Of a device on which everything costs so many picoseconds each."""
    return StepCost(
        tuple((rows, fixed + rows * row) for rows in (1, 8, 16, 32, 64, 128, 256)),
        tuple((tokens, fixed + tokens * token, more) for tokens in SIZES),
        kv_token,
    )


# About 0.6B on an H200: 0.9 ms to read the weights, 27 ns for a token of a decode's context.
SMALL = linear(900 * US, US // 2, 42 * US // 10, 27_000, 60_000)
costs = st.builds(
    linear, st.integers(1, 10**10), st.integers(0, 10**8), st.integers(1, 10**8),
    st.integers(0, 10**6), st.integers(0, 10**6),
)  # fmt: skip
decodes = st.integers(1, 256), st.integers(0, 10**6)
depths = st.integers(0, 30_000)


@dataclass
class Composed:
    """A plan: rows that decode, tokens before them, and tokens of prompts, of which the first has
    `depth` before."""

    decodes: int
    context: int
    prompts: int
    depth: int = 0


class Watched(Pipeline):
    """Remembers what every plan holds, as its engine sees it."""

    def __init__(self, options: SchedulerOptions, cost: StepCost | None = None) -> None:
        self.plans: list[Composed] = []
        super().__init__(options, ModelEngine(6000, 4, 64, 4096, False, cost))
        receive = self.engine.receive

        def watch(message) -> None:
            if isinstance(message, Plan) and len(message.counts):
                self.plans.append(self._composed(message))
            receive(message)

        self.engine.receive = watch  # type: ignore[method-assign]

    def _composed(self, plan: Plan) -> Composed:
        """The engine applies plans at once, so that its slots are what the scheduler projects."""
        found = Composed(0, 0, 0)
        admitted = {admit.slot for admit in plan.admits}
        for slot, count in zip(unpack(plan.slots).tolist(), unpack(plan.counts), strict=True):
            known = None if slot in admitted else self.engine.slots[slot]
            if known is not None and known.computed >= known.known:
                found.decodes += 1
                found.context += known.computed
            else:
                if known is not None and not found.prompts:
                    found.depth = known.computed
                found.prompts += int(count)
        return found

    def run(self) -> None:
        while self.deliver():
            pass


def planned(
    options: SchedulerOptions,
    running: int,
    prompts: list[int],
    cost: StepCost | None = None,
    before: int = 3,
) -> list[Composed]:
    """Plans with decodes, made after `prompts` came to `running` requests that decode after
    `before` tokens."""
    pipeline = Watched(options, cost)
    for _ in range(running):
        pipeline.submit([5] * before, 60, min_tokens=60)
    while not any(plan.decodes == running for plan in pipeline.plans):
        assert pipeline.deliver()
    known = len(pipeline.plans)
    for other, length in enumerate(prompts):
        pipeline.submit([6 + other] + [5] * (length - 1), 1)
    pipeline.run()
    assert all(client.finish for client in pipeline.clients.values())
    return [plan for plan in pipeline.plans[known:] if plan.decodes]


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 30), st.lists(st.integers(1, 90), min_size=1, max_size=6), st.integers(8, 40))
def test_prompts_take_what_decodes_leave_of_the_prefill_budget_and_never_nothing(
    running, prompts, budget
):
    options = SchedulerOptions("mixed", 2, 64, 256, mixed_step_tokens=budget)
    for plan in planned(options, running, prompts):
        assert plan.prompts <= max(budget - plan.decodes, budget // 4)


def test_without_decodes_prompts_take_the_whole_budget():
    pipeline = Watched(SchedulerOptions("mixed", 2, 64, 256, mixed_step_tokens=16), SMALL)
    pipeline.submit([5] * 300, 1)
    pipeline.run()
    assert pipeline.plans[0] == Composed(0, 0, 256)


def test_the_budget_of_mixed_steps_follows_that_of_all_steps():
    assert prefill_budget(0, 8192).tokens == max_graph_tokens(512, 8192) == 512
    assert prefill_budget(0, 1024).tokens == 128
    assert prefill_budget(0, 100).tokens == max_graph_tokens(0, 100) == 100
    assert prefill_budget(300, 8192).tokens == 300
    assert prefill_budget(300, 100).tokens == max_graph_tokens(300, 100) == 100


@given(costs, *decodes, depths)
def test_a_step_with_prompts_takes_at_most_the_promised_part_longer(cost, rows, context, depth):
    prompts = prefill_budget(0, 8192, cost).prompt_tokens(rows, context, [Prompt(1, depth)])
    assert MIN_PROMPT_ROWS <= prompts <= max(SIZES[-1] - rows, MIN_PROMPT_TOKENS)
    times = {tokens: time + more * depth for tokens, time, more in cost.mixed}
    alone = {rows: max(time for size, time in cost.decodes if size <= rows)
             for rows in (rows, SHORT_ROWS)}  # fmt: skip
    found, read = rows + prompts, context * cost.kv_token
    own = found in times and times[found] + read <= (alone[rows] + read) * SLOWDOWN_PERCENT / 100
    begun = {tokens: time for tokens, time, _ in cost.mixed}
    short = found in times and begun[found] <= alone[SHORT_ROWS] * SHORT_SLOWDOWN_PERCENT / 100
    short = short and found <= SHORT_TOKENS
    least = next((time for size, time, _ in cost.mixed if size >= rows + MIN_PROMPT_TOKENS), 0)
    like_the_fewest = found in begun and begun[found] <= least * SLOWDOWN_PERCENT / 100
    assert own or short or prompts <= MIN_PROMPT_TOKENS or like_the_fewest


@given(costs, *decodes, depths, st.integers(0, 10**5))
def test_prompts_get_more_beside_longer_contexts_and_less_at_their_ends(
    cost, rows, context, depth, more
):
    budget = prefill_budget(0, 8192, cost)
    found = budget.prompt_tokens(rows, context, [Prompt(1, depth)])
    assert budget.prompt_tokens(rows, context + more, [Prompt(1, depth)]) >= found
    assert budget.prompt_tokens(rows, context, [Prompt(1, depth + more)]) <= found


@pytest.mark.parametrize(
    ("rows", "context", "depth", "prompts"),
    [
        (1, 300, 0, 256 - 1),
        (64, 64 * 400, 0, 256 - 64),
        (64, 64 * 400, 3000, 256 - 64),
        (64, 64 * 400, 30_000, 256 - 64),
        (64, 64 * 4000, 0, 768 - 64),
        (256, 256 * 850, 4000, 768 - 256),
    ],
)
def test_what_prompts_get_beside_the_decodes_of_a_small_model(rows, context, depth, prompts):
    assert (
        prefill_budget(0, 8192, SMALL).prompt_tokens(rows, context, [Prompt(1, depth)]) == prompts
    )


# Of 14B on an H200, as measured, in microseconds: products of 257 to 320 rows take half as long
# again as those of 256, and longer than those of 384.
LARGE = StepCost(
    tuple((rows, time * US) for rows, time in (
        (1, 7388), (32, 8067), (64, 8283), (96, 8900), (128, 9034), (192, 11199), (256, 12143))),
    tuple((tokens, time * US, 0) for tokens, time in (
        (128, 9208), (192, 11155), (256, 11943), (320, 17815), (384, 16607), (448, 20433),
        (512, 21344), (768, 29459), (1024, 39013))),
    47_000,
)  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "prompts"),
    [(8, 248), (64, 192), (150, 106), (200, 56), (224, 32), (225, 448 - 225), (256, 512 - 256)],
)
def test_steps_end_where_the_device_takes_far_longer_for_a_few_tokens_more(rows, prompts):
    assert prefill_budget(0, 8192, LARGE).prompt_tokens(rows, rows * 700) == prompts


def test_steps_that_take_long_to_launch_hold_as_many_tokens_as_take_no_longer():
    """Without graphs of prompts: 20 ms for whatever a step holds, where decodes take 1."""
    cost = StepCost(((1, 900 * US), (64, 1000 * US)), tuple((n, 20_000 * US, 0) for n in SIZES))
    assert prefill_budget(0, 8192, cost).prompt_tokens(64, 64 * 400) == SIZES[-1] - 64


def test_what_a_user_asks_for_comes_before_what_was_measured():
    assert prefill_budget(300, 8192, SMALL).prompt_tokens(64, 10**6) == 300 - 64


@settings(max_examples=10, deadline=None)
@given(
    st.integers(1, 30), st.integers(1, 100), st.sampled_from((27_000, 500_000)),
    st.sampled_from((0, 200_000)),
)  # fmt: skip
def test_each_step_is_cut_by_what_its_own_rows_read(running, before, kv_token, more):
    cost = linear(900 * US, US // 2, 42 * US // 10, kv_token, more)
    options = SchedulerOptions("mixed", 2, 64, 2048)
    plans = planned(options, running, [1500, 900, 1200], cost, before)
    whole = [plan for plan in plans if plan.prompts]
    assert whole
    for plan in whole[:-1]:  # the last has what is left
        wanted = prefill_budget(0, 2048, cost).prompt_tokens(
            plan.decodes, plan.context, [Prompt(1, plan.depth)]
        )
        assert plan.prompts == wanted, plan


def test_a_scheduler_hears_what_was_measured_and_keeps_it_in_a_snapshot():
    options = SchedulerOptions("mixed", 2, 64, 2048)
    hello = ModelEngine(100, 4, 64, 2048, False, SMALL).hello()
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(hello), type=CHANNELS["result"])
    assert sent == hello and sent.step_cost == SMALL
    core, fresh = Watched(options, SMALL), SchedulerCore(options)
    core.submit([5] * 300, 40, min_tokens=40)
    for _ in range(10):
        core.deliver()
    restore(fresh, snapshot(core.core))
    # How much of a prompt goes beside a decode is what they know of the times of steps.
    late = TokenizedRequest("late", 1, 0, 0, pack([6] * 1500), RequestParams(max_tokens=4), 0)
    for following in (late, core.engine.outbox.popleft()):
        now = core.core.handle(following, core.now)
        assert fresh.handle(following, core.now) == now
    [plan] = [send.message for send in now if isinstance(send.message, Plan)]
    wanted = prefill_budget(0, 2048, SMALL).prompt_tokens(1, 300, [Prompt(1500)])
    assert max(unpack(plan.counts)) == wanted < 1500
