"""Requests that another group goes on with: what is handed over, and how suspects are tried."""

from __future__ import annotations

from itertools import pairwise

from msgspec import structs
from test_scheduler_recovery import DETOKENIZER, TOKENIZER, Bench, outputs, recovered, work

from pipeinfer.core import Send
from pipeinfer.messages import Abort, Delivered, Done, Ended, HandOver, OpenStream, Plan
from pipeinfer.wire import pack, unpack

ENDED = Ended("engine-0-0", 1, 10, "its process ended (SIGKILL)")


def running(steps: int) -> Bench:
    """With request "r", of which so many messages of the engine were heard."""
    bench = recovered()
    bench.feed(work("r"))
    for _ in range(steps):
        bench.feed(bench.engine.outbox.popleft())
    return bench


def asked(bench: Bench) -> list[Delivered]:
    """What the tokenizer is told of "r" when it asks for it."""
    sends = bench.core.handle(HandOver("r", 1), bench.now)
    assert not [send for send in sends if send.channel == "tokens"], "its client has not left"
    told = [send for send in sends if send.channel == "recovery"]
    assert all(send.to == TOKENIZER for send in told)
    return [send.message for send in told if isinstance(send.message, Delivered)]


def test_a_group_that_has_its_engine_keeps_its_requests():
    bench = running(12)
    assert asked(bench) == []
    bench.run()
    assert bench.rows()[-1].finish == "length"


def test_a_group_without_an_engine_hands_over_what_another_needs():
    bench = running(12)
    bench.feed(ENDED)
    assert bench.core.state() == ("waiting", "engine rank 0: its process ended (SIGKILL)")
    [told] = asked(bench)
    made = unpack(told.ids).tolist()
    assert made and made == outputs()[: len(made)]
    assert made == [t for row in bench.rows() for t in unpack(row.ids).tolist()]
    assert told.crashes == 0, "a step of it was in flight, so it is a suspect"
    assert asked(bench) == [], "it is not here any more"
    assert bench.core.idle()
    end = bench.feed(Done(("r",)))
    assert end == [Send("tokens", DETOKENIZER, Done(("r",)))], "its end is told on all ways"
    assert bench.feed(Done(("r",))) == []


def test_a_request_that_comes_back_goes_on_where_it_was():
    bench = running(12)
    bench.feed(ENDED)
    [told] = asked(bench)
    bench.engine.crash()
    bench.feed(told)
    bench.feed(work("r"))
    bench.run()
    made = {row.offset + i: t for row in bench.rows() for i, t in enumerate(unpack(row.ids))}
    assert [made[i] for i in range(20)] == outputs()


def test_the_next_attempt_of_a_request_that_runs_here_goes_on_after_what_its_client_has():
    for abort_first in (False, True):
        bench = running(12)
        other = (outputs()[0] + 1) % 40
        told = [Delivered("r", 2, pack([other])), Abort("r", 1, "another group goes on with it")]
        for message in reversed(told) if abort_first else told:
            bench.feed(message)
        bench.feed(structs.replace(work("r"), attempt=2))
        bench.run()
        opened, *tokens = bench.resent()
        assert isinstance(opened, OpenStream) and opened.attempt == 2
        [row] = tokens[0].rows
        assert unpack(row.ids).tolist()[0] == other and row.finish == "length"


def test_who_runs_does_not_wait_for_the_prompts_of_suspects():
    bench, plans = recovered(), []
    receive = bench.engine.receive

    def hear(message) -> None:
        if isinstance(message, Plan) and message.slots:
            plans.append(unpack(message.slots).tolist())
        receive(message)

    bench.engine.receive = hear
    bench.feed(work("r", max_tokens=60))
    for _ in range(8):
        bench.feed(bench.engine.outbox.popleft())
    begun = len(plans)
    [own] = plans[-1]
    for name in ("s", "t", "u"):
        bench.feed(Delivered(name, 1, pack(outputs(40)[:37]), crashes=0))  # three steps of prompt
        bench.feed(work(name, max_tokens=40))
    bench.run()
    trial = plans[begun : begun + 20]
    assert sum(own not in slots for slots in trial) >= 5, "three parts, then cached ones"
    assert all(len(slots) == 1 for slots in trial if own not in slots), "each is alone"
    assert all(own in a or own in b for a, b in pairwise(trial))
