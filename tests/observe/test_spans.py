"""Request spans: what each stage's observer makes of messages that a recorded session seldom has;
the store, in order and bounded whatever comes; which part of a span is the stage's latency."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.control import RequestSpan, StepMade, TimedEvent
from pipeinfer.core import LOCAL, Send, StepDone
from pipeinfer.gateway.ledger import Call, ClientDisconnected, Failed, OutputDelta
from pipeinfer.messages import (
    Abort,
    Accepted,
    Admit,
    Admitted,
    BeginEpoch,
    Delivered,
    Done,
    Fault,
    MissedPlan,
    OpenStream,
    Plan,
    Refused,
    Release,
    Result,
    StopHit,
    Submit,
    Text,
    TextRow,
    TokenizedRequest,
    TokenRow,
    Tokens,
)
from pipeinfer.observe.observer import LastMinute
from pipeinfer.observe.spans import (
    MAX_DURATIONS,
    MAX_EVENTS,
    MINUTE,
    OBSERVERS,
    Exchange,
    SpanStore,
    StageDurations,
    span_observer,
)
from pipeinfer.params import RequestParams
from pipeinfer.runtime.stage import BUILDERS
from pipeinfer.tokenizer.core import Encode
from pipeinfer.wire import pack

PARAMS = RequestParams(max_tokens=8)
TRACE = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
CONTEXT = {"gateway": 0, "params": PARAMS, "seed": 1}


class Watched:
    """A stage's observer, with a clock that goes one second for each input and output."""

    def __init__(self, name: str, target: float = 0.0) -> None:
        self.ended: list[RequestSpan] = []
        self.steps: list[StepMade] = []
        self.book = SpanStore(f"{name}-0", self.ended.append)
        self.observer = span_observer(name, self.book)
        self.minute = LastMinute(target, self.steps.append)
        self.at = 100.0

    def saw(self, event, *outputs) -> None:
        """Each output: a message, or (receiver, message)."""
        sends = [Send("c", *o) if isinstance(o, tuple) else Send(LOCAL, "", o) for o in outputs]
        told = Exchange(event, sends, self.at, self.at + 0.5)
        self.observer.on_exchange(told)
        self.minute.on_exchange(told)
        self.at += 1.0

    def queued(self, request: TokenizedRequest, *outputs) -> None:
        """A scheduler takes it: it tells its detokenizer."""
        told = opened(request.request_id, attempt=request.attempt)
        self.saw(request, ("detokenizer-0", told), *outputs)

    @property
    def open(self) -> dict[str, RequestSpan]:
        for name in list(self.book._open):
            self.book._changed[name] = None
        return {passage.request_id: passage for passage in self.book.changes(1000)}

    def over(self, request_id: str) -> RequestSpan:
        return next(p for p in reversed(self.ended) if p.request_id == request_id)


def names(passage: RequestSpan) -> list[str]:
    return [moment.name for moment in passage.moments]


def values(passage: RequestSpan, name: str) -> dict[str, float]:
    return next(m.values for m in passage.moments if m.name == name)


def test_there_is_one_for_every_kind_of_stage():
    assert OBSERVERS.keys() == BUILDERS.keys()


# ------------------------------------------------------------------------------------------ gateway


def submit(**changed) -> Submit:
    return Submit(**{**CONTEXT, "request_id": "r", "attempt": 1, "trace": TRACE, **changed})


def test_each_choice_has_its_own_passage_through_the_gateway():
    one = Watched("gateway")
    call = Call("r", RequestParams(n=2, max_tokens=8), text="x", trace=TRACE)
    one.saw(call, ("tokenizer-0", submit(choices=(0, 1))))
    one.saw(Accepted(request_id="r", attempt=1, group=1, prompt_tokens=5, choices=(0, 1)))
    one.saw(
        Text(()),
        OutputDelta("r", "a", pack([1]), 0, 0),
        OutputDelta("r/1", "b", pack([1, 2]), 0, 0),
    )
    one.saw(Text(()), OutputDelta("r", "b", pack([1]), 1, 1))
    streamed = {name: values(passage, "streamed") for name, passage in one.open.items()}
    assert streamed == {"r": {"output_tokens": 2}, "r/1": {"output_tokens": 2}}
    last = OutputDelta("r", "c", pack([1]), 2, 2, "stop", None, 5, 3, 4)
    one.saw(Text(()), last)
    one.saw(ClientDisconnected("r/1"), ("tokenizer-0", Abort("r/1", 1)))
    first, second = one.over("r"), one.over("r/1")
    assert names(first) == ["submitted", "accepted", "first_text", "finished"]
    assert (first.outcome, first.trace, first.began) == ("stop", TRACE, 100.0)
    assert values(first, "accepted") == {"group": 1, "prompt_tokens": 5}
    counts = {"prompt_tokens": 5, "output_tokens": 3, "cached_tokens": 4}
    assert values(first, "finished") == counts
    assert names(second) == ["submitted", "accepted", "first_text", "hung_up"]
    assert second.outcome == "abort" and values(second, "first_text") == {"tokens": 2}
    assert not one.open


