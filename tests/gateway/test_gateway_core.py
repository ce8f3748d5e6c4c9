"""The gateway's core alone: records of requests, their choices, and the health of the pipeline."""

from __future__ import annotations

import pytest
from gateway_pipeline import STAGES, heartbeat, nothing_kept
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from pipeinfer.core import GIVE_UP_FACTOR, LOCAL, MAX_STALE, Drain, Leave, Send, SendFailed, Tick
from pipeinfer.gateway.core import ADOPTION_PATIENCE, ADOPTION_TIMEOUT, GatewayCore
from pipeinfer.gateway.health import ExpectedStage
from pipeinfer.gateway.ledger import (
    AdoptionEnded,
    Backlog,
    Call,
    ClientDisconnected,
    Failed,
    OutputDelta,
    Started,
    StatusChanged,
)
from pipeinfer.messages import (
    Abort,
    Accepted,
    Adopt,
    Delivered,
    Done,
    HandOver,
    LogprobTexts,
    Message,
    Recover,
    Recovered,
    Refused,
    Retention,
    StopHit,
    Submit,
    Text,
    TextRow,
)
from pipeinfer.params import RequestParams
from pipeinfer.wire import logprob_bytes, pack

EXPECTED = [ExpectedStage(stage, stage.split("-")[0]) for stage in STAGES]
PARAMS = RequestParams()


def row(text: str, byte: int, token: int, *, attempt: int = 1, **more: object) -> TextRow:
    """One row of request "r" with a single token."""
    return TextRow("r", attempt, text, byte, token, pack([token]), **more)  # type: ignore


def test_a_message_of_another_stage_is_an_error() -> None:
    with pytest.raises(TypeError, match="StopHit"):
        GatewayCore(EXPECTED).handle(StopHit("r", 1, 1), 0.0)


def introduce(core: GatewayCore, now: float) -> list[Send]:
    """The first tick; those that the core asks then have kept nothing."""
    first = asked = core.handle(Tick(), now)
    while asked := [send for send in asked if send.channel == "recovery"]:
        answers = [answer for send in asked for answer in nothing_kept(send)]
        asked = [send for answer in answers for send in core.handle(answer, now)]
    return first


LIMITS = {"max_queue": None, "max_queue_tokens": 0}


class Harness:
    """A core and what it said; `now` is the test's clock."""

    def __init__(self, ready: bool = True, **options: object) -> None:
        limits = [options.pop(name, most) for name, most in LIMITS.items()]
        backlog = Backlog(*limits)  # type: ignore[arg-type]
        self.core = GatewayCore(EXPECTED, backlog=backlog, **options)  # type: ignore[arg-type]
        self.now = 100.0
        self.introduction = introduce(self.core, self.now)
        if ready:
            self.beat_all()

    def do(self, event: Message) -> list[Send]:
        return self.core.handle(event, self.now)

    def local(self, event: Message) -> list[Message]:
        return [send.message for send in self.do(event) if send.channel == LOCAL]

    def beat_all(self) -> None:
        for stage in STAGES:
            self.do(heartbeat(stage))

    def running(self, name: str = "r", **options: object) -> None:
        """A request that was accepted and is silent so far."""
        self.do(Call(name, PARAMS, text="x", **options))  # type: ignore[arg-type]
        self.do(Accepted(name, 1, 0, 3))

    def upstream(self, event: Message) -> list[Message]:
        return [send.message for send in self.do(event) if send.channel == "requests"]

    def recovered(self, incarnation: int = 2) -> list[Message]:
        """What a tokenizer that was started again is told, without the brackets around it."""
        first, *told, last = self.do(Recover("tokenizer-0", incarnation))
        assert {send.to for send in (first, *told, last)} == {"tokenizer-0"}
        assert first.message == Recovered("gateway-0", incarnation, opening=True)
        assert last.message == Recovered("gateway-0", incarnation)
        return [send.message for send in told]

    def is_live(self, name: str = "r") -> bool:
        return any(s.channel == "requests" for s in self.do(ClientDisconnected(name)))


def test_nothing_is_accepted_before_every_stage_was_ready() -> None:
    harness = Harness(ready=False)
    [failed] = harness.local(Call("r", PARAMS, text="x"))
    assert isinstance(failed, Failed)
    assert (failed.status, failed.code, failed.retry_after) == (503, "starting", 1)
    for stage in STAGES[:-1]:
        harness.do(heartbeat(stage))
    assert harness.core.status == "starting" and harness.core.state()[0] == "waiting"
    assert "detokenizer-0" in harness.core.state()[1]
    [changed] = harness.local(heartbeat(STAGES[-1]))
    assert changed == StatusChanged("ready", True, "")
    [submit] = harness.do(Call("r", PARAMS, text="x"))
    assert submit.channel == "requests" and submit.to == "tokenizer-0"


