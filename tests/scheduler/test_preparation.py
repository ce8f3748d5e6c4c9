"""Grammars are asked for before whoever needs them is admitted, and nobody else waits for that."""

from __future__ import annotations

from typing import Any

import pytest
from test_scheduler_core import Client, Pipeline, pipeline

from pipeinfer.core import Tick
from pipeinfer.grammars.bounds import NO_GRAMMAR_MEMORY
from pipeinfer.messages import (
    Abort,
    CompileGrammar,
    Fault,
    GrammarCompiled,
    Plan,
    Refused,
    TokenizedRequest,
)
from pipeinfer.params import RequestParams, StructuredOutputs
from pipeinfer.scheduler import queue
from pipeinfer.scheduler.core import SchedulerCore, SchedulerOptions
from pipeinfer.scheduler.queue import GrammarQueue
from pipeinfer.scheduler.request import Request, request_of
from pipeinfer.wire import pack

REGEX = StructuredOutputs(regex="a")


def wants(name: str, spec: StructuredOutputs | None = REGEX, **more: Any) -> Request:
    params = RequestParams(structured_outputs=spec)
    return request_of(TokenizedRequest(name, 1, 0, 0, pack([1]), params, 0, **more), 1, 0.0)


def started(tp: int = 1) -> GrammarQueue:
    made = GrammarQueue(tp)
    made.begin(tuple(range(10, 10 + tp)))
    return made


def test_all_ranks_must_have_it():
    made, request = started(tp=2), wants("r")
    assert made.park_if_blocked(request) and request.phase == "waiting_for_grammar"
    assert [one.request_id for one in made.take_due(0.0)] == ["r"]
    assert made.on_grammar_compiled(GrammarCompiled(0, 10, "r")) == []
    assert made.on_grammar_compiled(GrammarCompiled(0, 10, "r")) == [], "the same one again"
    assert made.on_grammar_compiled(GrammarCompiled(1, 9, "r")) == [], "a process that is gone"
    assert made.on_grammar_compiled(GrammarCompiled(2, 12, "r")) == [], "no rank of the group"
    assert made.on_grammar_compiled(GrammarCompiled(1, 11, "r")) == [request]
    assert not made.park_if_blocked(wants("later"))
    assert len(made) == 0


def test_a_budget_of_thoughts_waits_until_the_vocabulary_is_there():
    made, params = started(), RequestParams(thinking_token_budget=5)
    first, second = (
        request_of(TokenizedRequest(name, 1, 0, 0, pack([1]), params, 0), 1, 0.0)
        for name in ("one", "two")
    )
    assert made.park_if_blocked(first)
    (asked,) = made.take_due(0.0)
    assert made.on_grammar_compiled(GrammarCompiled(0, 10, asked.request_id)) == [first]
    assert not made.park_if_blocked(second)


def test_it_is_asked_for_once_for_all_who_wait_and_again_where_no_answer_comes():
    made, requests = started(), [wants("one"), wants("two")]
    assert [made.park_if_blocked(request) for request in requests] == [True, True]
    assert [[one.request_id for one in made.take_due(now)] for now in (0.0, 0.5, 1.0, 1.5)] == [
        ["one"], [], ["one"], [],
    ]  # fmt: skip
    made.remove(requests[0])
    assert made.on_grammar_compiled(GrammarCompiled(0, 10, "one")) == [requests[1]], (
        "it asked for all of them"
    )


def test_nobody_asks_for_those_who_have_left():
    made, request = started(), wants("r")
    made.park_if_blocked(request)
    made.remove(request)
    assert (
        list(made.take_due(0.0)) == []
        and made.on_grammar_compiled(GrammarCompiled(0, 10, "r")) == []
    )


def test_new_processes_are_asked_anew_and_the_same_ones_are_not():
    made = started()
    made.park_if_blocked(wants("r"))
    made.on_grammar_compiled(GrammarCompiled(0, 10, "r"))
    made.begin((10,))
    assert not made.park_if_blocked(wants("known"))
    made.park_if_blocked(wants("other", StructuredOutputs(regex="b")))
    list(made.take_due(0.0))
    made.begin((11,))
    assert made.park_if_blocked(wants("again"))
    assert [one.request_id for one in made.take_due(0.1)] == ["other", "again"]