@pytest.mark.parametrize(("status", "outcome"), [(429, "refused"), (500, "error"), (408, "abort")])
def test_a_failure_ends_a_passage_through_the_gateway(status, outcome):
    one = Watched("gateway")
    one.saw(Call("r", PARAMS, text="x"), Failed("r", status, "no"))
    assert one.over("r").outcome == outcome
    assert values(one.over("r"), "failed") == {"status": status}


# ---------------------------------------------------------------------------------------- tokenizer


def work(**changed) -> TokenizedRequest:
    given = {**CONTEXT, "request_id": "r", "attempt": 1, "detokenizer": 0, "trace": TRACE,
             "prompt_ids": pack([1, 2, 3])}  # fmt: skip
    return TokenizedRequest(**{**given, **changed})


def test_a_request_has_passed_the_tokenizer_when_it_is_with_a_group():
    one = Watched("tokenizer")
    one.saw(submit(), Encode("r", 1, 10_000))
    assert one.open["r"].ended == 0
    one.saw(SimpleNamespace(), ("gateway-0", Accepted("r", 1, 2, 3)), ("scheduler-2", work()))
    passed = one.over("r")
    assert (passed.began, passed.ended, passed.outcome) == (100.0, 101.5, "")
    assert values(passed, "routed") == {"group": 2, "prompt_tokens": 3}
    one.saw(submit())
    assert not one.open, "its gateway has told all again"
    told = Delivered("r", 1, pack([5, 6]))
    one.saw(
        told, ("scheduler-0", told), ("scheduler-0", work()), ("gateway-0", Accepted("r", 1, 0, 3))
    )
    assert names(one.over("r")) == ["taken_over", "routed"] and one.over("r").trace == TRACE


def test_other_ends_in_the_tokenizer():
    one = Watched("tokenizer")
    refusal = Refused(request_id="a", attempt=1, gateway=0, status=400, message="too long")
    one.saw(submit(request_id="a"), ("gateway-0", refusal))
    one.saw(submit(request_id="b", only_encode=True), ("gateway-0", Accepted("b", 1, -1, 9)))
    one.saw(submit(request_id="c"), Encode("c", 1, 10_000))
    one.saw(submit(request_id="d"), Encode("d", 1, 10_000))
    one.saw(Abort("c", 1))
    one.saw(Done(("d", "unknown")))
    assert {p.request_id: p.outcome for p in one.ended} == {
        "a": "refused", "b": "", "c": "abort", "d": "abort",
    }  # fmt: skip
    assert values(one.over("a"), "refused") == {"status": 400}
    assert values(one.over("b"), "encoded") == {"prompt_tokens": 9}


# ---------------------------------------------------------------------------------------- scheduler


def plan(number: int, rows: dict[int, int], admits=(), releases=(), epoch: int = 1) -> Plan:
    return Plan(
        epoch=epoch, number=number, releases=tuple(releases), admits=tuple(admits),
        slots=pack(list(rows)), counts=pack(list(rows.values())),
    )  # fmt: skip


def opened(name: str, **changed) -> OpenStream:
    given = {"request_id": name, "attempt": 1, "gateway": 0, "params": PARAMS, "context_ids": b""}
    return OpenStream(**{**given, **changed})


def admit(slot: int, name: str, tokens: int) -> Admit:
    return Admit(
        slot=slot, request_id=name, token_ids=pack(range(tokens)), prompt_len=tokens, max_total=99,
        params=PARAMS, seed=1,
    )  # fmt: skip


def result(number: int, rows: dict[int, tuple[int, int]], epoch: int = 1) -> Result:
    """rows: slot to (start, count)."""
    starts, counts = zip(*rows.values(), strict=True) if rows else ((), ())
    return Result(
        epoch=epoch, number=number, slots=pack(list(rows)), starts=pack(starts),
        counts=pack(counts), produced=b"", token_ids=b"", deferred=b"", free=0, evictable=0,
        digest=0,
    )  # fmt: skip