def test_submit_carries_the_call_and_a_final_seed() -> None:
    def seeds(harness: Harness) -> list[int]:
        calls = [
            Call("a", PARAMS, text="x"),
            Call("b", RequestParams(seed=-1), text="x"),
            Call(
                "c",
                PARAMS,
                prompt_ids=pack([5]),
                priority=3,
                cache_salt="s",
                trace="t",
                return_prompt_ids=True,
            ),
        ]
        submits = [harness.do(call)[0].message for call in calls]
        assert all(isinstance(s, Submit) and s.attempt == 1 for s in submits)
        last = submits[-1]
        assert isinstance(last, Submit) and last.return_prompt_ids
        assert (last.prompt_ids, last.priority, last.cache_salt, last.trace) == (
            pack([5]), 3, "s", "t",
        )  # fmt: skip
        return [s.seed for s in submits if isinstance(s, Submit)]

    first = seeds(Harness(seed=1))
    assert first == seeds(Harness(seed=1)) and first != seeds(Harness(seed=2))
    assert first[1] == 2**64 - 1, "a negative seed is taken modulo 2**64"
    assert len(set(first)) == 3


def test_a_call_without_wishes_is_a_plain_request() -> None:
    harness = Harness()
    for n in range(64):
        [send] = harness.do(Call(f"r{n}", PARAMS, text="x"))
        submit = send.message
        assert isinstance(submit, Submit) and 0 <= submit.seed < 2**63
        assert submit == Submit(f"r{n}", 1, 0, PARAMS, submit.seed, "x", group=-1)


def test_deltas_follow_started_and_end_with_the_counts() -> None:
    harness = Harness()
    harness.do(Call("r", PARAMS, text="x"))
    accepted = Accepted("r", 1, 0, 3, pack([1, 2, 3]))
    assert harness.local(accepted) == [Started("r", 0, 3, pack([1, 2, 3]))]
    assert harness.local(Text((row("ab", 0, 0),))) == [OutputDelta("r", "ab", pack([0]), 0, 0)]
    last = row("é", 2, 1, finish="stop", stop_reason="é", output_tokens=2, cached_tokens=1)
    assert harness.local(Text((last,))) == [
        OutputDelta("r", "é", pack([1]), 2, 1, "stop", "é", 3, 2, 1)
    ]
    assert harness.core.idle()


def test_rows_that_overtake_accepted_are_delivered_after_it() -> None:
    harness = Harness()
    harness.do(Call("r", PARAMS, text="x"))
    last = row("b", 1, 1, finish="length", output_tokens=2)
    assert harness.do(Text((row("a", 0, 0), last))) == []
    started, first, second = harness.local(Accepted("r", 1, 0, 1))
    assert isinstance(started, Started)
    assert isinstance(first, OutputDelta) and isinstance(second, OutputDelta)
    assert (first.text, second.text, second.finish, second.prompt_tokens) == ("a", "b", "length", 1)
    assert harness.core.idle()


def test_a_hole_in_the_text_or_tokens_fails_only_that_request() -> None:
    for broken in (row("c", 2, 1), row("c", 1, 2)):
        harness = Harness()
        harness.running()
        harness.running("other")
        harness.do(Text((row("a", 0, 0),)))
        abort, failed = harness.do(Text((broken,)))
        assert abort.message == Abort("r", 1, "stream_broken") and abort.to == "tokenizer-0"
        assert isinstance(failed.message, Failed) and failed.message.status == 500
        assert not harness.is_live() and harness.is_live("other")


def test_a_repeat_that_cuts_a_character_fails_instead_of_showing_half() -> None:
    harness = Harness()
    harness.running()
    harness.do(Text((row("ab", 0, 0),)))
    failed = harness.local(Text((TextRow("r", 1, "aéc", 0, 0, b""),)))[0]
    assert isinstance(failed, Failed) and "inside a character" in failed.message


def test_hangup_aborts_once_and_late_rows_are_dropped() -> None:
    harness = Harness()
    harness.running()
    assert harness.do(ClientDisconnected("r", "client")) == [
        Send("requests", "tokenizer-0", Abort("r", 1, "client"))
    ]
    assert harness.do(ClientDisconnected("r")) == []
    assert harness.do(Text((row("a", 0, 0),))) == []
    assert harness.core.stats()["late_rows"] == 1 and harness.core.idle()


def test_a_request_of_a_dead_gateway_is_aborted_once() -> None:
    harness = Harness()
    assert [s.message for s in harness.do(Text((row("a", 7, 3, attempt=4),)))] == [
        Abort("r", 4, "unknown to its gateway")
    ]
    assert harness.do(Text((row("b", 8, 4, attempt=4),))) == []


def test_refusal_and_error_reach_the_client_and_need_no_abort() -> None:
    harness = Harness()
    harness.do(Call("r", PARAMS, text="x"))
    assert harness.do(Refused("r", 0, 0, 400, "of another attempt")) == []
    failed, done = harness.do(Refused("r", 1, 0, 400, "too long", "prompt", "code"))
    assert failed.message == Failed("r", 400, "too long", "prompt", "code", never_ran=True)
    assert done == Send("requests", "tokenizer-0", Done(("r",)))
    harness.running("r")
    failed, done = harness.do(Text((TextRow("r", 1, "", 0, 0, b"", "error", error="boom"),)))
    assert failed.message == Failed("r", 500, "boom", None, "request_failed")
    assert done.message == Done(("r",))
    assert harness.core.idle()


