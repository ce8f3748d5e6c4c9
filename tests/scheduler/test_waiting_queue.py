"""The queue against a sorted list: order, what comes first, and how many tokens wait."""

from __future__ import annotations

from bisect import insort
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pipeinfer.messages import TokenizedRequest
from pipeinfer.params import RequestParams
from pipeinfer.scheduler.queue import SCANNED_PER_ENTRY, WaitingQueue
from pipeinfer.scheduler.request import Request, request_of
from pipeinfer.wire import pack


class Waiting(RuleBasedStateMachine):
    """`waiting` is the model: all that wait and are not over, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = WaitingQueue()
        self.waiting: list[Request] = []
        self.popped: list[Request] = []
        self.arrivals = 0

    @rule(priority=st.integers(-1, 1), tokens=st.integers(1, 9))
    def comes(self, priority: int, tokens: int) -> None:
        self.arrivals += 1
        work = TokenizedRequest(
            f"r{self.arrivals}", 1, 0, 0, pack([7] * tokens), RequestParams(), 0,
            priority=priority,
        )  # fmt: skip
        self._push(request_of(work, self.arrivals, 0.0))

    @precondition(lambda self: self.popped)
    @rule(data=st.data())
    def comes_back_longer(self, data) -> None:
        request = self.popped.pop(data.draw(st.integers(0, len(self.popped) - 1)))
        request.outputs.append(3)
        self._push(request)

    def _push(self, request: Request) -> None:
        self.queue.push(request)
        insort(self.waiting, request, key=lambda one: (one.work.priority, one.arrival))

    @precondition(lambda self: self.waiting)
    @rule()
    def leaves_at_the_front(self) -> None:
        request = self.queue.pop()
        assert request is self.waiting.pop(0)
        request.move("running")
        self.popped.append(request)

    @precondition(lambda self: self.waiting)
    @rule(many=st.integers(1, 80), seed=st.integers(0, 99))
    def some_give_up(self, many: int, seed: int) -> None:
        random = Random(seed)  # whom hypothesis would take a hundred times as long to draw
        for _ in range(min(many, len(self.waiting))):
            request = self.waiting.pop(random.randrange(len(self.waiting)))
            request.move("finished")
            self.queue.remove(request)

    @rule()
    def many_come(self) -> None:
        for _ in range(100):
            self.comes(0, 2)

    @invariant()
    def order_and_sums_hold(self) -> None:
        assert self.queue.head() is (self.waiting[0] if self.waiting else None)
        assert len(self.queue) == len(self.waiting)
        assert self.queue.tokens == sum(request.length for request in self.waiting)

    @invariant()
    def what_comes_first_is_told(self) -> None:
        told = self.queue.first(5)
        assert told == self.waiting[: len(told)]
        gone = len(self.queue._order) - len(self.waiting)
        if gone <= 5 * (SCANNED_PER_ENTRY - 1):
            assert len(told) == min(5, len(self.waiting))


TestWaiting = Waiting.TestCase
TestWaiting.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)
