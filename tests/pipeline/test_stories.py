"""Stories from seeds: each kind of event is reached, and faults that were put in are found."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from simulated import Simulation
from simulated_engine import PAGE_SIZE, POISON, SLOTS
from stories import EVENTS, Story, Watch, reached

from pipeinfer.engine.step_builder import constrained
from pipeinfer.grammars.masks import RowSource
from pipeinfer.messages import Admit
from pipeinfer.scheduler import core
from pipeinfer.scheduler.engine_state import PageCredits
from pipeinfer.scheduler.policies import StepComposer
from pipeinfer.scheduler.queue import GrammarQueue
from pipeinfer.scheduler.request import Request
from pipeinfer.step import Constrained

FEW = (
    124,
    130,
    131,
    132,
    137,
    139,
    144,
    149,
    150,
    152,
)  # seeds of stories, of which each event must be part of one
WAVES = 3  # of requests, one after the other
ENOUGH = (119, 124, 131, 48, *range(30, 90))  # seeds of stories, in one of which a fault is found


def test_stories_reach_every_kind_of_event_and_end_well():
    found = reached(FEW)
    assert set(found) == set(EVENTS)
    assert min(found.values()) > 0, found


def test_without_surprises_there_are_pages_for_what_is_planned():
    """No deaths, nothing shared: what is promised is there, and what fits is not taken back."""
    preempted = deferred = 0
    for seed in range(12):
        random, seen = Random(seed), Counter()
        pages, many = random.choice([12, 20, 60]), random.randint(2, SLOTS)
        s = Quiet(random, seen, pages)
        firsts = iter(random.sample(range(POISON), WAVES * many))  # nobody begins like another
        most = 0
        for _ in range(WAVES):
            prompts = [[next(firsts), *range(random.randint(0, 18))] for _ in range(many)]
            for prompt in prompts:
                s.submit(prompt, max_tokens=25)
            most = max(most, sum(-(-(len(prompt) + 24) // PAGE_SIZE) for prompt in prompts))
            s.run()
        s.check()
        if most <= pages:
            assert not seen["preemption"], f"story {seed} has enough pages"
            plans = s.processes["scheduler-0"].core.stats()["plans_total"]
            assert plans <= WAVES * (25 + 2 * many), f"one after the other, in {plans} plans"
        preempted, deferred = preempted + seen["preemption"], deferred + seen["deferral"]
    assert preempted, "there were always enough"
    assert not deferred, f"{deferred} steps were promised pages that were not there"


class Quiet(Simulation):
    """One group, watched."""

    def __init__(self, random: Random, seen: Counter[str], pages: int) -> None:
        self._watch = Watch(seen)
        super().__init__(random, pages=pages)

    def heard(self, stage, event, sends) -> None:
        if stage == "scheduler-0":
            flying = self.processes[stage].core.stats()["in_flight"]
            self._watch.heard(event, sends, self.now, flying)


def told_by(story) -> str:
    """What goes wrong in a story, or nothing."""
    try:
        story()
    except (AssertionError, ValueError, KeyError, IndexError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Forgetful(core.Deadlines):
    def take_due(self, now):
        return iter(())


def hasty(step: StepComposer, request: Request) -> bool:
    """As StepComposer._may_admit, but steps in flight do not count."""
    steps, request.steps_in_flight = request.steps_in_flight, 0
    try:
        return may_admit(step, request)
    finally:
        request.steps_in_flight = steps


may_admit = StepComposer._may_admit
jump = Request.jump


def from_the_beginning(admit: Admit) -> Constrained:
    """As requests.constrained, but what came out before the admission does not count."""
    return replace(constrained(admit), output=np.empty(0, dtype=np.int32))


FAULTS = {
    "a grammar begins anew with every admission": lambda patch: patch.setattr(
        "pipeinfer.engine.step_builder.constrained", from_the_beginning
    ),
    "who waits for a grammar is left alone when it ends": lambda patch: patch.setattr(
        GrammarQueue, "remove", lambda *_: None
    ),
    "a new engine is not asked for grammars": lambda patch: patch.setattr(
        GrammarQueue, "begin", lambda *_: None
    ),
    "somebody is admitted anew before the last step reported": lambda patch: patch.setattr(
        StepComposer, "_may_admit", hasty
    ),
    "deadlines are dropped": lambda patch: patch.setattr(
        "pipeinfer.scheduler.core.Deadlines", Forgetful
    ),
    "outputs are released that were known at admission": lambda patch: patch.setattr(
        Request,
        "sampled_ids",
        property(lambda r: r.outputs[max(r.known_len - r.prompt_len - 1, 0) :]),
    ),
    "the last output is not confirmed": lambda patch: patch.setattr(
        Request,
        "sampled_ids",
        property(lambda r: r.outputs[r.known_len - r.prompt_len :] + r.outputs[-1:]),
    ),
    "an engine is told of a jump without its first token": lambda patch: patch.setattr(
        Request, "jump", lambda request, count: jump(request, count)[1:]
    ),
    "what a request was told is not read by its grammar": lambda patch: patch.setattr(
        RowSource, "feed_from", lambda *_: ""
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_in_one_of_the_stories(fault, monkeypatch):
    FAULTS[fault](monkeypatch)
    assert any(told_by(Story(seed).tell) for seed in ENOUGH)


PAGES_WRONG = {
    "what plans take is forgotten": lambda patch: patch.setattr(
        PageCredits, "reserve", lambda *_: None
    ),
    "what requests grow by is not counted": lambda patch: patch.setattr(
        PageCredits, "between", lambda *_: 0
    ),
}


@pytest.mark.parametrize("fault", PAGES_WRONG)
def test_pages_that_are_counted_wrongly_are_noticed(fault, monkeypatch):
    PAGES_WRONG[fault](monkeypatch)
    assert told_by(test_without_surprises_there_are_pages_for_what_is_planned)