@pytest.mark.parametrize(
    ("status", "outcome"), [(400, "refused"), (503, "refused"), (500, "error")]
)
def test_what_never_ran_is_refused_and_no_error(status: int, outcome: str) -> None:
    harness = Harness()
    harness.do(Call("r", PARAMS, text="x"))
    failed, _ = harness.do(Refused("r", 1, 0, status, "why"))
    assert isinstance(failed.message, Failed) and failed.message.outcome == outcome
    assert Failed("r", 503, "its host is lost", code="host_lost").outcome == "error"


def test_text_that_comes_together_with_an_error_is_delivered_before_it() -> None:
    """So it is after the death of a detokenizer, which is told all in one row."""
    harness = Harness()
    harness.running("r")
    harness.do(Text((row("ab", 0, 0),)))
    ids, logprobs = pack([0, 8, 9]), bytes(3 * logprob_bytes(0))
    texts = LogprobTexts(logprobs, (b"ab", b"c", b"d"), pack([0, 2, 3]))
    last = TextRow("r", 1, "abcd", 0, 0, ids, "error", error="boom", logprobs=texts)
    delta, failed = harness.local(Text((last,)))
    assert isinstance(delta, OutputDelta) and failed == Failed(
        "r", 500, "boom", None, "request_failed"
    )
    assert (delta.text, delta.ids, delta.finish) == ("cd", ids[4:], None)
    assert (delta.byte_offset, delta.token_offset) == (2, 1)
    assert delta.logprobs is not None and delta.logprobs.texts == (b"c", b"d")


def test_the_pipeline_hears_once_of_all_that_ended_together() -> None:
    harness = Harness()
    for name in "abc":
        harness.running(name)
    ends = [TextRow(name, 1, "x", 0, 0, pack([1]), "stop") for name in "ab"]
    assert harness.upstream(Text(tuple(ends))) == [Done(("a", "b"))]
    assert harness.is_live("c")


def test_timeout_without_output_is_an_error_and_with_output_an_abort() -> None:
    harness = Harness()
    harness.running("r", timeout=2.0)
    harness.running("quiet", timeout=2.0)
    harness.running("patient", timeout=9.0)
    harness.do(Text((row("ab", 0, 0),)))
    harness.now += 1.9
    assert harness.do(Tick()) == []
    harness.now += 0.2
    sends = harness.do(Tick())
    aborts = [s.message for s in sends if s.channel == "requests"]
    assert sorted(aborts, key=repr) == [Abort(name, 1, "timeout") for name in ("quiet", "r")]
    delta = next(s.message for s in sends if isinstance(s.message, OutputDelta))
    assert (delta.request_id, delta.text, delta.finish) == ("r", "", "abort")
    assert (delta.byte_offset, delta.prompt_tokens, delta.output_tokens) == (2, 3, 1)
    failed = next(s.message for s in sends if isinstance(s.message, Failed))
    assert (failed.request_id, failed.status, failed.param) == ("quiet", 408, "timeout")
    assert harness.is_live("patient")


def test_requests_whose_deadlines_came_late_or_early_all_end_in_time() -> None:
    """Also after the deadlines of many that ended were dropped."""
    harness = Harness()
    for name, timeout in (("last", 30.0), ("first", 10.0), ("second", 20.0), ("never", 0.0)):
        harness.running(name, timeout=timeout)
    for n in range(MAX_STALE + 10):
        harness.do(Call(str(n), PARAMS, text="x", timeout=100.0))
        harness.do(ClientDisconnected(str(n)))
    assert len(harness.core._deadlines) == 3
    for name in ("first", "second", "last"):
        harness.now += 9.9
        assert harness.upstream(Tick()) == []
        harness.now += 0.1
        assert harness.upstream(Tick()) == [Abort(name, 1, "timeout")]
    assert harness.is_live("never")


@pytest.mark.parametrize("timeout", [0.5, 2.0])
def test_abort_by_the_scheduler_for_time_is_the_same_error(timeout: float) -> None:
    harness = Harness()
    harness.running("r", timeout=timeout)
    harness.now += timeout
    empty = TextRow("r", 1, "", 0, 0, b"", "abort")
    [failed] = harness.local(Text((empty,)))
    assert isinstance(failed, Failed) and failed.status == 408


def test_an_abort_before_the_deadline_is_no_matter_of_time() -> None:
    """The server falls asleep, and those that run end with what they have: here, nothing."""
    harness = Harness()
    harness.running("r", timeout=2.0)
    harness.now += 1.9
    [delta] = harness.local(Text((TextRow("r", 1, "", 0, 0, b"", "abort"),)))
    assert isinstance(delta, OutputDelta) and (delta.text, delta.finish) == ("", "abort")


