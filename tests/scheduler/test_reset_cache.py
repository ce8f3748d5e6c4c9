"""A reset of the prefix cache goes with the next plan, once, and comes before work behind it."""

from __future__ import annotations

import pytest
from model_engine import ModelEngine
from test_scheduler_core import Pipeline

from pipeinfer.messages import CacheReset, Plan, ResetCache
from pipeinfer.scheduler.core import SchedulerOptions

ASKED = ResetCache("reset-1", gateway=2, detokenizer=1)


class Watched(Pipeline):
    """Keeps the plans and the answers that were sent."""

    def __init__(self, depth: int = 2) -> None:
        self.plans: list[Plan] = []
        self.told: list[tuple[str, CacheReset]] = []
        engine = ModelEngine(pages=64, page_size=4, slots=4, budget=16, caching=True)
        super().__init__(SchedulerOptions(overlap_depth=depth), engine)

    def feed(self, message) -> list:
        sends = super().feed(message)
        for send in sends:
            if isinstance(send.message, Plan):
                self.plans.append(send.message)
            elif isinstance(send.message, CacheReset):
                self.told.append((send.to, send.message))
        return sends


def test_an_idle_group_resets_at_once_and_says_so_to_the_gateway_that_asked():
    pipeline = Watched()
    pipeline.settle()
    pipeline.feed(ASKED)
    [plan] = pipeline.plans
    assert plan.reset and not plan.slots
    assert pipeline.told == [("detokenizer-1", CacheReset("reset-1", 2, 0))]
    pipeline.submit([1, 2, 3], 4)
    pipeline.settle()
    assert pipeline.clients["r0"].finish is not None
    assert sum(plan.reset for plan in pipeline.plans) == 1


@pytest.mark.parametrize("depth", [1, 2])
def test_a_busy_group_resets_with_a_plan_that_no_later_work_comes_before(depth: int):
    pipeline = Watched(depth)
    pipeline.settle()
    pipeline.submit([1, 2, 3], 50)
    before = len(pipeline.plans)
    assert before == depth, "as many steps are in flight as may be"
    pipeline.feed(ASKED)
    pipeline.submit([5, 6, 7], 4)
    pipeline.settle()
    [reset] = [plan.number for plan in pipeline.plans if plan.reset]
    [came] = [p.number for p in pipeline.plans for a in p.admits if a.request_id == "r1"]
    assert before <= reset <= came


def test_without_engines_the_first_plan_of_the_next_one_resets():
    """It may begin with pages that an engine before has left."""
    pipeline = Watched()
    pipeline.feed(ASKED)
    assert not pipeline.plans and len(pipeline.told) == 1
    pipeline.settle()
    assert [plan.reset for plan in pipeline.plans] == [True]


@pytest.mark.parametrize("applied", [False, True])
def test_a_reset_whose_engine_is_lost_is_repeated_unless_it_was_applied(applied: bool):
    pipeline = Watched()
    pipeline.settle()
    pipeline.submit([1] * 9, 4)
    pipeline.settle()
    pipeline.plans.clear()
    pipeline.feed(ASKED)
    if applied:
        pipeline.submit([2] * 9, 4)
        pipeline.settle()
    pipeline.engine.crash(lambda prefix: True)
    pipeline.submit([1] * 9, 4)
    pipeline.settle()
    epochs = [plan.epoch for plan in pipeline.plans if plan.reset]
    assert epochs == [1] if applied else [1, 2]
