"""Who gives way when pages run short: rows that keep being deferred, and whose prompt is spared."""

from __future__ import annotations

import numpy as np

from pipeinfer.messages import PROTOCOL, Hello, Plan, Ready, Result, TokenizedRequest
from pipeinfer.params import RequestParams
from pipeinfer.scheduler.core import SchedulerCore, SchedulerOptions
from pipeinfer.scheduler.engine_state import PageCredits, Slots
from pipeinfer.scheduler.policies import StepComposer
from pipeinfer.scheduler.queue import WaitingQueue
from pipeinfer.scheduler.request import Request, request_of
from pipeinfer.step_cost import PrefillBudget
from pipeinfer.wire import pack, unpack

PAGES, SIZE = 100, 4


def work(name: str, tokens: int, priority: int = 0) -> TokenizedRequest:
    params = RequestParams(max_tokens=50, ignore_eos=True)
    return TokenizedRequest(name, 1, 0, 0, pack(range(tokens)), params, 0, priority=priority)


class Group:
    """A scheduler at depth 1, and an engine that says of every step what a test wants."""

    def __init__(self) -> None:
        self.core = SchedulerCore(SchedulerOptions("mixed", 1, 8, 64))
        self.computed: dict[int, int] = {}
        self.plans: list[Plan] = []
        self.feed(Hello(PROTOCOL, "0", 0, 1, 1, "m", SIZE, PAGES, 8, 200, "none"))
        self.feed(Ready(1, 0, 1))

    def feed(self, message) -> None:
        sends = self.core.handle(message, 0.0)
        self.plans += [send.message for send in sends if isinstance(send.message, Plan)]

    def step(self, deferred: tuple[int, ...] = ()) -> Plan:
        """The end of the newest plan; rows of the slots `deferred` got no pages. The next one."""
        plan = self.plans[-1]
        for admit in plan.admits:
            self.computed[admit.slot] = 0
        slots, counts = unpack(plan.slots), unpack(plan.counts).copy()
        late = np.isin(slots, deferred)
        counts[late] = 0
        starts = [self.computed[slot] for slot in slots.tolist()]
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
            self.computed[slot] += count
        produced = (~late).astype(np.int32)
        self.feed(
            Result(
                plan.epoch, plan.number, plan.slots, pack(starts), pack(counts), pack(produced),
                pack([7] * int(produced.sum())), pack(deferred), 50, 0, 0,
            )
        )  # fmt: skip
        assert self.plans[-1] is not plan
        return self.plans[-1]


def test_a_request_that_is_deferred_again_and_again_makes_another_one_give_way():
    group = Group()
    group.feed(work("early", 8))
    group.feed(work("late", 8))
    group.step()  # `early`, which came alone
    plan = group.step()
    first, second = unpack(plan.slots).tolist()
    assert group.step(deferred=(first,)).releases == (), "once may be chance"
    plan = group.step(deferred=(first,))
    [release] = plan.releases
    assert (release.slot, release.cache_prefix) == (second, True)
    assert unpack(plan.slots).tolist() == [first]
    assert group.core.stats()["preemptions_total"] == 1


def running(name: str, arrival: int, tokens: int, projected: int) -> Request:
    """A request in a slot, of whose `tokens` some are computed."""
    request = request_of(work(name, tokens), arrival, 0.0)
    request.max_total = tokens + 50
    request.admit()
    request.computed = request.projected = projected
    request.slot, request.phase = arrival, "running"
    return request


def test_the_oldest_half_computed_prompt_is_spared_although_it_came_last():
    """Else prompts could take each other's pages for ever, and none would ever be computed."""
    decodes = [running(name, n, 8, 8) for n, name in enumerate(("first", "second"))]
    prompt = running("prompt", 2, 40, 20)
    slots = Slots()
    slots.begin(0, PageCredits(SIZE, 0))
    slots.running = {request.id: request for request in (*decodes, prompt)}
    step = StepComposer(slots, WaitingQueue(), 64, PrefillBudget(64))
    step.decode_all()  # both need a page, and there is none
    assert step.preempted == [decodes[1]]
    assert [request.id for request, _ in step.rows] == ["first"]