def test_an_abort_keeps_the_text_and_without_a_timeout_it_is_no_matter_of_time() -> None:
    harness = Harness()
    harness.running("r", timeout=2.0)
    harness.do(Text((row("ab", 0, 0),)))
    for text, timeout in (("", 2.0), ("c", 2.0), ("", 0.0)):
        if not harness.core._records:
            harness.running("r", timeout=timeout)
        known = harness.core._records["r"]
        last = TextRow("r", 1, text, known.bytes, known.tokens, b"", "abort")
        [delta] = harness.local(Text((last,)))
        assert isinstance(delta, OutputDelta) and (delta.text, delta.finish) == (text, "abort")


def test_the_end_is_told_again_to_the_tokenizer_that_had_the_request_or_to_all() -> None:
    two = [*EXPECTED, ExpectedStage("tokenizer-1", "tokenizer")]
    core = GatewayCore(two)
    introduce(core, 0.0)
    for stage in two:
        core.handle(heartbeat(stage.stage), 0.0)
    [submit] = core.handle(Call("r", PARAMS, text="y"), 0.0)
    assert submit.to == "tokenizer-1"
    core.handle(ClientDisconnected("r", "disconnect"), 0.0)
    [again] = core.handle(Text((row("late", 0, 0),)), 60.0)
    assert (again.to, again.message) == ("tokenizer-1", Abort("r", 1, "disconnect"))
    stray = TextRow("stray", 3, "x", 0, 0, b"")
    sends = core.handle(Text((stray,)), 60.0)
    assert [(s.to, s.message) for s in sends] == [
        (to, Abort("stray", 3, "unknown to its gateway")) for to in ("tokenizer-0", "tokenizer-1")
    ]


def test_queue_limit_counts_only_requests_without_output() -> None:
    harness = Harness(max_queue=2)
    harness.running("r")
    harness.running("s")
    [failed] = harness.local(Call("t", PARAMS, text="x"))
    assert isinstance(failed, Failed) and (failed.status, failed.retry_after) == (429, 1)
    harness.do(Text((row("a", 0, 0),)))
    assert harness.core.stats()["waiting"] == 1 and harness.core.stats()["running"] == 1
    assert isinstance(harness.do(Call("t", PARAMS, text="x"))[0].message, Submit)


def test_queue_limit_counts_the_prompt_tokens_that_wait() -> None:
    harness = Harness(max_queue_tokens=100)
    for name, ids in (("r", 60), ("s", 40)):
        assert isinstance(
            harness.do(Call(name, PARAMS, prompt_ids=pack(range(ids))))[0].message, Submit
        )
    for call in (
        Call("t", PARAMS, prompt_ids=pack([1])),
        Call("t", PARAMS, text="x"),
        Call("t", PARAMS, chat=[{"role": "user", "content": "x"}]),
    ):
        [failed] = harness.local(call)
        assert isinstance(failed, Failed)
        assert (failed.status, failed.code, failed.retry_after) == (429, "queue_full", 1)
    assert harness.core.refusal(1) is not None, "before a request is read"
    harness.do(Accepted("r", 1, 0, 60))
    harness.do(Text((row("a", 0, 0),)))
    assert harness.core.stats()["waiting_tokens"] == 40
    assert harness.core.refusal(1) is None
    assert isinstance(harness.do(Call("t", PARAMS, text="x" * 230))[0].message, Submit)
    assert isinstance(harness.local(Call("u", PARAMS, text="x" * 10))[0], Failed)
    harness.do(ClientDisconnected("s"))
    assert isinstance(harness.do(Call("u", PARAMS, text="x" * 10))[0].message, Submit)


def test_a_prompt_counts_as_many_tokens_as_it_turned_out_to_have() -> None:
    harness = Harness(max_queue_tokens=1000)
    harness.do(Call("r", PARAMS, text="x"))
    harness.do(Call("s", PARAMS, text="x" * 400))
    before = harness.core.stats()["waiting_tokens"]
    harness.do(Accepted("r", 1, 0, 900))
    harness.do(Accepted("s", 1, 0, 5))
    after = harness.core.stats()["waiting_tokens"]
    assert 880 < after - before < 900, "few tokens do not make a long text small"
    assert isinstance(harness.local(Call("t", PARAMS, text="x" * 400))[0], Failed)
    for name in "rs":
        harness.do(ClientDisconnected(name))
    assert harness.core.stats()["waiting_tokens"] == 0


def test_a_prompt_larger_than_all_that_may_wait_is_taken_when_nothing_waits() -> None:
    harness = Harness(max_queue_tokens=10)
    harness.do(Call("r", PARAMS, prompt_ids=pack(range(50))))
    assert isinstance(harness.local(Call("s", PARAMS, prompt_ids=pack([1])))[0], Failed)


def test_drain_refuses_new_requests_and_finishes_running_ones() -> None:
    harness = Harness()
    harness.running()
    assert harness.local(Drain()) == [StatusChanged("draining", False, "")]
    early = harness.core.refusal(1)
    assert early is not None and (early.status, early.code) == (503, "draining")
    [failed] = harness.local(Call("t", PARAMS, text="x"))
    assert isinstance(failed, Failed) and (failed.status, failed.code) == (503, "draining")
    assert not harness.core.idle() and harness.core.state()[0] == "draining"
    assert len(harness.local(Text((row("a", 0, 0, finish="stop"),)))) == 1
    assert harness.core.idle()


