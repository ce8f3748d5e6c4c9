"""The scheduler core against a model engine, driven by hypothesis through everything at once."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from model_engine import ModelEngine, expected_outputs
from msgspec import structs

from pipeinfer.core import Tick
from pipeinfer.messages import (
    Abort,
    BeginEpoch,
    CompileGrammar,
    Done,
    GroupFault,
    OpenStream,
    Plan,
    SetSleep,
    Sleep,
    StopHit,
    TokenizedRequest,
    Tokens,
)
from pipeinfer.params import RequestParams, StructuredOutputs, choice_ids
from pipeinfer.scheduler.core import FINISH_KINDS, SchedulerCore, SchedulerOptions
from pipeinfer.scheduler.queue import GRAMMAR_RETRY_SECONDS
from pipeinfer.wire import pack, unpack

STOPS = (3, 11)


class Client:
    """What reaches the detokenizer for one request."""

    def __init__(self, prompt: list[int], max_tokens: int, min_tokens: int) -> None:
        self.expected = expected_outputs(prompt, max_tokens, frozenset(STOPS), min_tokens)
        self.outputs: list[int] = []
        self.finish: str | None = None
        self.cut: int | None = None  # aborted or stopped by a string


class Pipeline:
    """Scheduler core and model engine with the messages between them in our hands."""

    def __init__(self, options: SchedulerOptions, engine: ModelEngine) -> None:
        self.core, self.engine = SchedulerCore(options), engine
        self.clients: dict[str, Client] = {}
        self.now = 0.0
        self.engine.outbox.append(self.engine.hello())

    def feed(self, message) -> list:
        self.now += 0.001
        sends = self.core.handle(message, self.now)
        for send in sends:
            if isinstance(send.message, Plan | CompileGrammar | BeginEpoch | Sleep):
                self.engine.receive(send.message)
            elif isinstance(send.message, Tokens):
                self._take(send.message)
        return sends

    def deliver(self) -> bool:
        if not self.engine.outbox:
            return False
        self.feed(self.engine.outbox.popleft())
        return True

    def submit(
        self, prompt, max_tokens, min_tokens=0, priority=0, choices=1, grammar: str | None = None
    ) -> str:
        leader = f"r{len(self.clients)}"
        params = RequestParams(
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            structured_outputs=None if grammar is None else StructuredOutputs(regex=grammar),
        )
        for name in choice_ids(leader, range(choices)):
            self.clients[name] = Client(prompt, max_tokens, params.min_tokens)
            work = TokenizedRequest(
                name, 1, 0, 0, pack(prompt), params, 0, eos_ids=STOPS, priority=priority
            )
            together = leader if choices > 1 else ""
            self.feed(structs.replace(work, sampling_group=together))
        return leader

    def _take(self, tokens: Tokens) -> None:
        for row in tokens.rows:
            client = self.clients[row.request_id]
            assert client.finish is None, f"{row.request_id} went on after its end"
            assert row.offset == len(client.outputs), f"gap or repetition in {row}"
            client.outputs += unpack(row.ids).tolist()
            client.finish = row.finish
            assert client.outputs == client.expected[: len(client.outputs)]

    def most_at_once(self) -> int:
        """Delivers everything until nothing moves: how many slots are used at a time, at most."""
        most = 0
        while self.deliver():
            most = max(most, len(self.engine.slots))
        return most

    def watched(self) -> list[Plan]:
        """The plans that the engine gets from now on."""
        plans: list[Plan] = []
        apply = self.engine.receive

        def receive(message) -> None:
            if isinstance(message, Plan):
                plans.append(message)
            apply(message)

        self.engine.receive = receive
        return plans

    def settle(self, limit: int = 20_000) -> None:
        """Delivers everything until nothing moves; every request must have ended by then."""
        for _ in range(limit):
            if not self.deliver():
                # An engine that forgets had not answered. Of a long time without a tick the
                # scheduler takes a part for its own sleep.
                for _ in range(8):
                    self.now += GRAMMAR_RETRY_SECONDS / 4
                    self.feed(Tick())
                    if self.engine.outbox:
                        break
                if not self.engine.outbox:
                    break
        starved = [n for n, c in self.clients.items() if c.finish is None and c.cut is None]
        assert not starved, f"{starved} never ended: {self.core.stats()}"
        for name, client in self.clients.items():
            if client.cut is None and client.finish not in ("error", "abort"):
                assert client.outputs == client.expected, name
        assert self.core.idle()
        assert not self.engine.slots, "a slot was never released"


def pipeline(
    policy="mixed", depth=2, pages=40, page_size=4, budget=16, slots=8, caching=True, forces=0,
    common=64, overtakes=None, drafts=0, accepts=None,
):  # fmt: skip
    """drafts: every request that can draft does, up to so many tokens ahead."""
    options = SchedulerOptions(policy, depth, slots, budget, least_shared_tokens=common)
    engine = ModelEngine(
        pages, page_size, slots, budget, caching, None, forces, overtakes, drafts, accepts
    )
    made = Pipeline(options, engine)
    made.core._planner._drafter.min_rate = 0.0
    return made


class Machine(RuleBasedStateMachine):
    @initialize(
        policy=st.sampled_from(["mixed", "throughput", "prefill-first", "decode-first"]),
        depth=st.sampled_from([1, 2]),
        pages=st.sampled_from([12, 30, 200]),
        page_size=st.sampled_from([1, 4]),
        budget=st.sampled_from([2, 7, 64]),
        slots=st.sampled_from([1, 3, 8]),
        caching=st.booleans(),
        forces=st.sampled_from([0, 1, 3, 9]),
        common=st.sampled_from([1, 8]),
        drafts=st.sampled_from([0, 1, 4]),
        chance=st.randoms(use_true_random=False),
    )
    def start(
        self, policy, depth, pages, page_size, budget, slots, caching, forces, common, drafts,
        chance,
    ):  # fmt: skip
        self.p = pipeline(
            policy, depth, pages, page_size, budget, slots, caching, forces, common,
            overtakes=partial(chance.randint, 0), drafts=drafts, accepts=partial(chance.randint, 0),
        )  # fmt: skip
        self.capacity = pages * page_size

    @rule(
        length=st.integers(1, 30),
        shared=st.integers(0, 20),
        max_tokens=st.integers(1, 12),
        min_tokens=st.integers(0, 4),
        priority=st.integers(0, 2),
        salt=st.integers(0, 40),
        choices=st.sampled_from([1, 1, 2, 4]),
        grammar=st.sampled_from([None, None, "a", "b"]),
    )
    def submit(self, length, shared, max_tokens, min_tokens, priority, salt, choices, grammar):
        prompt = [1] * min(shared, length) + [salt + i for i in range(length - shared)]
        if len(prompt) + max_tokens <= self.capacity:
            self.p.submit(prompt, max_tokens, min_tokens, priority, choices, grammar)

    @rule(many=st.integers(1, 12))
    def deliver(self, many):
        for _ in range(many):
            self.p.deliver()

    @rule()
    def tick(self):
        self.p.feed(Tick())

    @precondition(lambda self: self.p.clients)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self.p.clients)))
        client = self.p.clients[name]
        if client.finish is None and client.cut is None:
            client.cut = len(client.outputs)
            self.p.feed(Abort(name, 1))

    @precondition(lambda self: self.p.clients)
    @rule(data=st.data())
    def stop_string(self, data):
        name = data.draw(st.sampled_from(sorted(self.p.clients)))
        client = self.p.clients[name]
        if client.finish is None and client.cut is None and client.outputs:
            client.cut = data.draw(st.integers(1, len(client.outputs)))
            self.p.feed(StopHit(name, 1, client.cut))

    @rule(kept=st.sampled_from([0, 1, 2, 7]))
    def engine_crash(self, kept):
        """kept: of 7 prefixes that many are found by the next engine, 7: all."""
        self.p.engine.crash(lambda prefix: sum(prefix) % 7 < kept)

    @rule(level=st.sampled_from([0, 0, 1, 2]), mode=st.sampled_from(["wait", "keep", "abort"]))
    def sleep_or_wake(self, level, mode):
        self.p.feed(SetSleep(level, mode))

    @invariant()
    def who_sleeps_has_no_request(self):
        if hasattr(self, "p") and self.p.core.state()[0] == "asleep":
            assert not self.p.engine.slots and not self.p.core.stats()["running"]

    @invariant()
    def memory_is_sane(self):
        if hasattr(self, "p"):
            assert self.p.engine.free >= 0

    @invariant()
    def every_request_is_live_or_has_ended_in_one_way(self):
        if hasattr(self, "p"):
            stats = self.p.core.stats()
            ended = sum(stats[f"{end}_total"] for end in FINISH_KINDS)
            assert stats["accepted_total"] == stats["running"] + stats["waiting"] + ended

    def teardown(self):
        if hasattr(self, "p"):
            self.p.feed(SetSleep(0))
            self.p.settle()


Machine.TestCase.settings = settings(
    max_examples=50,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestAnythingInAnyOrder = Machine.TestCase


def test_a_grammar_is_asked_for_again_after_a_sleep_in_which_it_was_forgotten():
    p = pipeline(depth=1)
    p.deliver()  # hello
    p.deliver()  # ready
    p.submit([0], 1, grammar="a")
    p.feed(SetSleep(1, "keep"))  # the model engine forgets what it has not sent yet
    p.feed(SetSleep(0))
    p.settle()
    assert len(p.engine.prepared) == 2


def test_depth_two_publishes_the_next_step_before_the_result():
    p = pipeline(depth=2)
    p.deliver()  # hello
    p.deliver()  # ready
    p.submit([1, 2, 3], 10)
    assert p.engine.plans.expected == 2
    one = pipeline(depth=1)
    one.deliver()
    one.deliver()
    one.submit([1, 2, 3], 10)
    assert one.engine.plans.expected == 1


def test_preempted_request_resumes_with_same_tokens():
    p = pipeline(pages=10, page_size=4, slots=4, budget=64)
    for i in range(4):
        p.submit([30 + i] * 8, 20)
    p.settle()
    assert p.core.counts["preemptions"] > 0


def test_mixed_never_lets_a_stream_wait_for_somebody_elses_prompt():
    p = pipeline("mixed", pages=1000, budget=16, slots=8)
    stream = p.submit([5, 6], 200)
    client = p.clients[stream]
    client.expected = client.expected[:]  # may end early by a stop token
    while len(client.outputs) < 3 and client.finish is None:
        assert p.deliver()
    for i in range(6):
        p.submit([40 + i] * 100, 2)
    before, plans = len(client.outputs), p.engine.plans.expected
    while client.finish is None and len(client.outputs) < before + 5:
        assert p.deliver()
    assert client.finish or p.engine.plans.expected - plans <= 5 + 2


def test_prefill_first_computes_prompts_alone():
    p = pipeline("prefill-first", pages=1000, budget=16)
    stream = p.submit([5, 6], 200)
    while len(p.clients[stream].outputs) < 2:
        assert p.deliver()
    p.submit([40] * 100, 2)
    seen = len(p.clients[stream].outputs)
    for _ in range(6):
        p.deliver()
    assert len(p.clients[stream].outputs) <= seen + 2, "at most what was in flight already"
    p.settle()


def test_priority_is_honoured_at_admission():
    p = pipeline(slots=1, pages=200)
    p.deliver()
    p.deliver()
    first = p.submit([1] * 8, 4)
    late = p.submit([2] * 8, 4, priority=5)
    urgent = p.submit([4] * 8, 4, priority=-5)
    ended = []
    while len(ended) < 3:
        assert p.deliver()
        for name in (first, late, urgent):
            if p.clients[name].finish and name not in ended:
                ended.append(name)
    assert ended == [first, urgent, late]


def test_request_larger_than_the_pool_is_refused_with_an_error():
    p = pipeline(pages=10, page_size=4)
    p.deliver()
    p.deliver()
    params = RequestParams(max_tokens=20)
    (send,) = p.core.handle(TokenizedRequest("big", 1, 0, 0, pack([1] * 30), params, 0), 0.0)
    assert send.message.status == 400
    assert "40" in send.message.message
    assert p.core.idle()


def test_request_that_came_before_the_engine_is_refused_as_any_when_it_cannot_fit():
    p = pipeline(pages=10, page_size=4)
    params = RequestParams(max_tokens=20)
    (send,) = p.core.handle(TokenizedRequest("big", 1, 0, 0, pack([1] * 30), params, 0), 0.0)
    assert isinstance(send.message, OpenStream)
    p.core.handle(p.engine.hello(), 0.0)
    begin = p.core.handle(Tick(), 0.0)[0]
    assert isinstance(begin.message, BeginEpoch)
    p.engine.receive(begin.message)
    out = p.core.handle(p.engine.outbox.pop(), 0.0)
    p.core.handle(Done(("big",)), 0.0)
    (expected,) = p.core.handle(
        TokenizedRequest("big too", 1, 0, 0, pack([1] * 30), params, 0), 0.0
    )
    assert out[-1].message == structs.replace(expected.message, request_id="big")
    assert out[-1].message.status == 400 and out[-1].message.param == "max_tokens"
    assert p.core.idle()


def test_poisoned_request_fails_alone_and_the_others_go_on():
    p = pipeline(pages=200, slots=8, budget=64)
    poison = None
    names = [p.submit([20 + i] * 6, 30) for i in range(5)]
    for _ in range(4):
        p.deliver()
    poison = p.submit([49] * 5, 30)
    for _ in range(10_000):
        slots = p.engine.slots.values()
        if any(slot.admit.request_id == poison for slot in slots):
            p.engine.crash()  # its step never gives a result
        if not p.deliver():
            p.feed(Tick())
            if not p.engine.outbox:
                break
    assert p.clients[poison].finish == "error"
    for name in names:
        assert p.clients[name].outputs == p.clients[name].expected


def test_watchdog_ends_the_epoch_and_asks_for_a_restart():
    p = pipeline()
    p.deliver()
    p.deliver()
    p.submit([1, 2, 3], 5)
    sends = p.core.handle(Tick(), p.now + 1_000)
    faults = [s.message for s in sends if isinstance(s.message, GroupFault)]
    assert faults and "no result" in faults[0].reason
    assert p.core.state()[0] == "waiting"
    p.engine.crash()
    p.settle()


def test_timeout_aborts_a_waiting_and_a_running_request():
    p = pipeline(slots=1, pages=200)
    p.deliver()
    p.deliver()
    params = RequestParams(max_tokens=500, ignore_eos=True)
    for name in ("running", "waiting"):
        p.clients[name] = Client([9], 500, 0)
        p.clients[name].expected = []
        p.core.handle(TokenizedRequest(name, 1, 0, 0, pack([9]), params, 0, timeout=1.0), 0.0)
    rows = [
        row
        for send in p.core.handle(Tick(), 1.5)
        if isinstance(send.message, Tokens)
        for row in send.message.rows
    ]
    assert {(row.request_id, row.finish) for row in rows} == {
        ("running", "abort"),
        ("waiting", "abort"),
    }


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_forced_tokens_are_told_and_need_no_step_each(depth):
    """Clients get the same; where nothing is forced, nothing is told."""
    plans = []
    for forces in (0, 9):
        p = pipeline(depth=depth, budget=64, forces=forces)
        for prompt in ([n, 2, 3] for n in range(12)):
            p.submit(prompt, 40, grammar="a")
            p.submit(prompt, 40)
        p.settle()
        plans.append(p.core.stats()["plans_total"])
        assert (p.engine.jumped > 2) == (forces > 0)
        assert (p.core.stats()["jumped_tokens_total"] > 8) == (forces > 0)
    assert plans[1] <= plans[0]


@pytest.mark.parametrize("depth", [1, 2])
def test_an_aborted_request_is_released_with_the_next_plan_and_never_waits(depth):
    """Whoever hangs up frees pages within one step, also while nobody else has any work."""
    p = pipeline(depth=depth, slots=1, pages=200)
    p.deliver()
    p.deliver()
    running, waiting = p.submit([1, 2, 3], 60), p.submit([4, 5, 6], 60)
    while not p.clients[running].outputs:
        p.deliver()
    assert p.engine.slots, "it holds pages"
    for name in (waiting, running):
        p.clients[name].cut = 0
        p.feed(Abort(name, 1))
    for _ in range(depth):  # of the steps that were under way already
        p.deliver()
    assert not p.engine.slots and p.engine.free + p.engine.evictable == 200
    p.settle()
    assert p.clients[waiting].outputs == []
    assert p.core.stats()["waiting"] == p.core.stats()["kept"] == 0


def test_step_cost_does_not_grow_with_waiting_requests():
    """Counted in Python function calls, not seconds: the same for 100 and for 5,000 waiting."""
    import sys

    def calls(waiting: int) -> int:
        p = pipeline(slots=4, pages=400)
        p.deliver()
        p.deliver()
        for i in range(4 + waiting):
            p.submit([1 + i % 40] * 8, 1_000 // 40)
        for _ in range(6):
            p.deliver()
        count = 0

        def profile(_frame, event, _arg):
            nonlocal count
            count += event == "call"

        messages = [p.engine.outbox.popleft()]
        sys.setprofile(profile)
        try:
            p.core.handle(messages[0], p.now)
        finally:
            sys.setprofile(None)
        return count

    assert calls(5_000) <= calls(100) * 1.2 + 20


@pytest.mark.parametrize("delivered", range(1, 24))
def test_a_suspect_among_others_comes_back_once_and_gets_its_pages(delivered):
    """It takes turns with the others; whoever's turn it was when the engine was lost again, and
    however little memory there is for both."""
    p = pipeline("mixed", depth=1, pages=12, budget=2, caching=False)
    p.submit([3] * 30, 1)
    p.deliver()
    p.deliver()
    p.engine.crash()
    p.submit([4] * 26, 1)
    for _ in range(delivered):
        p.deliver()
    p.engine.crash()
    p.settle(2_000)


def test_times_in_the_queue_and_to_the_first_output_are_counted_once_for_each_request():
    made = pipeline(slots=1, forces=0)
    begun = made.deliver() and made.deliver()
    assert begun
    made.submit([1, 2, 3], max_tokens=4)
    made.now += 10.0  # the engine has the first, and the second waits for its slot
    made.submit([4, 5, 6], max_tokens=3)
    made.now += 5.0
    made.settle()
    stats = made.core.stats()
    assert (stats["queue_seconds_count"], stats["prefill_seconds_count"]) == (2, 2)
    assert stats["queue_seconds_le_0.3"] == 1 and stats["queue_seconds_le_10"] == 2
    assert 5.0 < stats["queue_seconds_sum"] < 5.5
    assert stats["prefill_seconds_le_10"] == 1 and 15.0 < stats["prefill_seconds_sum"] < 15.5


def test_a_request_that_is_taken_back_is_not_counted_again_when_it_runs_anew():
    made = pipeline(pages=12, slots=6, caching=False)
    for number in range(8):
        made.submit([number, 50 + number, 90 + number], max_tokens=20)
    made.settle()
    stats = made.core.stats()
    assert stats["preemptions_total"] > 0
    assert stats["queue_seconds_count"] == stats["prefill_seconds_count"] == 8
