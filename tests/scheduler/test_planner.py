"""The planner alone: when there is a plan, what stands in it, and where requests are then."""

from __future__ import annotations

import pytest

from pipeinfer.messages import PROTOCOL, Hello, Plan, Result, TokenizedRequest
from pipeinfer.params import RequestParams
from pipeinfer.scheduler.engine_state import LATE_SECONDS, EngineState
from pipeinfer.scheduler.planner import Planner, SchedulerOptions
from pipeinfer.scheduler.request import Request, request_of
from pipeinfer.settings import ConfigurationError
from pipeinfer.wire import pack, unpack

EPOCH, SIZE, PAGES, SLOTS = 5, 4, 20, 3
SHAPE = Hello(PROTOCOL, "", 0, 1, 1, "m", SIZE, PAGES, SLOTS, 64, "torch")


class Group:
    """A planner with its slots and steps in flight, in an epoch; `step` answers the oldest."""

    def __init__(self, depth: int = 2, policy: str = "mixed") -> None:
        options = SchedulerOptions(policy, depth, SLOTS, 16)
        self.aboard = EngineState(1)
        self.planner = Planner(options, self.aboard.slots, self.aboard.in_flight)
        self.aboard.begin()
        self.planner.begin(SHAPE, (1,))
        self.plans: list[Plan] = []
        self._came = 0

    def enqueue(self, name: str, tokens: int = 3, most: int = 9, crashes: int = -1) -> Request:
        self._came += 1  # nobody begins like another, and each comes later
        ids = pack([self._came * 100 + n for n in range(tokens)])
        work = TokenizedRequest(name, 1, 0, 0, ids, RequestParams(max_tokens=most), 0)
        request = request_of(work, self._came, 0.0)
        request.max_total = tokens + most
        self.planner.enqueue(request, crashes)
        return request

    def plan(self, now: float = 0.0) -> Plan | None:
        plan = self.planner.plan(EPOCH, now)
        if plan is not None:
            self.plans.append(plan)
        return plan

    def lands(self, *starts: int) -> None:
        """The oldest plan in flight was done: each of its rows has sampled a token."""
        plan = self.plans.pop(0)
        many = len(plan.slots) // 4
        result = Result(
            epoch=EPOCH, number=plan.number, slots=plan.slots, starts=pack(starts),
            counts=plan.counts, produced=pack([1] * many), token_ids=pack([7] * many),
            deferred=b"", free=PAGES, evictable=0, digest=0,
        )  # fmt: skip
        for request, tokens, logprobs, _ in list(self.aboard.process_result(result)):
            request.append(tokens, logprobs)


def test_there_is_no_plan_where_nothing_is_to_be_done():
    group = Group()
    assert group.plan() is None and group.planner.counts["plans"] == 0


def test_plans_are_numbered_from_nought_in_each_epoch_and_no_more_are_in_flight_than_allowed():
    group = Group(depth=2)
    group.enqueue("r")
    first, second = group.plan(), group.plan()
    assert first is not None and second is not None
    assert (first.epoch, first.number, second.number) == (EPOCH, 0, 1)
    assert group.plan() is None, "two are in flight"
    group.lands(0)
    third = group.plan()
    assert third is not None and third.number == 2
    group.aboard.on_epoch_lost()
    group.planner.begin(SHAPE, (1,))
    assert group.planner.take_number() == 0


def test_an_admission_comes_with_its_first_row_and_the_next_plan_decodes():
    group = Group()
    request = group.enqueue("r", tokens=5)
    plan = group.plan()
    assert plan is not None
    [admit] = plan.admits
    assert (admit.request_id, admit.token_ids, admit.prompt_len) == ("r", pack(range(100, 105)), 5)
    assert (unpack(plan.slots).tolist(), unpack(plan.counts).tolist()) == ([admit.slot], [5])
    assert request.phase == "running"
    plan = group.plan()
    assert plan is not None and not plan.admits and unpack(plan.counts).tolist() == [1]


def test_who_is_dropped_is_released_once_wherever_it_was():
    group = Group()
    runs, waits, suspected = (group.enqueue("runs"), group.enqueue("waits"), None)
    group.plan()
    suspected = group.enqueue("suspected", crashes=0)
    late = group.enqueue("late")
    for request in (runs, waits, suspected, late):
        group.planner.drop(request)
        assert request.phase == "finished"
    plan = group.plan()
    assert plan is not None and len(plan.releases) == 2 and plan.slots == b""
    group.lands(0, 0)
    group.lands()
    assert group.plan() is None and group.planner.quarantined == 0


def test_a_suspect_runs_alone_and_a_token_clears_it():
    group = Group(depth=2)
    suspect = group.enqueue("suspect", crashes=1)
    plan = group.plan()
    assert plan is not None and [admit.request_id for admit in plan.admits] == ["suspect"]
    assert group.plan() is None, "one step at a time"
    assert (group.planner.crashes_alone(suspect), group.planner.quarantined) == (1, 1)
    group.lands(0)
    group.planner.clear(suspect)
    assert (group.planner.crashes_alone(suspect), group.planner.quarantined) == (-1, 0)
    group.enqueue("other")
    plan = group.plan()
    assert plan is not None and len(plan.slots) == 2 * len(plan.admits) * 4


def test_who_lost_its_epoch_returns_to_the_queue_and_those_in_flight_twice_are_suspects():
    group = Group()
    flying, idle = group.enqueue("flying"), group.enqueue("idle")
    for loss in range(2):
        group.planner.begin(SHAPE, (loss,))
        group.plan()
        lost, _ = group.aboard.on_epoch_lost()
        if not loss:
            assert group.planner.on_epoch_lost(lost, [flying], not_request_fault=False) is None
            assert (flying.phase, idle.phase) == ("waiting", "waiting")
    assert group.planner.on_epoch_lost(lost, [flying], not_request_fault=False) is None
    assert (flying.phase, idle.phase, group.planner.quarantined) == ("quarantined", "waiting", 1)
    not_request_fault = Group()
    request = not_request_fault.enqueue("r")
    not_request_fault.plan()
    lost, flew = not_request_fault.aboard.on_epoch_lost()
    not_request_fault.planner.on_epoch_lost(lost, flew, not_request_fault=True)
    assert request.phase == "waiting" and not_request_fault.planner.quarantined == 0


def test_late_results_are_asked_for_by_an_empty_plan_that_counts_like_another():
    group = Group()
    group.enqueue("r")
    group.plan(0.0)
    assert group.planner.probe(EPOCH, LATE_SECONDS / 2) is None
    probe = group.planner.probe(EPOCH, LATE_SECONDS)
    assert probe == Plan(EPOCH, 1, (), (), b"", b"")
    assert len(group.aboard.in_flight) == 2 and group.planner.probe(EPOCH, LATE_SECONDS) is None


def test_a_policy_that_there_is_not_is_refused_by_its_name():
    with pytest.raises(ConfigurationError, match="no-such"):
        Group(policy="no-such")