def test_requests_are_taken_while_the_engine_restarts() -> None:
    harness = Harness()
    harness.running()
    [changed] = harness.local(heartbeat("engine-0-0", "loading", incarnation=2))
    assert isinstance(changed, StatusChanged)
    assert (changed.status, changed.answering) == ("degraded", False)
    assert isinstance(harness.do(Call("t", PARAMS, text="x"))[0].message, Submit)
    [changed] = harness.local(heartbeat("engine-0-0", incarnation=2))
    assert changed == StatusChanged("ready", True, "")
    assert harness.is_live("r") and harness.is_live("t"), "an engine restart loses no request"


def test_a_silent_stage_is_lost_until_it_speaks_again() -> None:
    harness = Harness()
    harness.now += 4.9
    for stage in STAGES[1:]:
        harness.do(heartbeat(stage))
    assert harness.do(Tick()) == []
    harness.now += 0.2
    [changed] = harness.local(Tick())
    assert isinstance(changed, StatusChanged) and changed.status == "degraded"
    assert "tokenizer-0 is lost" in changed.reason
    assert harness.local(heartbeat("tokenizer-0")) == [StatusChanged("ready", True, "")]


def test_one_whole_group_is_enough_to_answer() -> None:
    second = [
        ExpectedStage("scheduler-1", "scheduler", 1),
        ExpectedStage("engine-1-0", "engine", 1),
    ]
    core = GatewayCore([*EXPECTED, *second])
    for stage in (*STAGES, "scheduler-1"):
        core.handle(heartbeat(stage), 0.0)
    assert not core.can_serve(), "at first all stages must have been ready"
    core.handle(heartbeat("engine-1-0"), 0.0)
    core.handle(heartbeat("engine-1-0", "failed"), 0.0)
    assert core.status == "degraded" and core.can_serve()
    core.handle(heartbeat("scheduler-0", "waiting"), 0.0)
    assert not core.can_serve()


def test_a_restarted_tokenizer_is_told_every_live_request_and_where_it_runs() -> None:
    harness = Harness()
    harness.running("accepted")
    harness.running("silent")
    harness.do(Text((TextRow("accepted", 1, "a", 0, 0, pack([1])),)))
    harness.do(Call("new", RequestParams(seed=7), text="y", timeout=5.0, trace="t"))
    told = {submit.request_id: submit for submit in harness.recovered()}  # type: ignore
    assert list(told) == ["accepted", "silent", "new"], "in the order in which they came"
    assert {name: (submit.group, submit.attempt) for name, submit in told.items()} == {
        "accepted": (0, 1),
        "silent": (0, 1),
        "new": (-1, 1),
    }
    assert (told["new"].text, told["new"].seed, told["new"].trace) == ("y", 7, "t")
    assert harness.core.stats()["resubmitted"] == 3
    assert harness.do(Accepted("silent", 1, 0, 3)) == [], "started is said once"
    assert isinstance(harness.local(Accepted("new", 1, 0, 1))[0], Started)


def test_a_restarted_tokenizer_hears_again_of_the_ends_of_the_last_minute() -> None:
    harness = Harness()
    for name in ("old", "hung up", "done"):
        harness.running(name)
    harness.do(ClientDisconnected("old"))
    harness.now += 59.0
    harness.do(ClientDisconnected("hung up"))
    harness.do(Text((TextRow("done", 1, "a", 0, 0, pack([1]), "stop"),)))
    harness.now += 2.0
    assert harness.recovered() == [Done(("done",)), Abort("hung up", 1, "client")]
    assert harness.recovered(3) == harness.recovered(4), "asked again, it answers again"


@pytest.mark.parametrize("stage", ["tokenizer-0", "scheduler-0", "detokenizer-0"])
def test_a_restarted_stage_costs_no_request(stage: str) -> None:
    harness = Harness()
    harness.running("r")
    harness.running("silent")
    harness.do(Text((row("a", 0, 0),)))
    for state, incarnation in (("starting", 2), ("ready", 2), ("ready", 1)):
        sends = harness.do(heartbeat(stage, state, incarnation=incarnation))
        assert all(isinstance(send.message, StatusChanged) for send in sends)
    assert harness.is_live("r") and harness.is_live("silent")


def test_output_that_is_sent_again_from_its_beginning_is_shown_once() -> None:
    """A detokenizer that was started again decodes everything, in one row or in several."""
    harness = Harness()
    harness.running()
    harness.do(Text((TextRow("r", 1, "né", 0, 0, pack([1, 2])),)))
    harness.do(Text((TextRow("r", 1, "🙂", 3, 2, pack([3])),)))
    assert harness.local(Text((TextRow("r", 1, "né🙂", 0, 0, pack([1, 2, 3])),))) == []
    assert harness.local(Text((TextRow("r", 1, "n", 0, 0, pack([1])),))) == [], "less than before"
    [delta] = harness.local(Text((TextRow("r", 1, "né🙂你好", 0, 0, pack([1, 2, 3, 4])),)))
    assert delta == OutputDelta("r", "你好", pack([4]), 7, 3)
    whole = TextRow("r", 1, "né🙂你好", 0, 0, pack([1, 2, 3, 4]), "stop", None, 4)
    [last] = harness.local(Text((whole,)))
    assert isinstance(last, OutputDelta)
    assert (last.text, last.ids, last.finish, last.byte_offset) == ("", b"", "stop", 13)


