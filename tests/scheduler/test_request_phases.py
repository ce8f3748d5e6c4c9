"""A request's ways through the scheduler: each that the table allows is gone, and no other is."""

from __future__ import annotations

import itertools
from itertools import product

import pytest
from test_scheduler_core import Client, pipeline

from pipeinfer.messages import (
    AdapterLoaded,
    Delivered,
    Done,
    Fault,
    GrammarCompiled,
    TokenizedRequest,
)
from pipeinfer.params import Adapter, RequestParams, StructuredOutputs, choice_id
from pipeinfer.scheduler import queue
from pipeinfer.scheduler.request import NEXT, Request, request_of
from pipeinfer.wire import pack

ALLOWED = {(phase, after) for phase, following in NEXT.items() for after in following}


def gone(p, name: str) -> None:
    p.clients[name].cut = len(p.clients[name].outputs)
    p.feed(Done((name,)))


def started(**options):
    p = pipeline(**options)
    p.deliver()
    p.deliver()
    return p


def refused_and_gone_while_it_waits() -> None:
    p = started(slots=1)
    p.clients["long"] = Client([1], 1, 0)
    p.feed(TokenizedRequest("long", 1, 0, 0, pack([1]), RequestParams(max_tokens=1 << 20), 0))
    p.clients["long"].cut = 0
    names = [p.submit([5 + n], 9) for n in range(3)]
    gone(p, names[2])
    p.settle()


def taken_back_for_want_of_pages() -> None:
    p = started(pages=10, page_size=4, slots=4, budget=64)
    for n in range(4):
        p.submit([30 + n] * 8, 20)
    p.settle()


def an_engine_leaves_in_good_order() -> None:
    p = started(pages=200)
    p.submit([5] * 9, 20)
    p.deliver()
    p.feed(Fault(p.engine.epoch, 0, "it leaves", orderly=True))
    p.engine.crash()
    p.settle()


def an_engine_is_lost_and_a_suspect_leaves() -> None:
    p = started(pages=200, budget=64)
    names = [p.submit([30 + n] * 6, 30) for n in range(3)]
    for _ in range(5):
        p.deliver()
    for request in p.core._live:
        request.lost_in_flight = True  # when another engine was lost before
    p.engine.crash()
    p.deliver()
    gone(p, names[1])
    p.settle()


def a_suspect_comes_from_elsewhere() -> None:
    p = started(pages=200)
    client = p.clients["moved"] = Client([7] * 3, 9, 0)
    client.outputs = client.expected[:2]
    p.feed(Delivered("moved", 1, pack(client.outputs), crashes=0))
    client.outputs = []  # the detokenizer is told all of it again
    p.feed(
        TokenizedRequest(
            "moved", 1, 0, 0, pack([7] * 3), RequestParams(max_tokens=9), 0, eos_ids=(3, 11)
        )
    )
    p.settle()


def one_that_crashes_every_engine() -> None:
    p = started(pages=200)
    name = p.submit([5] * 9, 20)
    for _ in range(9):
        if p.clients[name].finish is None:
            p.engine.crash()
            p.deliver()
            p.deliver()
    assert p.clients[name].finish == "error"


def choices_wait_for_the_prompt_of_one() -> None:
    p = started(pages=200, slots=3)
    leader = p.submit([7] * 40, 20, choices=4)
    gone(p, choice_id(leader, 1))
    for _ in range(8):
        p.deliver()
    p.feed(Fault(p.engine.epoch, 0, "it leaves", orderly=True))
    p.engine.crash()
    p.settle()


def one_that_ran_elsewhere_is_taken_back_after_the_one_that_leads() -> None:
    p = started(pages=14, page_size=4, slots=4, budget=64)
    for name, leader, outputs in (("early", "", 2), ("r", "r", 0), ("r/1", "r", 2)):
        prompt = [len(name)] * 8 if not leader else [9] * 8
        client = p.clients[name] = Client(prompt, 30, 30)
        if outputs:
            p.feed(Delivered(name, 1, pack(client.expected[:outputs])))
        params, stops = RequestParams(max_tokens=30, min_tokens=30), (3, 11)
        p.feed(
            TokenizedRequest(
                name, 1, 0, 0, pack(prompt), params, 0, eos_ids=stops, sampling_group=leader
            )
        )
    p.settle()


def with_grammar(p, name: str, most: int, regex: str, leader="", prompt=(7, 8, 9)) -> None:
    spec = StructuredOutputs(regex=regex)
    params = RequestParams(max_tokens=most, min_tokens=most, structured_outputs=spec)
    p.clients[name] = Client(list(prompt), most, most)
    work = TokenizedRequest(
        name, 1, 0, 0, pack(list(prompt)), params, 0, eos_ids=(3, 11), sampling_group=leader
    )
    p.feed(work)


def they_begin_alike_and_came_before_the_engine() -> None:
    p = pipeline(pages=200, budget=8)
    for other in range(3):
        p.submit([7] * 80 + [8 + other] * 3, 20)
    p.settle()


