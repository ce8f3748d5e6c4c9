"""What becomes of requests that end otherwise than they should, and that those are let go."""

from __future__ import annotations

import gc

import msgspec
import pytest
from test_scheduler_core import STOPS, Client, Pipeline, pipeline

from pipeinfer.core import Tick
from pipeinfer.messages import (
    Abort,
    Delivered,
    Done,
    HandOver,
    Plan,
    Refused,
    Release,
    Result,
    StopHit,
    TokenizedRequest,
)
from pipeinfer.params import RequestParams
from pipeinfer.scheduler import policies
from pipeinfer.scheduler.core import FINISH_KINDS, SchedulerCore, SchedulerOptions
from pipeinfer.scheduler.policies import Mixed
from pipeinfer.scheduler.request import Request
from pipeinfer.wire import pack, unpack


class Spoiled(Pipeline):
    """The engine's logits for the requests in `bad` are no numbers. Releases are remembered."""

    def __init__(self, options, engine) -> None:
        super().__init__(options, engine)
        self.bad: set[str] = set()
        self.releases: list[Release] = []
        self.holders: dict[int, str] = {}
        self.rows: dict[int, list[str]] = {}  # by plan
        receive = engine.receive

        def watched(message) -> None:
            if isinstance(message, Plan):
                self.releases += message.releases
                self.holders |= {admit.slot: admit.request_id for admit in message.admits}
                slots = unpack(message.slots).tolist()
                self.rows[message.number] = [self.holders[slot] for slot in slots]
            receive(message)

        engine.receive = watched

    def feed(self, message) -> None:
        super().feed(self._spoiled(message) if isinstance(message, Result) else message)

    def _spoiled(self, result: Result) -> Result:
        """As an engine says it: such a row has produced nothing."""
        produced, ids = unpack(result.produced).tolist(), unpack(result.token_ids).tolist()
        slots, bad, kept = unpack(result.slots).tolist(), [], []
        for row, slot in enumerate(slots):
            its, ids = ids[: produced[row]], ids[produced[row] :]
            if its and self.rows[result.number][row] in self.bad:
                bad.append(slot)
                produced[row], its = 0, []
            kept += its
        return msgspec.structs.replace(
            result, produced=pack(produced), token_ids=pack(kept), bad=pack(bad)
        )


def spoiled(**options) -> Spoiled:
    plain = pipeline(**options)
    made = Spoiled(plain.core.options, plain.engine)
    made.engine.outbox.popleft()  # one hello is enough
    made.deliver()
    made.deliver()
    return made


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("after", [0, 3])
def test_a_request_with_bad_logits_fails_alone_and_leaves_nothing_to_reuse(depth, after):
    p = spoiled(depth=depth, pages=200)
    names = [p.submit([30 + i] * 9, 12) for i in range(3)]
    bad = p.clients[names[1]]
    while len(bad.outputs) < after:
        assert p.deliver()
    p.bad.add(names[1])
    p.settle()
    assert bad.finish == "error" and len(bad.outputs) == after
    assert all(p.clients[name].outputs == p.clients[name].expected for name in names[::2])
    forgotten = [release for release in p.releases if release.drop_prefix]
    assert [(r.cache_prefix, r.output_ids) for r in forgotten] == [(False, pack(bad.outputs))]
    assert p.core.counts["bad_logits"] == 1 and p.core.counts["epochs"] == 1
    assert all(client.finish for client in p.clients.values())


def test_the_client_hears_whose_fault_it_was():
    p = spoiled()
    p.bad.add("r0")
    rows = []
    take = p._take
    p._take = lambda tokens: (rows.extend(tokens.rows), take(tokens))
    p.submit([5] * 4, 3)
    p.settle()
    assert rows[-1].finish == "error" and "not finite" in rows[-1].error