def test_what_a_tokenizer_tells_when_it_is_not_waited_for_any_more_is_aborted() -> None:
    """Its detokenizer has told the text long since: a record of it would never end."""
    core = GatewayCore(EXPECTED)
    core.handle(Tick(), 0.0)
    [opening, end] = nothing_kept(Send("recovery", "detokenizer-0", Recover("gateway-0", 0)))
    core.handle(Tick(), ADOPTION_PATIENCE)
    for answer in (opening, end):
        core.handle(answer, ADOPTION_PATIENCE)
    [ended] = [s for s in core.handle(Tick(), ADOPTION_TIMEOUT) if s.channel == LOCAL]
    assert isinstance(ended.message, AdoptionEnded)
    retention = Retention(stream="s", owner="o", seconds=9.0)
    submit = Submit("r", 2, 0, PARAMS, 7, text="x", choices=(0, 1), retention=retention)
    adopt = Adopt("tokenizer-0", submit, Accepted("r", 2, 0, 1, choices=(0, 1)))
    aborts = core.handle(adopt, ADOPTION_TIMEOUT + 1.0)
    assert [(s.channel, s.to, s.message) for s in aborts] == [
        ("requests", "tokenizer-0", Abort(name, 2, "its gateway did not wait for it"))
        for name in ("r", "r/1")
    ]
    assert core.idle() and core.stats()["adopted"] == 0
    assert core.handle(adopt, ADOPTION_TIMEOUT + 2.0) == [], "told twice"


def test_rows_that_go_on_after_the_end_abort_the_request_again() -> None:
    harness = Harness()
    harness.running()
    harness.do(Text((row("a", 0, 0, finish="stop"),)))
    late = Text((row("b", 1, 1),))
    harness.now += 1.0
    assert harness.do(late) == [], "what was under way when it ended"
    harness.now += 1.5
    assert harness.upstream(late) == [Abort("r", 1, "it has ended")]
    assert harness.do(late) == [], "once, until that had its time"
    harness.now += 2.5
    assert len(harness.upstream(late)) == 1
    assert harness.core.stats()["late_rows"] == 4


def test_a_gateway_introduces_itself_before_its_first_request() -> None:
    """Requests of the gateway before it are nobody's: tokenizers abort them."""
    harness = Harness(ready=False, incarnation=5)
    assert harness.introduction[0] == Send("recovery", "tokenizer-0", Recover("gateway-0", 5))
    assert harness.do(Tick()) == []


def test_a_gateway_that_leaves_finishes_what_runs() -> None:
    harness = Harness()
    harness.running()
    harness.do(Leave())
    [failed] = harness.local(Call("t", PARAMS, text="x"))
    assert isinstance(failed, Failed) and failed.code == "draining"
    assert not harness.core.idle()
    harness.do(Text((row("a", 0, 0, finish="stop"),)))
    assert harness.core.idle()


def test_a_request_id_in_use_is_a_broken_invariant() -> None:
    harness = Harness()
    harness.running()
    with pytest.raises(ValueError, match="'r' is in use"):
        harness.do(Call("r", PARAMS, text="x"))


@st.composite
def repeated_rows(draw: st.DrawFn) -> tuple[list[str], list[TextRow]]:
    """Pieces of text, one for each token, and rows that show them with repeats and overlaps.

    No row starts past what the rows before it showed; text lags behind its tokens at random. From
    some row on they are of the next attempt, which begins with the whole output. Rows of earlier
    ones, with other text, are strewn in.
    """
    pieces = draw(st.lists(st.text(max_size=4), min_size=1, max_size=12))
    end = len(pieces)
    starts = [len("".join(pieces[:i]).encode()) for i in range(end + 1)]
    rows: list[TextRow] = []
    text_at = id_at = 0
    attempt = 1
    for _ in range(draw(st.integers(0, 15))):
        if attempt < (drawn := draw(st.sampled_from([1, 1, 1, 2]))):
            attempt, text_at, id_at = drawn, 0, 0
        text_from, id_from = draw(st.integers(0, text_at)), draw(st.integers(0, id_at))
        text_to, id_to = draw(st.integers(text_from, end)), draw(st.integers(id_from, end))
        rows.append(_range(pieces, starts, text_from, text_to, id_from, id_to, attempt))
        if draw(st.booleans()):
            where = draw(st.integers(0, 40))
            rows.append(row("stale", where, where, attempt=attempt - 1))
        text_at, id_at = max(text_at, text_to), max(id_at, id_to)
    text_from, id_from = draw(st.integers(0, text_at)), draw(st.integers(0, id_at))
    rows.append(_range(pieces, starts, text_from, end, id_from, end, attempt, finish="stop"))
    return pieces, rows