def test_of_what_takes_long_one_is_asked_for_at_a_time_and_clients_take_turns():
    made, now = started(), 0.0
    for n, (client, slow) in enumerate([("many", True)] * 4 + [("few", True), ("many", False)]):
        spec = StructuredOutputs(regex=f"a{{{n}}}")
        assert made.park_if_blocked(wants(f"{client}{n}", spec, client=client, slow_grammar=slow))

    def asked() -> list[str]:
        nonlocal now
        now += queue.GRAMMAR_RETRY_SECONDS
        return [one.request_id for one in made.take_due(now)]

    assert asked() == ["many0", "many5"], "what is quick waits for nobody"
    made.on_grammar_compiled(GrammarCompiled(0, 10, "many5"))
    order: list[str] = []
    while names := asked():
        order += names
        made.on_grammar_compiled(GrammarCompiled(0, 10, names[0]))
    assert order.index("few4") <= 2
    assert sorted(order) == ["few4", *(f"many{n}" for n in range(4))]


def test_a_turn_of_who_has_left_is_nobodys():
    made = started()
    requests = [
        wants(f"{n}", StructuredOutputs(regex="a" * n), slow_grammar=True) for n in range(1, 5)
    ]
    for request in requests:
        made.park_if_blocked(request)
    assert [one.request_id for one in made.take_due(0.0)] == ["1"]
    for request in requests[:3]:
        made.remove(request)
    assert [one.request_id for one in made.take_due(0.0)] == ["4"]


def test_those_used_last_are_taken_to_be_there(monkeypatch):
    monkeypatch.setattr(queue, "MAX_KNOWN", 2)
    made = started()
    for regex in ("a", "b", "a", "c"):
        if made.park_if_blocked(wants(regex, StructuredOutputs(regex=regex))):
            made.on_grammar_compiled(GrammarCompiled(0, 10, regex))
    held = [
        made.park_if_blocked(wants("x" + r, StructuredOutputs(regex=r))) for r in ("a", "b", "c")
    ]
    assert held == [False, True, False]


@pytest.mark.parametrize(("why", "status"), [("too hard", 400), (NO_GRAMMAR_MEMORY, 503)])
@pytest.mark.parametrize("outputs", [0, 2])
def test_a_grammar_that_engines_cannot_have_ends_its_requests(outputs, why, status):
    """What they cannot have now, they may have later."""
    core, told = SchedulerCore(SchedulerOptions()), []
    p = pipeline()
    p.core = core
    p.deliver()
    p.deliver()
    p.clients["r"] = Client([5] * 4, 9, 0)
    params = RequestParams(max_tokens=9, structured_outputs=REGEX)
    p.feed(TokenizedRequest("r", 1, 0, 0, pack([5] * 4), params, 0, eos_ids=(3, 11)))
    request = core._live.get("r")
    request.outputs.extend(p.clients["r"].expected[:outputs])
    p.clients["r"].outputs = p.clients["r"].expected[:outputs]
    told = p.feed(GrammarCompiled(0, p.engine.incarnation, "r", why))
    refusals = [send.message for send in told if isinstance(send.message, Refused)]
    assert (len(refusals), p.clients["r"].finish) == ((1, None) if not outputs else (0, "error"))
    assert [one.status for one in refusals] == [status] * len(refusals)
    assert not core._live


def test_whoever_has_no_grammar_is_not_held_up():
    p = pipeline(slots=2)
    p.deliver()
    p.deliver()
    silent = p.engine.receive
    p.engine.receive = lambda message: (
        None if isinstance(message, CompileGrammar) else silent(message)
    )
    held = p.submit([5] * 6, 4, grammar="a")
    free = [p.submit([6 + n] * 6, 4) for n in range(3)]
    while p.deliver():
        pass
    assert p.clients[held].finish is None and p.core.stats()["preparing"] == 1
    assert all(p.clients[name].finish for name in free)
    p.engine.receive = silent
    p.now += queue.GRAMMAR_RETRY_SECONDS
    p.feed(Tick())
    p.settle()
    assert p.engine.prepared == [REGEX]