def test_one_that_was_taken_back_meanwhile_is_computed_again_and_fails_then():
    p = spoiled(pages=10, page_size=4, slots=4, budget=64)
    for i in range(4):
        p.submit([30 + i] * 8, 20)
    p.bad.add("r3")
    p.bad.add("r1")
    p.settle()
    assert p.core.counts["preemptions"] > 0
    assert [c.finish == "error" for c in p.clients.values()] == [False, True, False, True]
    assert sum(release.drop_prefix for release in p.releases) == 2


class TakesBack:
    """The default policy, which takes a request back once it is told to, after `after` plans."""

    def __init__(self) -> None:
        self._inner, self.after = Mixed(), -1

    def compose(self, step) -> None:
        if self.after == 0:
            step.preempt_one()
        self.after -= 1
        self._inner.compose(step)


def test_cached_tokens_are_those_of_the_first_admission_however_early_it_was_taken_back(
    monkeypatch,
):
    policy = TakesBack()
    monkeypatch.setattr(policies, "create", lambda _name: policy)
    p = pipeline(pages=200, slots=4, budget=64, overtakes=lambda _results: 0)
    p.deliver()
    p.deliver()
    first = p.submit([7] * 6, 30)
    for _ in range(3):
        p.deliver()
    # The plan that admits it is published; the next one takes it back, before any answer came.
    policy.after = 1
    late = p.submit([40 + i for i in range(17)], 8)
    request = p.core._live[late]
    while request.phase != "running":
        assert p.deliver()
    while request.phase == "running":
        assert request.first_cache_hit == -1, "its hits are told already: no test of what it is for"
        assert p.deliver()
    while request.admission < 2 or request.cache_hit == 0:
        assert p.deliver()
    assert request.cache_hit >= 16, "it finds its own prompt again"
    assert request.first_cache_hit == 0, "which is no hit that its client ever had"
    p.settle()
    assert p.clients[first].finish and p.clients[late].finish


def alive() -> int:
    gc.collect()
    return sum(type(one) is Request for one in gc.get_objects())


def test_requests_with_a_deadline_are_let_go_when_they_end():
    p = pipeline(slots=8, pages=400, budget=64)
    p.deliver()
    p.deliver()
    before = alive()
    for number in range(300):
        name = f"t{number}"
        p.clients[name] = client = type("Any", (), {"outputs": [], "finish": None, "cut": 0})()
        client.expected = []
        params = RequestParams(max_tokens=1)
        p._take = lambda tokens: None
        p.feed(TokenizedRequest(name, 1, 0, 0, pack([9, 8]), params, 0, timeout=1e9))
    while p.engine.outbox:
        p.deliver()
    p.feed(Done(tuple(p.clients)))
    assert p.core.idle() and not p.core._live
    assert alive() - before <= 8, "whoever holds the last flights"
    assert len(p.core._live._deadlines._heap) <= 100


def test_a_request_that_starts_over_has_its_new_deadline():
    core = SchedulerCore(SchedulerOptions())
    for attempt, timeout in ((1, 5.0), (2, 50.0)):
        core.handle(
            TokenizedRequest("r", attempt, 0, 0, pack([1]), RequestParams(), 0, timeout=timeout),
            0.0,
        )
    for second in range(49):
        assert not any(s.channel == "tokens" for s in core.handle(Tick(), float(second)))
    [send] = [s for s in core.handle(Tick(), 50.5) if s.channel == "tokens"]
    assert send.message.rows[0].finish == "abort"


def test_suspects_that_end_are_let_go_although_nobody_is_tried_any_more():
    p = pipeline(slots=8, pages=400, budget=64)
    p.deliver()
    p.deliver()
    names = [p.submit([30 + i] * 6, 30) for i in range(6)]
    for _ in range(5):
        p.deliver()
    for request in p.core._live:
        request.lost_in_flight = True  # when another engine was lost before
    p.engine.crash()
    p.deliver()
    assert p.core._planner.quarantined > 3
    for name in names:
        p.clients[name].cut = 0
    p.feed(Done(tuple(names)))
    assert not p.core._planner.quarantined