def row(name: str, offset: int, ids: int, finish=None) -> TokenRow:
    return TokenRow(request_id=name, offset=offset, ids=pack(range(ids)), finish=finish)


def test_who_gives_way_is_told_from_who_has_ended():
    """Both are released by the plan that is sent before the last rows."""
    one = Watched("scheduler")
    one.queued(work(request_id="a"), ("", plan(0, {0: 3}, [admit(0, "a", 3)])))
    one.saw(Admitted(1, 0, pack([0]), pack([2]), 9, 9))
    one.queued(work(request_id="b"), ("", plan(1, {0: 1, 1: 3}, [admit(1, "b", 3)])))
    one.saw(
        result(0, {0: (2, 1)}),
        ("", plan(2, {}, (), [Release(0, True), Release(1, True, pack([7]))])),
        ("detokenizer-0", Tokens((row("a", 0, 1, "length"), row("b", 0, 1)))),
    )
    assert names(one.over("a")) == ["queued", "admitted", "first_token", "finished"]
    assert values(one.over("a"), "admitted") == {"slot": 0, "tokens": 3, "cached_tokens": 2}
    assert values(one.over("a"), "finished") == {"output_tokens": 1, "cached_tokens": 0}
    assert one.over("a").outcome == "length"
    assert names(one.open["b"]) == ["queued", "admitted", "first_token", "preempted"]
    one.saw(StopHit("b", 1, 1))
    assert one.over("b").outcome == "stop" and not one.open


def test_other_ends_in_the_scheduler():
    one = Watched("scheduler")
    refusal = Refused(request_id="a", attempt=1, gateway=0, status=400, message="too long")
    one.saw(work(request_id="a"), ("detokenizer-0", refusal))
    for name in "bcd":
        one.queued(work(request_id=name))
    one.saw(Abort("b", 0))
    one.saw(StopHit("b", 0, 1))
    assert "b" in one.open, "an attempt before this one"
    one.saw(Abort("b", 1))
    one.saw(Done(("c",)))
    one.saw(SimpleNamespace(), ("tokenizer-0", Delivered("d", 1, b"")))
    assert {p.request_id: p.outcome for p in one.ended} == {
        "a": "refused", "b": "abort", "c": "abort", "d": "handed_over",
    }  # fmt: skip


def test_an_attempt_that_comes_again_starts_over_and_no_slot_is_its_own():
    one = Watched("scheduler")
    one.queued(work(), ("", plan(0, {0: 3}, [admit(0, "r", 3)])), ("d", Tokens((row("r", 0, 1),))))
    one.saw(work())
    one.queued(work(attempt=2), ("", plan(1, {}, (), [Release(0, True)])))
    one.saw(result(1, {}), ("d", Tokens((row("r", 0, 1),))))
    said = ["queued", "first_token", "admitted", "queued", "first_token"]
    assert names(one.open["r"]) == said


def test_a_lost_engine_is_a_moment_of_who_was_in_it():
    one = Watched("scheduler")
    one.queued(work(request_id="a"), ("", plan(0, {0: 3}, [admit(0, "a", 3)])))
    one.queued(work(request_id="b"))
    one.saw(Fault(1, 0, "gone"), ("", BeginEpoch(2, (7,))))
    one.saw(result(0, {0: (0, 3)}, epoch=2))
    assert names(one.open["a"]) == ["queued", "admitted", "engine_lost"]
    assert names(one.open["b"]) == ["queued"] and one.steps == []


def test_a_step_is_what_its_plan_and_its_result_say():
    one = Watched("scheduler", target=0.02)
    one.queued(work(), ("", plan(0, {0: 5, 300: 1}, [admit(0, "r", 8)])))  # slot 300: from before
    one.saw(work(), ("", plan(1, {0: 5, 300: 1})))
    one.saw(result(0, {0: (0, 5), 300: (40, 1)}), ("", plan(2, {0: 1, 300: 1})))
    one.saw(result(1, {0: (5, 3), 300: (41, 1)}))
    one.saw(result(2, {0: (8, 1), 300: (42, 0)}))
    one.saw(result(9, {0: (9, 1)}))
    assert one.steps == [
        StepMade(100.5, 1.5, 1, 5, 0.02),  # from its plan: none was in flight
        StepMade(101.5, 1.0, 1, 3, 0.02),  # from the result before it
        StepMade(102.5, 1.0, 1, 0, 0.02),  # a row was deferred
    ]


