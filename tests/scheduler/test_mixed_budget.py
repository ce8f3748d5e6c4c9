"""What a step that decodes may hold of prompts, under the policy `mixed`."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from model_engine import ModelEngine
from test_scheduler_core import Pipeline

from pipeinfer.messages import Plan, unpack
from pipeinfer.scheduler.core import SchedulerOptions
from pipeinfer.step_budget import mixed_budget


class Watched(Pipeline):
    """Remembers every plan's counts."""

    def __init__(self, options: SchedulerOptions) -> None:
        self.counts: list[list[int]] = []
        super().__init__(options, ModelEngine(2000, 4, 64, 4096, False))
        receive = self.engine.receive

        def watch(message) -> None:
            if isinstance(message, Plan) and len(message.counts):
                self.counts.append(unpack(message.counts).tolist())
            receive(message)

        self.engine.receive = watch  # type: ignore[method-assign]

    def run(self) -> None:
        while self.deliver():
            pass


def planned(options: SchedulerOptions, running: int, prompts: list[int]) -> list[list[int]]:
    """Counts of the plans made after `prompts` came to `running` requests that decode."""
    pipeline = Watched(options)
    for _ in range(running):
        pipeline.submit([1, 2, 5], 60)
    while not any(counts == [1] * running for counts in pipeline.counts):
        assert pipeline.deliver()
    before = len(pipeline.counts)
    for length in prompts:
        pipeline.submit([5] * length, 1)
    pipeline.run()
    assert all(client.finish for client in pipeline.clients.values())
    return pipeline.counts[before:]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), st.lists(st.integers(1, 90), min_size=1, max_size=6), st.integers(8, 40))
def test_prompts_take_what_decodes_leave_of_the_mixed_budget_and_never_nothing(
    running, prompts, budget
):
    options = SchedulerOptions("mixed", 2, 64, 256, mixed_step_tokens=budget)
    for counts in planned(options, running, prompts):
        decodes = counts.count(1)
        left = sum(counts) - decodes
        assert left <= max(budget - decodes, budget // 4) or decodes <= 1


def test_without_decodes_prompts_take_the_whole_budget():
    pipeline = Watched(SchedulerOptions("mixed", 2, 64, 256, mixed_step_tokens=16))
    pipeline.submit([5] * 300, 1)
    pipeline.run()
    assert pipeline.counts[0] == [256]


def test_the_budget_of_mixed_steps_follows_that_of_all_steps():
    assert mixed_budget(0, 8192) == 512
    assert mixed_budget(0, 1024) == 128
    assert mixed_budget(0, 100) == 100
    assert mixed_budget(300, 8192) == 300
