"""Adapters get slots, engines are asked to load them, and who runs always finds its own."""

from __future__ import annotations

import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from test_scheduler_core import Pipeline, pipeline

from pipeinfer.messages import AdapterLoaded, LoadAdapter, Plan, Refused, TokenizedRequest
from pipeinfer.params import Adapter, RequestParams
from pipeinfer.scheduler.adapters import AdapterSlots
from pipeinfer.scheduler.core import SchedulerCore, SchedulerOptions
from pipeinfer.scheduler.request import Request, request_of
from pipeinfer.trace.redact import TokenPermutation, redact_state
from pipeinfer.trace.snapshot import restore, snapshot
from pipeinfer.wire import pack

SLOTS, TP, KINDS = 2, 2, 5


def adapter(kind: int) -> Adapter:
    return Adapter(name=f"a{kind}", path=f"/a{kind}", digest=f"d{kind}")


def wants(name: str, kind: int | None) -> Request:
    given = None if kind is None else adapter(kind)
    return request_of(
        TokenizedRequest(name, 1, 0, 0, pack([1]), RequestParams(), 0, adapter=given), 1, 0.0
    )


class Slots(RuleBasedStateMachine):
    """A queue beside AdapterSlots, and ranks that load what they are asked for, some time later.

    running: requests that need not wait. held: what each rank has in its slots. asked: messages
    that ranks have not answered.
    """

    def __init__(self) -> None:
        super().__init__()
        self.slots = AdapterSlots(TP, SLOTS)
        self.now, self.names, self.first = 0.0, 0, 0
        self.answers: list[AdapterLoaded] = []
        self.parked: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        self.new_processes()

    @rule()
    def new_processes(self) -> None:
        """What runs comes back to the queue, as after a lost epoch."""
        self.first += TP
        self.held: list[dict[int, str]] = [{} for _ in range(TP)]
        self.asked: list[tuple[int, LoadAdapter]] = []
        self.slots.begin(tuple(range(self.first, self.first + TP)))
        back, self.running = self.running, {}
        for request in back.values():
            request.move("waiting")
            self.push(request)

    def push(self, request: Request) -> None:
        if self.slots.park_if_blocked(request):
            self.parked[request.id] = request
        else:
            if request.phase != "waiting":
                request.move("waiting")
            request.move("running")
            self.running[request.id] = request

    @rule(kind=st.none() | st.integers(0, KINDS - 1))
    def come(self, kind: int | None) -> None:
        self.names += 1
        self.push(wants(f"r{self.names}", kind))

    @rule(seconds=st.sampled_from((0.1, 1.0)))
    def ask(self, seconds: float) -> None:
        self.now += seconds
        for load in self.slots.take_due(1, 0, self.now):
            users = [one for one in self.running.values() if one.adapter_slot == load.slot]
            assert not users, "somebody runs with what is in the slot"
            self.asked += [(rank, load) for rank in range(TP)]

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), error=st.sampled_from(("", "", "", "broken")))
    def load(self, data: st.DataObject, error: str) -> None:
        """Each rank loads in the order in which it was asked; its answer is on its way."""
        rank = data.draw(st.sampled_from(sorted({rank for rank, _ in self.asked})))
        at = next(n for n, (of, _) in enumerate(self.asked) if of == rank)
        _, load = self.asked.pop(at)
        if not error:
            self.held[rank][load.slot] = load.adapter.digest
        self.answers.append(AdapterLoaded(rank, self.first + rank, 1, load.number, error))

    @precondition(lambda self: self.answers)
    @rule()
    def answer(self) -> None:
        for request in self.slots.on_loaded(self.answers.pop(0)):
            self.end(request)
        self.go_on()

    def go_on(self) -> None:
        for request in self.slots.take_ready():
            assert self.parked.pop(request.id) is request
            self.push(request)

    @precondition(lambda self: self.running or self.parked)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        live = {**self.running, **self.parked}
        self.end(live[data.draw(st.sampled_from(sorted(live)))])
        self.go_on()

    def end(self, request: Request) -> None:
        self.running.pop(request.id, None)
        self.parked.pop(request.id, None)
        request.move("finished")
        self.slots.release(request)

    @invariant()
    def who_runs_finds_its_own(self) -> None:
        for request in self.running.values():
            given = request.work.adapter
            if given is None:
                assert request.adapter_slot == 0
                continue
            assert 1 <= request.adapter_slot <= SLOTS
            for rank in range(TP):
                assert self.held[rank].get(request.adapter_slot) == given.digest

    @invariant()
    def all_who_wait_are_counted(self) -> None:
        assert len(self.slots) == len(self.parked)

    def teardown(self) -> None:
        """Nobody waits for ever, if those who run end."""
        for _ in range(8 * (len(self.parked) + 1)):
            self.ask(1.0)
            while self.asked:
                rank, load = self.asked.pop(0)
                self.answers.append(AdapterLoaded(rank, self.first + rank, 1, load.number))
            while self.answers:
                self.answer()
            self.go_on()
            for request in list(self.running.values()):
                self.end(request)
            self.go_on()
        assert not self.parked