def test_plans_that_are_published_again_are_the_same_steps():
    one = Watched("scheduler")
    plans = [plan(0, {0: 3}, [admit(0, "a", 3)]), plan(1, {1: 3}, [admit(1, "b", 3)])]
    for name, sent in zip("ab", plans, strict=True):
        one.queued(work(request_id=name), ("", sent))
    one.saw(MissedPlan(1, 1, 0), *[("", sent) for sent in plans], ("", plan(2, {1: 1})))
    for number, rows in enumerate([{0: (0, 3)}, {1: (0, 3)}, {1: (3, 1)}]):
        one.saw(result(number, rows))
    assert names(one.open["a"]) == names(one.open["b"]) == ["queued", "admitted"]
    assert [step.at for step in one.steps] == [100.5, 101.5, 102.5]


def test_a_minute_of_sums_of_steps_is_kept_by_half_seconds():
    steps: list[StepMade] = []
    minute = LastMinute(0.02, steps.append)
    for number in range(1000):  # a tenth of a second each
        at = 100 + number / 10 + 0.001
        sends = [Send("c", "engine", plan(number, {0: 1, 1: 3}))]
        minute.on_exchange(Exchange(StopHit("x", 1, 1), sends, at, at))
        minute.on_exchange(
            Exchange(result(number, {0: (9, 1), 1: (0, 3)}), (), at + 0.01, at + 0.01)
        )
    sums = minute.sums(200.0)
    assert [one.at for one in sums] == [140 + half / 2 for half in range(120)]
    assert all((one.count, one.decodes, one.prompt_tokens) == (5, 5, 15) for one in sums)
    assert all(0.009 < one.seconds < 0.011 and one.target == 0.02 for one in sums)
    assert minute.sums(190.1)[-1].at == 189.5, "what had not ended by then is told as steps"
    assert minute.sums(400.0) == () and len(steps) == 1000


# ------------------------------------------------------------------------------------------- engine


def test_a_request_passes_an_engine_from_admit_to_release():
    one = Watched("engine")
    one.saw(BeginEpoch(1, (7,)))
    one.saw(plan(0, {0: 4}, [admit(0, "a", 9)]), ("s", Admitted(1, 0, pack([0]), pack([2]), 9, 9)))
    one.saw(plan(1, {0: 5, 1: 4}, [admit(1, "b", 4)]))
    one.saw(StepDone(1, 0, b"", b""), ("s", result(0, {0: (2, 0)})))  # deferred
    assert names(one.open["a"]) == ["admitted"]
    one.saw(StepDone(1, 1, b"", b""), ("s", result(1, {0: (2, 5), 1: (0, 4)})))
    one.saw(plan(2, {0: 1, 2: 4}, [admit(2, "c", 4)], [Release(1, True, pack([5]))]))
    one.saw(plan(3, {1: 4}, [admit(1, "d", 4)], [Release(0, False, b"", True)]))
    told = {"slot": 0, "tokens": 9, "prompt_tokens": 9, "cached_tokens": 2}
    assert values(one.over("a"), "admitted") == told
    assert values(one.over("a"), "computed") == {"tokens": 5}
    assert {p.request_id: p.outcome for p in one.ended} == {"a": "forgotten", "b": ""}
    assert values(one.over("b"), "released") == {"output_tokens": 1}
    one.saw(StepDone(1, 2, b"", b""), ("s", result(2, {1: (9, 1), 2: (0, 4)})))
    assert names(one.open["d"]) == ["admitted"], "this step had its slot for somebody else"
    one.saw(plan(9, {}), ("s", Fault(1, 0, "a gap")))
    assert {p.outcome for p in one.ended[2:]} == {"lost"} and not one.open
    one.saw(plan(10, {3: 1}, [admit(3, "e", 1)]))
    assert not one.open, "it takes no plans any more"
    one.saw(BeginEpoch(2, (7,)))
    one.saw(plan(0, {3: 1}, [admit(3, "e", 1)], epoch=2))
    assert "e" in one.open