def test_a_new_process_is_asked_for_what_was_lost_before_it_is_admitted():
    p = pipeline(slots=3)
    p.deliver()
    p.deliver()
    names = [p.submit([5 + n] * 6, 30, min_tokens=30, grammar="a") for n in range(5)]
    for _ in range(9):
        p.deliver()
    p.feed(Fault(p.engine.epoch, 0, "it leaves", orderly=True))
    p.engine.crash()
    asked = len(p.engine.prepared)
    receive, admitted = p.engine.receive, []

    def watched(message) -> None:
        if isinstance(message, Plan) and message.admits:
            admitted.append(len(p.engine.prepared) > asked)
        receive(message)

    p.engine.receive = watched
    p.settle()
    assert admitted and all(admitted)
    assert all(p.clients[name].finish for name in names)


def test_nothing_is_admitted_before_it_was_prepared():
    p: Pipeline = pipeline(slots=3)
    p.deliver()
    p.deliver()
    receive, had = p.engine.receive, []

    def watched(message) -> None:
        if isinstance(message, Plan):
            specs = [admit.params.structured_outputs for admit in message.admits]
            had.extend(spec in p.engine.prepared for spec in specs if spec is not None)
        receive(message)

    p.engine.receive = watched
    for n in range(9):
        p.submit([5 + n] * 6, 6, grammar="abc"[n % 3], choices=1 + n % 2)
    p.settle()
    assert len(had) >= 13 and all(had)
    assert len(p.engine.prepared) == 3


def killed(p: Pipeline) -> None:
    """The engine, and with it what was in flight."""
    p.feed(Fault(p.engine.epoch, 0, "it was killed"))
    p.engine.crash()


def test_nobody_waits_while_the_grammar_of_a_suspect_is_compiled_anew():
    p = pipeline(slots=3)
    p.deliver()
    p.deliver()
    suspect = p.submit([5] * 6, 30, grammar="a")
    while not p.clients[suspect].outputs:
        p.deliver()
    p.core._live[suspect].lost_in_flight = True
    killed(p)
    others = [p.submit([6 + n] * 6, 9) for n in range(3)]
    receive = p.engine.receive
    p.engine.receive = lambda event: None if isinstance(event, CompileGrammar) else receive(event)
    while p.deliver():
        pass
    assert p.core._planner.quarantined == 1, "it was in flight"
    assert all(p.clients[name].finish for name in others)
    p.engine.receive = receive
    p.now += queue.GRAMMAR_RETRY_SECONDS
    p.feed(Tick())
    p.settle()
    assert p.engine.prepared == [REGEX] * 2


def test_a_suspect_whose_grammar_a_new_engine_cannot_have_fails_alone():
    p = pipeline(slots=3)
    p.deliver()
    p.deliver()
    suspect = p.submit([5] * 6, 30, min_tokens=30, grammar="a")
    other = p.submit([6] * 6, 30)
    while not p.clients[suspect].outputs:
        p.deliver()
    p.core._live[suspect].lost_in_flight = True
    killed(p)
    receive = p.engine.receive
    p.engine.receive = lambda event: None if isinstance(event, CompileGrammar) else receive(event)
    while p.deliver():
        pass
    p.feed(GrammarCompiled(0, p.engine.incarnation, suspect, "too hard"))
    p.settle()
    assert (p.clients[suspect].finish, p.core._planner.quarantined) == ("error", 0)
    assert p.clients[other].outputs == p.clients[other].expected


def test_choices_that_were_held_when_an_engine_ended_are_not_admitted_without_their_grammar():
    p = pipeline(slots=3, budget=4)
    p.deliver()
    p.deliver()
    leader = p.submit([5] * 12, 6, choices=3, grammar="a")
    while p.core.stats()["held"] < 2 or not p.core.stats()["running"]:
        assert p.deliver()
    p.feed(Fault(p.engine.epoch, 0, "it leaves", orderly=True))
    p.engine.crash()
    receive = p.engine.receive
    p.engine.receive = lambda event: None if isinstance(event, CompileGrammar) else receive(event)
    while p.core.state()[0] != "ready":
        assert p.deliver()
    assert p.core.stats()["preparing"] == 1, "the others are held still"
    p.feed(Abort(leader, 1))
    p.clients[leader].cut = 0
    assert p.core.stats()["preparing"] == 1, "the next one leads"
    p.engine.receive = receive
    p.now += queue.GRAMMAR_RETRY_SECONDS
    p.feed(Tick())
    p.settle()