TestSlots = Slots.TestCase
TestSlots.settings = hypothesis.settings(max_examples=40, stateful_step_count=40, deadline=None)


def started(max_loras: int) -> Pipeline:
    """An epoch runs."""
    made = pipeline()
    made.core = SchedulerCore(SchedulerOptions(max_loras=max_loras))
    made.deliver()
    made.deliver()
    return made


def answer(made: Pipeline, error: str = "") -> AdapterLoaded:
    return AdapterLoaded(0, made.engine.incarnation, made.engine.epoch, 1, error)


def work() -> TokenizedRequest:
    params = RequestParams(max_tokens=4)
    return TokenizedRequest(
        "r", 1, 0, 0, pack([5, 6, 7]), params, 0, eos_ids=(3, 11), adapter=adapter(3)
    )


def test_a_request_is_admitted_when_its_adapter_is_loaded_and_not_before() -> None:
    made = started(1)
    sent = [send.message for send in made.feed(work())]
    assert [one for one in sent if isinstance(one, (LoadAdapter, Plan))] == [
        LoadAdapter(made.engine.epoch, 1, 1, adapter(3))
    ]
    assert made.core.stats()["loading_adapter"] == 1
    sent = [send.message for send in made.core.handle(answer(made), 1.0)]
    (admit,) = [one for plan in sent if isinstance(plan, Plan) for one in plan.admits]
    assert (admit.request_id, admit.adapter_slot) == ("r", 1)


def test_an_adapter_is_loaded_behind_the_plans_that_were_published_before() -> None:
    made = started(1)
    made.submit([1, 2, 3], 5)
    (load,) = [s.message for s in made.feed(work()) if isinstance(s.message, LoadAdapter)]
    assert load.next_plan == made.core.counts["plans"] == 2


def test_what_engines_cannot_load_is_an_error_for_who_asked() -> None:
    made = started(1)
    made.feed(work())
    failed = answer(made, "it is broken")
    for pipe, message, words in (
        (made, failed, "it is broken"),
        (started(0), work(), "--enable-lora"),
    ):
        sent = [send.message for send in pipe.feed(message)]
        (refused,) = [one for one in sent if isinstance(one, Refused)]
        assert refused.status == 400 and words in refused.message
        assert not pipe.core._live


def test_a_scheduler_goes_on_from_its_snapshot_with_the_slots_that_it_gave() -> None:
    made = started(1)
    made.feed(work())
    copy = SchedulerCore(SchedulerOptions(max_loras=1))
    restore(copy, snapshot(made.core))
    names = TokenPermutation(bytes(16), 32, frozenset((3, 11)))
    redact_state(snapshot(copy), lambda message: message, names)  # nothing of it is unknown
    sent = [send.message for send in copy.handle(answer(made), 1.0)]
    (admit,) = [one for plan in sent if isinstance(plan, Plan) for one in plan.admits]
    assert (admit.request_id, admit.adapter_slot) == ("r", 1)