def test_an_engine_takes_no_plan_behind_a_missing_one_and_none_twice():
    one = Watched("engine")
    one.saw(BeginEpoch(1, (7,)))
    plans = [plan(0, {0: 4}, [admit(0, "a", 4)]), plan(1, {}, [], [Release(0, True)])]
    plans.append(plan(2, {0: 4}, [admit(0, "b", 4)]))
    one.saw(plans[0])
    one.saw(plans[2], ("s", MissedPlan(1, 0, 1)))
    assert names(one.open["a"]) == ["admitted"] and "b" not in one.open
    for sent in (*plans[1:], *plans):
        one.saw(sent)
    assert [p.request_id for p in one.ended] == ["a"]
    assert list(one.open) == ["b"] and names(one.open["b"]) == ["admitted"]


def test_a_rank_that_sends_no_results_knows_its_first_rows_from_the_device():
    one = Watched("engine")
    one.saw(plan(0, {0: 4}, [admit(0, "a", 9)]))
    one.saw(plan(1, {}, [admit(1, "b", 9)]))
    one.saw(StepDone(1, 0, b"", b""))
    assert (names(one.open["a"]), names(one.open["b"])) == (["admitted", "computed"], ["admitted"])


# -------------------------------------------------------------------------------------- detokenizer


def text(name: str, ids: int, finish=None, many: int = 0) -> TextRow:
    return TextRow(
        request_id=name, attempt=1, text="x" * ids, byte_offset=0, token_offset=0,
        ids=pack(range(ids)), finish=finish, output_tokens=many,
    )  # fmt: skip


def test_a_request_passes_the_detokenizer_from_open_to_its_last_text():
    one = Watched("detokenizer")
    for name in "abcd":
        one.saw(opened(name, trace=TRACE))
    tokens = Tokens(())
    one.saw(tokens, ("gateway-0", Text((text("a", 0), text("b", 2)))))
    one.saw(
        tokens, ("gateway-0", Text((text("a", 1, "stop", 3),))), ("scheduler-0", StopHit("a", 1, 3))
    )
    one.saw(Abort("b", 0))
    assert one.over("a").outcome == "stop" and one.over("a").trace == TRACE
    assert names(one.over("a")) == ["opened", "stop_string", "first_text", "finished"]
    assert values(one.over("a"), "stop_string") == {"output_tokens": 3}
    assert values(one.over("a"), "first_text") == {"tokens": 1, "seconds": 0.5}
    one.saw(Abort("b", 1))
    one.saw(Done(("c",)))
    one.saw(Refused(request_id="d", attempt=1, gateway=0, status=400, message="no"))
    one.saw(opened("a"))
    assert not one.open, "its scheduler was started again"
    one.saw(opened("a", attempt=2))
    one.saw(Done(("a",)))
    one.saw(opened("a"))
    assert "a" in one.open and one.over("a").outcome == "abort"
    ends = {p.request_id: p.outcome for p in one.ended[:4]}
    assert ends == {"a": "stop", "b": "abort", "c": "abort", "d": "refused"}


def test_an_attempt_that_comes_again_is_opened_anew():
    one = Watched("detokenizer")
    one.saw(opened("a"))
    one.saw(Tokens(()), ("g", Text((text("a", 2),))))
    one.saw(opened("a"))
    one.saw(opened("a", attempt=2))
    one.saw(Tokens(()), ("g", Text((text("a", 2),))))
    assert names(one.open["a"]) == ["opened", "first_text", "opened", "first_text"]


def book(ended: list[RequestSpan], most: int = 100) -> SpanStore:
    return SpanStore("engine-0-0", ended.append, most)


def test_a_passage_is_told_while_it_goes_on_and_once_when_it_is_over():
    ended: list[RequestSpan] = []
    one = book(ended)
    assert one.begin("a", 1.0, "00-t-s-01", 1) and not one.begin("a", 9.0)
    one.mark("a", 2.0, "admitted", slot=3)
    one.amend("a", "admitted", cached_tokens=7)
    one.amend("a", "never", x=1)
    (told,) = one.changes(10)
    assert (told.began, told.ended, told.trace) == (1.0, 0.0, "00-t-s-01")
    assert told.moments[0].values == {"slot": 3, "cached_tokens": 7}
    assert one.changes(10) == []
    one.mark("a", 3.0, "released")
    one.end("a", 4.0, "stop")
    one.end("a", 5.0, "abort")
    one.mark("a", 6.0, "late")
    assert one.changes(10) == [] and len(ended) == 1
    assert (ended[0].ended, ended[0].outcome) == (4.0, "stop")
    assert [moment.name for moment in ended[0].moments] == ["admitted", "released"]
    assert told.moments[0].name == "admitted" and len(told.moments) == 1, "what was told stays"