def grammars_are_waited_for(monkeypatch) -> None:
    monkeypatch.setattr(queue, "MAX_KNOWN", 1)
    p = started(pages=14, page_size=4, slots=4, budget=64)
    with_grammar(p, "first", 30, "a+", prompt=[5] * 8)
    with_grammar(p, "second", 30, "a+", prompt=[6] * 8)
    with_grammar(p, "leaves", 30, "b+")
    p.clients["leaves"].cut = 0
    p.feed(Done(("leaves",)))
    for _ in range(6):
        p.deliver()
    with_grammar(p, "third", 30, "c+", prompt=[4] * 8)  # what is taken back now is not known
    p.settle()
    p = started(pages=200)
    for choice in ("c", "c/1"):
        with_grammar(p, choice, 20, "d+", leader="c")
    for _ in range(6):
        p.deliver()
    p.feed(Fault(p.engine.epoch, 0, "it leaves", orderly=True))
    p.engine.crash()  # the next process knows nothing
    p.settle()
    p = started(pages=200, budget=4)
    for choice in ("d", "d/1"):
        with_grammar(p, choice, 20, "d+", leader="d", prompt=[7] * 20)
    while not p.core.stats()["running"]:
        p.deliver()
    p.feed(Fault(p.engine.epoch, 0, "it leaves", orderly=True))
    p.engine.crash()
    while p.core.state()[0] != "ready":
        p.deliver()
    gone(p, "d")  # the other was held for its prompt, and leads now
    p.settle()
    p = started(pages=200)
    with_grammar(p, "one", 20, "e+", prompt=[5] * 8)
    with_grammar(p, "other", 20, "f+", prompt=[6] * 8)
    for _ in range(9):
        p.deliver()
    p.feed(Fault(p.engine.epoch, 0, "it leaves", orderly=True))
    p.engine.crash()
    p.settle()


def with_adapter(name: str, regex: str | None = None) -> Request:
    spec = None if regex is None else StructuredOutputs(regex=regex)
    params, given = RequestParams(structured_outputs=spec), Adapter("a", "/a", "digest")
    return request_of(
        TokenizedRequest(name, 1, 0, 0, pack([5] * 9), params, 0, adapter=given), 1, 0.0
    )


def adapters_are_waited_for() -> None:
    waiting, seconds = queue.WaitingQueue(1, max_loras=1), itertools.count()

    def loaded(process: int) -> None:
        for load in list(waiting.adapters.take_due(1, 0, float(next(seconds)))):
            waiting.adapters.on_loaded(AdapterLoaded(0, process, 1, load.number))
        for request in waiting.adapters.take_ready():
            waiting.push(request)

    def leaves(request: Request) -> None:
        request.move("finished")
        waiting.adapters.release(request)
        waiting.on_finished(request, False)

    waiting.begin((10,), 4)
    first, second, third = map(with_adapter, ("first", "second", "third"))
    for request in (first, second, third):
        waiting.push(request)
    leaves(third)
    loaded(10)
    assert (first.phase, second.phase) == ("waiting", "waiting_for_prefix")
    waiting.begin((11,), 4)
    assert first.phase == "waiting_for_adapter"
    leaves(first)
    assert second.phase == "waiting_for_adapter"
    leaves(second)
    both = with_adapter("both", "a+")
    waiting.push(both)
    (prepare,) = waiting.grammars.take_due(0.0)
    for request in waiting.grammars.on_grammar_compiled(GrammarCompiled(0, 11, prepare.request_id)):
        waiting.push(request)
    assert both.phase == "waiting_for_adapter"
    waiting.begin((12,), 4)
    loaded(12)
    assert both.phase == "waiting_for_grammar"


def test_every_way_of_the_table_is_gone_and_no_other(monkeypatch):
    ways = set()
    move = Request.move

    def watched(request: Request, phase) -> None:
        before = request.phase
        move(request, phase)
        ways.add((before, phase))

    monkeypatch.setattr(Request, "move", watched)
    refused_and_gone_while_it_waits()
    taken_back_for_want_of_pages()
    an_engine_leaves_in_good_order()
    an_engine_is_lost_and_a_suspect_leaves()
    a_suspect_comes_from_elsewhere()
    one_that_crashes_every_engine()
    choices_wait_for_the_prompt_of_one()
    they_begin_alike_and_came_before_the_engine()
    one_that_ran_elsewhere_is_taken_back_after_the_one_that_leads()
    grammars_are_waited_for(monkeypatch)
    adapters_are_waited_for()
    assert ways == ALLOWED


@pytest.mark.parametrize(("before", "after"), sorted(set(product(NEXT, NEXT)) - ALLOWED))
def test_a_way_that_the_table_does_not_know_is_refused(before, after):
    request = request_of(TokenizedRequest("r", 1, 0, 0, pack([1]), RequestParams(), 0), 1, 0.0)
    request.phase = before
    with pytest.raises(AssertionError, match=f"r is {before} and cannot be {after}"):
        request.move(after)
    assert request.phase == before
