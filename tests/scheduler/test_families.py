"""Requests that belong together: one computes their prompt, the others are held for it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from test_scheduler_core import pipeline

from pipeinfer.messages import Abort, Plan, TokenizedRequest
from pipeinfer.params import RequestParams, choice_ids
from pipeinfer.scheduler.core import SchedulerCore, SchedulerOptions
from pipeinfer.scheduler.queue import WaitingQueue
from pipeinfer.scheduler.request import Request, request_of
from pipeinfer.wire import pack

PROMPT = 5
WAYS = (["mixed", "throughput", "prefill-first", "decode-first"], [1, 2, 4])


def member(arrival: int, leader: str) -> Request:
    work = TokenizedRequest(
        f"r{arrival}", 1, 0, 0, pack(range(PROMPT)), RequestParams(), 0, sampling_group=leader
    )
    request = request_of(work, arrival, 0.0)
    request.max_total = PROMPT + 20
    return request


class Holding(RuleBasedStateMachine):
    """The queue, with requests of three families and strangers, which come and go as in a
    scheduler: `live` is all there is of them."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = WaitingQueue()
        self.live: list[Request] = []
        self.arrivals = 0

    def some(self, data, *phases: str) -> Request | None:
        fitting = [request for request in self.live if request.phase in phases]
        return data.draw(st.sampled_from(fitting)) if fitting else None

    @rule(leader=st.sampled_from(["", "a", "b", "c"]))
    def comes(self, leader: str) -> None:
        self.arrivals += 1
        self.live.append(member(self.arrivals, leader))
        self.queue.push(self.live[-1])

    @precondition(lambda self: self.queue.head() is not None)
    @rule()
    def is_admitted(self) -> None:
        request = self.queue.pop()
        request.move("running")
        request.admit()

    @rule(data=st.data(), count=st.integers(1, PROMPT))
    def comes_further(self, data, count: int) -> None:
        request = self.some(data, "running")
        if request is not None:
            before = request.projected
            request.project(count)
            request.confirm(request.projected)
            if request.computed >= request.known_len and request.projected > before:
                request.outputs.append(1)

    @rule(data=st.data(), phase=st.sampled_from(["running", "lost"]))
    def is_taken_back(self, data, phase: str) -> None:
        request = self.some(data, "running")
        if request is not None:
            if phase == "lost":
                request.move("lost")
            self.queue.push(request)

    @rule(data=st.data(), spoiled=st.booleans())
    def ends(self, data, spoiled: bool) -> None:
        request = self.some(data, "waiting", "waiting_for_prefix", "running")
        if request is not None:
            phase, request.bad_logits = request.phase, spoiled
            request.move("finished")
            if phase == "waiting":
                self.queue.remove(request)
            self.queue.on_finished(request, phase == "running")
            self.live.remove(request)

    @rule()
    def a_plan_begins(self) -> None:
        self.queue.requeue_unblocked(
            [request for request in self.live if request.phase == "running"]
        )
        for request in self.live:
            lending = [r for r in self.of(request.work.sampling_group) if r.provides_prefix]
            assert request.phase != "waiting_for_prefix" or not lending, "its prompt is there"

    def of(self, leader: str) -> list[Request]:
        return [request for request in self.live if request.work.sampling_group == leader]

    @invariant()
    def everybody_is_where_the_phase_says(self) -> None:
        queued = [one for _, _, one in self.queue._order if one.phase != "finished"]
        assert {one.id for one in queued} == {r.id for r in self.live if r.phase == "waiting"}
        assert self.queue.waiting_for_prefix == sum(
            r.phase == "waiting_for_prefix" for r in self.live
        )
        assert len(self.queue) == len(queued)

    @invariant()
    def whoever_is_held_waits_for_somebody_who_can_come(self) -> None:
        for request in self.live:
            if request.phase == "waiting_for_prefix":
                others = [r.phase for r in self.of(request.work.sampling_group)]
                assert request.work.sampling_group and {"waiting", "running"} & set(others)

    @invariant()
    def nothing_is_kept_of_families_that_are_gone(self) -> None:
        families = self.queue._sampling_groups
        leaders = {request.work.sampling_group for request in self.live}
        assert families._leaders.keys() <= leaders and families._waiting.keys() <= leaders


Holding.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestHolding = Holding.TestCase


def started(**options):
    p = pipeline(pages=400, slots=8, **options)
    p.deliver()
    p.deliver()
    return p


def admissions(plans: list[Plan]) -> list[list[str]]:
    """Whom each plan admits."""
    return [[admit.request_id for admit in plan.admits] for plan in plans]


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(WAYS[0]), st.sampled_from(WAYS[1]), st.integers(1, 60), st.integers(2, 6),
    st.integers(1, 9), st.sampled_from([1, 4]), st.sampled_from([3, 16, 200]),
)  # fmt: skip
def test_a_prompt_is_computed_once(policy, depth, length, many, most, size, budget):
    """But for what no cache keeps: what is behind its last whole page, and its last token."""
    p = started(policy=policy, depth=depth, page_size=size, budget=budget)
    p.submit([1] * length, most, choices=many)
    p.settle()
    rest = length - (length - 1) // size * size
    assert p.engine.prefilled == length + (many - 1) * rest
    assert p.core.stats()["held"] == 0


@pytest.mark.parametrize("policy", ["mixed", "prefill-first"])
@pytest.mark.parametrize("depth", WAYS[1])
def test_whoever_comes_behind_choices_that_are_held_goes_before_them(policy, depth):
    p = started(policy=policy, depth=depth, budget=64)
    plans = p.watched()
    p.submit([1] * (6 * 64 + 8), 9, choices=4)
    p.submit([2] * 8, 1)
    assert p.core.stats()["held"] == 3
    p.settle()
    assert [name for names in admissions(plans) for name in names] == [
        "r0",
        "r4",
        "r0/1",
        "r0/2",
        "r0/3",
    ]


def test_where_nothing_is_shared_nobody_is_held():
    core = SchedulerCore(SchedulerOptions("mixed", 2, 8, 64, shares_prefixes=False))
    for name in choice_ids("r", range(4)):
        core.handle(
            TokenizedRequest(name, 1, 0, 0, pack([1] * 9), RequestParams(), 0, sampling_group="r"),
            0.0,
        )
    assert core.stats()["held"] == 0 and core.stats()["waiting"] == 4


def test_a_leader_that_ends_early_is_followed_by_one_that_computes_the_prompt():
    p = started(budget=8)
    names = choice_ids(p.submit([1] * 64, 3, choices=4), range(4))
    for name in names[:2]:
        p.clients[name].cut = 0
        p.feed(Abort(name, 1))
        assert p.core.stats()["held"] == 3 - 1 - names.index(name)
        p.deliver()
    p.settle()
    assert p.engine.prefilled < 64 + 2 * 8 + 8, "two beginnings, the prompt, and what is not kept"


def test_choices_find_their_prompt_also_where_memory_has_no_room_for_it_twice():
    """Twenty pages of a prompt, and of each of four choices one or two more."""
    p = pipeline(pages=30, page_size=4, slots=8, budget=16)
    p.submit([1] * 80, 5, choices=4)
    assert p.most_at_once() == 4, "they run beside each other"
    p.settle()
    assert p.engine.deferred == 0 and p.core.counts["preemptions"] == 0


def test_followers_are_charged_for_what_they_compute_alone():
    p = started(budget=16)
    plans = p.watched()
    p.submit([1] * 40, 9, choices=8)
    p.settle()
    assert max(map(len, admissions(plans))) >= 3, "four tokens of each, in a step of sixteen"