def test_only_the_first_output_and_the_last_are_worth_a_look():
    one = book([])
    assert one.needing_mark("a", "stop") is None, "it has no passage"
    one.begin("a", 1.0)
    assert one.needing_mark("a", None) is one.get("a")
    one.mark_first_output("a", 2.0, "first_text", tokens=1)
    one.mark_first_output("a", 3.0, "first_text", tokens=1)
    one.mark_first_output("b", 3.0, "first_text")
    assert one.needing_mark("a", None) is None
    assert one.needing_mark("a", "stop") is one.get("a")
    (told,) = one.changes(10)
    assert [(moment.at, moment.name) for moment in told.moments] == [(2.0, "first_text")]


def test_of_too_many_moments_the_first_and_the_latest_stay():
    ended: list[RequestSpan] = []
    one = book(ended)
    one.begin("a", 0.0)
    for at in range(3 * MAX_EVENTS):
        one.mark("a", float(at), "again")
    one.end("a", 999.0)
    times = [moment.at for moment in ended[0].moments]
    assert times == [*range(MAX_EVENTS - 1), 3 * MAX_EVENTS - 1]


NAMES = st.sampled_from([f"r{n}" for n in range(12)])
ACTIONS = st.lists(st.tuples(st.sampled_from(("begin", "mark", "end", "tell")), NAMES), max_size=80)


@given(ACTIONS)
def test_every_span_ends_at_most_once_and_none_is_kept_beyond_the_bound(actions):
    """Beside a model without bounds: the book has the newest five of its open requests at most."""
    ended: list[RequestSpan] = []
    one = book(ended, most=5)
    began: dict[str, int] = {}
    for at, (action, name) in enumerate(actions):
        match action:
            case "begin":
                if one.begin(name, float(at)):
                    began.pop(name, None)
                    began[name] = at
                while len(began) > 5:
                    del began[next(iter(began))]
            case "mark":
                one.mark(name, float(at), "something")
            case "end":
                one.end(name, float(at))
                if name in began:
                    assert ended[-1].request_id == name and ended[-1].began == began.pop(name)
                    assert ended[-1].ended == at
            case "tell":
                told = one.changes(3)
                assert len(told) <= 3 and {p.request_id for p in told} <= began.keys()
        assert {name for name in began if name in one} == began.keys() and len(one) == len(began)
    assert len({(passage.request_id, passage.began) for passage in ended}) == len(ended)
    for passage in ended:
        times = [passage.began, *(moment.at for moment in passage.moments), passage.ended]
        assert times == sorted(times)


NOW = 1_000.0
BEGAN = NOW - 30
MOMENTS = (
    TimedEvent(BEGAN + 2, "admitted"),
    TimedEvent(BEGAN + 4, "first_text", {"seconds": 0.25}),
)


def passage(
    stage: str, ended: float = NOW, moments: tuple[TimedEvent, ...] = MOMENTS
) -> RequestSpan:
    return RequestSpan(stage, "r", BEGAN, ended, "", "", moments)


@pytest.mark.parametrize(
    ("stage", "seconds"),
    [
        ("tokenizer-0", 30.0),
        ("scheduler-1", 2.0),
        ("detokenizer-0", 0.25),
        ("engine-0-0", None),
        ("gateway-0", None),
    ],
)
def test_each_kind_of_stage_has_its_own_part(stage, seconds):
    durations = StageDurations(lambda: NOW)
    durations.on_span(passage(stage))
    assert durations.median(stage) == seconds


@pytest.mark.parametrize("stage", ["scheduler-0", "detokenizer-0"])
def test_a_passage_without_that_part_says_nothing(stage):
    durations = StageDurations(lambda: NOW)
    durations.on_span(passage(stage, moments=()))
    durations.on_span(passage(stage, ended=0.0))
    assert durations.median(stage) is None


def test_only_the_latest_of_the_last_minute_count():
    now = NOW
    durations = StageDurations(lambda: now)
    for ended in (NOW + 100, NOW):
        for _ in range(MAX_DURATIONS):
            durations.on_span(passage("tokenizer-0", ended=ended))
    assert durations.median("tokenizer-0") == NOW - BEGAN
    now = NOW + MINUTE + 1
    assert durations.median("tokenizer-0") is None
    durations.on_span(passage("tokenizer-0", ended=now))
    assert durations.median("tokenizer-0") == now - BEGAN
    durations.clear()
    assert durations.median("tokenizer-0") is None