def _range(
    pieces: list[str], starts: list[int], text_from: int, text_to: int, id_from: int, id_to: int,
    attempt: int, **more: object,
) -> TextRow:  # fmt: skip
    text = "".join(pieces[text_from:text_to])
    ids = pack(range(id_from, id_to))
    return TextRow("r", attempt, text, starts[text_from], id_from, ids, **more)  # type: ignore


@given(repeated_rows(), st.data())
def test_no_byte_and_no_token_is_shown_twice_or_skipped(
    case: tuple[list[str], list[TextRow]], data: st.DataObject
) -> None:
    pieces, rows = case
    harness = Harness()
    harness.do(Call("r", PARAMS, text="x"))
    accepted_at = data.draw(st.integers(0, len(rows)))
    shown: list[Message] = []
    for i, one in enumerate(rows):
        if i == accepted_at:
            shown += harness.local(Accepted("r", 1, 0, 1))
        shown += harness.local(Text((one,)))
    shown += harness.local(Accepted("r", rows[-1].attempt, 1, 1))
    assert isinstance(shown[0], Started)
    deltas = [delta for delta in shown[1:] if isinstance(delta, OutputDelta)]
    assert len(deltas) == len(shown) - 1
    assert [delta.finish for delta in deltas] == [None] * (len(deltas) - 1) + ["stop"]
    text, ids = "", b""
    for delta in deltas:
        assert delta.byte_offset == len(text.encode()) and delta.token_offset == len(ids) // 4
        assert delta.text or delta.ids or delta.finish
        text, ids = text + delta.text, ids + delta.ids
    assert text == "".join(pieces)
    assert ids == pack(range(len(pieces)))
    assert harness.core.idle()


def test_a_prompt_that_is_only_encoded_ends_with_its_ids_also_if_a_tokenizer_dies() -> None:
    harness = Harness()
    [sent] = harness.upstream(Call("r", PARAMS, text="x", return_prompt_ids=True, only_encode=True))
    assert isinstance(sent, Submit) and sent.only_encode
    [again] = harness.recovered()
    assert again == sent
    answer = harness.do(Accepted("r", 1, -1, 3, b"ids"))
    said = [send.message for send in answer if send.channel == LOCAL]
    assert [type(one) for one in said] == [Started, OutputDelta]
    assert said[0].prompt_ids == b"ids" and said[1].finish == "stop"
    assert [s.message for s in answer if s.channel == "requests"] == [Done(("r",))]
    assert harness.core.idle() and not harness.do(Accepted("r", 1, -1, 3, b"ids"))


def test_what_needs_a_stage_that_never_comes_back_fails_and_what_goes_on_without_it_does_not() -> (
    None
):
    harness = Harness(host_loss=2.0)
    harness.running("runs")
    harness.do(Call("waits", PARAMS, text="x"))
    for lost, ended in (("tokenizer-0", "waits"), ("detokenizer-0", "runs")):
        began = harness.now
        while (
            harness.now < began + 5.0 + GIVE_UP_FACTOR * 2.0
        ):  # silence, and what it may take to boot
            assert harness.do(Tick()) == [] or harness.now < began + 6.0
            harness.now += 0.5
            for stage in STAGES:
                if stage != lost:
                    harness.do(heartbeat(stage))
        harness.now += 1.0
        abort, failed = harness.do(Tick())
        assert abort.message == Abort(ended, 1, "host_lost")
        message = f"{lost} is lost: silent for more than 5 s"
        assert failed.message == Failed(ended, 503, message, code="host_lost")
        harness.beat_all()
    assert harness.core.idle()


def handed_over(harness: Harness, attempt: int, name: str = "r") -> list[Send]:
    return harness.do(HandOver(name, attempt, "tokenizer-0"))


def test_a_request_of_a_lost_group_goes_on_after_what_its_client_has() -> None:
    harness = Harness()
    harness.running("r")
    harness.do(Text((row("a", 0, 0),)))
    harness.do(Text((row("b", 1, 1),)))
    told = Delivered("r", 2, pack([0, 1]))
    assert handed_over(harness, 1) == [Send("recovery", "tokenizer-0", told)]
    assert handed_over(harness, 1) == [], "that was answered"
    assert harness.local(Text((row("x", 2, 2),))) == [], "its group was lost"
    [told] = [m for m in harness.recovered() if isinstance(m, Submit)]
    assert told.attempt == 2, "a tokenizer that lost the answer asks as of that attempt"
    assert harness.local(Accepted("r", 2, 1, 3)) == []
    whole = TextRow("r", 2, "abc", 0, 0, pack([0, 1, 7]), "length", output_tokens=3)
    [delta] = harness.local(Text((whole,)))
    assert (delta.text, delta.ids, delta.finish) == ("c", pack([7]), "length")
    assert handed_over(harness, 2) == [], "it has ended"