def test_what_cannot_fit_and_has_output_already_still_ends_with_an_error():
    """An engine with a smaller pool took over: its client has read some of it."""
    p = pipeline(pages=200, page_size=4)
    p.deliver()
    p.deliver()
    name = p.submit([1, 2, 3], 60)
    while not p.clients[name].outputs:
        p.deliver()
    p.engine.pages = 4
    p.engine.crash()
    told = []
    while p.engine.outbox:
        for send in p.core.handle(p.engine.outbox.popleft(), p.now):
            told.append(send.message)
            if send.channel == "plan":
                p.engine.receive(send.message)
    assert not any(isinstance(message, Refused) for message in told)
    assert [row.finish for m in told if hasattr(m, "rows") for row in m.rows] == ["error"]


@pytest.mark.parametrize("after", [0, 2])
def test_a_prompt_whose_client_left_before_any_token_is_not_kept(after):
    """Nobody has seen its logits: whatever it computed might spoil others."""
    p = spoiled(pages=200, budget=64)
    name = p.submit([30] * 9, 40)
    client = p.clients[name]
    while len(client.outputs) < after:
        assert p.deliver()
    client.cut = 0
    p.feed(Done((name,)))
    p.settle()
    [release] = p.releases
    assert release.cache_prefix == bool(after) and not release.drop_prefix


def test_each_way_of_ending_is_counted_as_what_it_is():
    p = spoiled(pages=60, slots=8, budget=64)
    p.bad.add(p.submit([10] * 5, 4))
    late = TokenizedRequest(
        "late", 1, 0, 0, pack([9]), RequestParams(max_tokens=90), 0, timeout=1.0
    )
    p.clients["late"] = type("Any", (), {"outputs": [], "finish": None, "cut": 0, "expected": []})()
    p._take = lambda tokens: None
    p.feed(late)
    stopped, aborted = p.submit([11] * 5, 80), p.submit([12] * 5, 80)
    for _ in range(3):
        p.submit([13] * 5, 4)
    p.feed(TokenizedRequest("large", 1, 0, 0, pack([1] * 300), RequestParams(max_tokens=5), 0))
    while not p.core._live[stopped].outputs:
        assert p.deliver()
    p.feed(StopHit(stopped, 1, 1))
    p.feed(Abort(aborted, 1))
    p.now = 2.0
    p.feed(Tick())
    while p.deliver():
        pass
    counted = {end: p.core.stats()[f"{end}_total"] for end in FINISH_KINDS}
    assert counted == {
        "finished": 3, "stopped": 1, "timed_out": 1, "failed": 1, "aborted": 1, "refused": 1,
        "handed_over": 0,
    }  # fmt: skip
    assert p.core.stats()["accepted_total"] == 8 and p.core.idle()


@pytest.mark.parametrize(
    "late",
    [
        StopHit("r", 1, 1),
        Abort("r", 1),
        HandOver("r", 1),
        Delivered("r", 1, pack([1, 2]), ended=True, finish="length"),
    ],
    ids=lambda message: type(message).__name__,
)
@pytest.mark.parametrize("running", [True, False])
def test_what_is_said_of_an_earlier_attempt_ends_no_later_one(late, running):
    """A gateway has sent it again, and what was under way to the one before arrives."""
    p = pipeline()
    if running:
        p.deliver()
        p.deliver()
    prompt = [5, 6, 7]
    p.clients["r"] = Client(prompt, 20, 0)
    params = RequestParams(max_tokens=20)
    for attempt in (1, 2):
        p.feed(TokenizedRequest("r", attempt, 0, 0, pack(prompt), params, 0, eos_ids=STOPS))
    while running and not p.clients["r"].outputs:
        p.deliver()
    p.feed(late)
    assert p.core._live["r"].work.attempt == 2
    p.settle()