def test_a_request_that_was_computed_anew_with_other_tokens_goes_on_after_what_its_client_has() -> (
    None
):
    harness = Harness()
    harness.running("r")
    harness.do(Text((row("a", 0, 0),)))
    harness.do(Text((row("b", 1, 1),)))
    told = Send("recovery", "tokenizer-0", Delivered("r", 2, pack([0, 1])))
    assert harness.do(Text((TextRow("r", 1, "xyz", 0, 0, pack([7, 8, 9])),))) == [told]
    assert harness.local(Text((row("c", 2, 2),))) == [], "of the attempt before"
    whole = TextRow("r", 2, "abz", 0, 0, pack([0, 1, 9]), "length", output_tokens=3)
    [delta] = harness.local(Text((whole,)))
    assert (delta.text, delta.ids, delta.finish) == ("z", pack([9]), "length")
    assert harness.core.stats()["diverged"] == 1


def test_a_request_whose_groups_differ_goes_on_after_what_its_client_has() -> None:
    """Its detokenizer asks, and does not know which tokenizer the request belongs to."""
    harness = Harness()
    harness.running("r")
    harness.do(Text((row("a", 0, 0),)))
    told = Send("recovery", "tokenizer-0", Delivered("r", 2, pack([0])))
    assert harness.do(HandOver("r", 1)) == [told] and harness.do(HandOver("r", 1)) == []
    assert harness.core.stats()["diverged"] == 1


def test_what_came_before_it_was_known_where_a_request_runs_is_void_if_that_group_is_lost() -> None:
    harness = Harness()
    harness.do(Call("r", PARAMS, text="x"))
    harness.do(Text((row("a", 0, 0),)))
    [told] = handed_over(harness, 1)
    assert told.message == Delivered("r", 2, b"")
    assert [type(m) for m in harness.local(Accepted("r", 2, 1, 3))] == [Started]
    [delta] = harness.local(Text((row("z", 0, 0, attempt=2),)))
    assert delta.text == "z"


def test_a_restarted_tokenizer_is_told_the_attempt_at_which_a_request_has_arrived() -> None:
    harness = Harness()
    harness.running("r")
    harness.do(Accepted("r", 3, 1, 1))
    sends = harness.do(Recover("tokenizer-0", 9))
    [told] = [send.message for send in sends if isinstance(send.message, Submit)]
    assert (told.attempt, told.group) == (3, 1)


THREE = RequestParams(seed=5, n=3)
NAMES = ["r", "r/1", "r/2"]


def test_choices_are_one_submit_and_told_again_as_one() -> None:
    harness = Harness()
    (submit,) = harness.upstream(Call("r", THREE, text="x"))
    assert isinstance(submit, Submit)
    assert (submit.choices, submit.seed, submit.params.n) == ((0, 1, 2), 5, 1)
    assert harness.core.stats()["waiting"] == 3
    started = harness.local(Accepted("r", 1, 0, 7, choices=(0, 1, 2)))
    assert [s.request_id for s in started if isinstance(s, Started)] == NAMES
    assert [s.prompt_tokens for s in started if isinstance(s, Started)] == [7, 0, 0]
    assert harness.upstream(ClientDisconnected("r/1")) == [Abort("r/1", 1, "client")]
    again, *ended = harness.recovered()
    assert isinstance(again, Submit) and (again.choices, again.group) == ((0, 2), 0)
    assert ended == [Abort("r/1", 1, "client")]


def test_a_prompt_is_counted_by_its_first_choice() -> None:
    harness = Harness()
    harness.do(Call("r", THREE, text="x"))
    harness.do(Accepted("r", 1, 0, 7, choices=(0, 1, 2)))
    ends: list[OutputDelta] = []
    for name in NAMES:
        last = row("a", 0, 0, finish="length", output_tokens=1, cached_tokens=4)
        (delta,) = harness.local(Text((structs.replace(last, request_id=name),)))
        assert isinstance(delta, OutputDelta)
        ends.append(delta)
    counted = [(end.prompt_tokens, end.output_tokens, end.cached_tokens) for end in ends]
    assert counted == [(7, 1, 4), (0, 1, 0), (0, 1, 0)]
    assert harness.core.idle()


def test_each_choice_fails_where_none_is_taken() -> None:
    failed = Harness(ready=False).local(Call("r", THREE, text="x"))
    assert [one.request_id for one in failed if isinstance(one, Failed)] == NAMES
    full = Harness(max_queue=2).local(Call("r", THREE, text="x"))
    assert [(f.request_id, f.status) for f in full if isinstance(f, Failed)] == [
        (name, 429) for name in NAMES
    ]


def test_what_cannot_be_sent_fails_all_choices_that_live() -> None:
    harness = Harness()
    harness.do(Call("r", THREE, text="x"))
    harness.do(ClientDisconnected("r/1"))
    failed = harness.local(SendFailed("r", 1, "too odd"))
    assert [one.request_id for one in failed if isinstance(one, Failed)] == ["r", "r/2"]
    assert harness.core.idle()
