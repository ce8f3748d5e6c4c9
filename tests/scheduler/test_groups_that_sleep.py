"""A group sleeps when those that it has are answered, or at once; who comes meanwhile waits."""

from __future__ import annotations

import pytest
from msgspec import structs
from test_scheduler_core import Pipeline, pipeline

from pipeinfer.core import Tick
from pipeinfer.messages import (
    Asleep,
    BeginEpoch,
    Ended,
    Plan,
    Refused,
    SetSleep,
    Sleep,
    TokenizedRequest,
)
from pipeinfer.params import RequestParams
from pipeinfer.scheduler.core import SchedulerCore
from pipeinfer.wire import pack

PROMPT = [5, 6, 7, 8, 9]


def awake() -> Pipeline:
    made = pipeline()
    made.settle()
    return made


def streaming() -> tuple[Pipeline, str]:
    """One request that has some output."""
    made = awake()
    name = made.submit(PROMPT, 30, min_tokens=30)
    while len(made.clients[name].outputs) < 3:
        assert made.deliver()
    return made, name


def deliver_all(made: Pipeline) -> None:
    while made.deliver():
        pass


def state(made: Pipeline) -> str:
    return made.core.state()[0]


def test_an_idle_group_falls_asleep_at_once_and_makes_no_plans_until_it_wakes():
    made = awake()
    made.feed(SetSleep(1))
    assert state(made) == "waiting", "its engine has not said so yet"
    deliver_all(made)
    assert made.core.state() == ("asleep", "level 1")
    plans = made.watched()
    name = made.submit(PROMPT, 4)
    made.feed(Tick())
    deliver_all(made)
    assert not plans and not made.clients[name].outputs
    made.feed(SetSleep(0))
    made.settle()
    assert made.clients[name].finish is not None and plans


def test_those_before_are_answered_first_and_those_after_wait():
    made, before = streaming()
    made.feed(SetSleep(1, "wait"))
    after = made.submit(PROMPT, 5)
    deliver_all(made)
    made.feed(Tick())
    deliver_all(made)
    assert state(made) == "asleep"
    assert made.clients[before].finish is not None and not made.clients[after].outputs
    made.feed(SetSleep(0))
    made.settle()


def test_who_is_awake_again_before_it_slept_goes_on_with_all():
    made, _ = streaming()
    plans = made.watched()
    made.feed(SetSleep(1, "wait"))
    made.submit(PROMPT, 5)
    made.feed(SetSleep(0))
    made.settle()
    assert {plan.epoch for plan in plans} == {1}, "no epoch was lost"


def test_kept_requests_go_on_at_waking_and_nobody_is_suspected_of_a_crash():
    made, name = streaming()
    epoch = made.core._epochs.epoch
    for _ in range(3):
        made.feed(SetSleep(2, "keep"))
        deliver_all(made)
        assert state(made) == "asleep" and made.clients[name].finish is None
        made.feed(SetSleep(0))
        seen = len(made.clients[name].outputs)
        while len(made.clients[name].outputs) == seen:
            assert made.deliver()
    assert not made.core._planner.quarantined
    made.settle()
    assert made.core._epochs.epoch == epoch + 3
    assert made.core.stats()["takeovers_total"] == 0


def test_aborted_requests_end_once_and_those_that_wait_for_the_waking_do_not():
    made, name = streaming()
    for at in range(3):  # the gateway asks again and again
        made.feed(SetSleep(1, "abort"))
        if not at:
            waiting = made.submit(PROMPT, 5)
        deliver_all(made)
    assert made.clients[name].finish == "abort" and made.clients[name].outputs
    assert made.core.counts["aborted"] == 1 and made.clients[waiting].finish is None
    made.feed(SetSleep(0))
    made.settle()


def test_who_is_in_a_hurry_says_it_again_otherwise():
    made, name = streaming()
    made.feed(SetSleep(1, "wait"))
    made.feed(SetSleep(1, "abort"))
    assert made.clients[name].finish == "abort"
    deliver_all(made)
    assert state(made) == "asleep"
    made.feed(SetSleep(0))
    made.settle()


def test_a_deeper_sleep_follows_and_no_lighter_one():
    made = awake()
    for asked, level in ((1, 1), (2, 2), (1, 2)):
        made.feed(SetSleep(asked))
        deliver_all(made)
        assert made.core.state() == ("asleep", f"level {level}")


def refused(made: Pipeline, name: str = "late") -> list[Refused]:
    work = TokenizedRequest(name, 1, 0, 0, pack(PROMPT), RequestParams(max_tokens=3), 0)
    sends = made.feed(work)
    return [send.message for send in sends if isinstance(send.message, Refused)]


def test_who_is_not_to_wait_is_refused_from_the_first_word_on_until_the_waking():
    made, name = streaming()
    made.feed(SetSleep(1, "wait", refuses=True))
    [falling] = refused(made)
    assert (falling.status, falling.code) == (503, "asleep")
    deliver_all(made)
    assert state(made) == "asleep" and made.clients[name].finish is not None
    assert refused(made, "later")
    made.feed(SetSleep(1))
    assert not refused(made, "waits")
    made.feed(SetSleep(0))
    assert not refused(made, "served")


def test_an_engine_that_comes_while_its_group_sleeps_is_told_to_sleep():
    made = awake()
    made.feed(SetSleep(2, refuses=True))
    deliver_all(made)
    made.engine.crash()
    made.feed(Ended("engine-0-0", 1, 1, "killed"))
    assert state(made) == "waiting" and made.core.status().readiness == "waits"
    made.deliver()  # its Hello
    [told] = [send.message for send in made.feed(Tick()) if isinstance(send.message, Sleep)]
    assert told == Sleep(2, (2,), refuses=True)
    deliver_all(made)
    assert state(made) == "asleep"


def test_an_engine_that_has_not_heard_that_requests_are_refused_is_told_again():
    made = awake()
    made.feed(SetSleep(1))
    deliver_all(made)
    made.feed(SetSleep(1, refuses=True))
    made.engine.outbox.clear()  # its answer is lost, and with it whether it heard
    for _ in range(2):
        told = [send.message for send in made.feed(Tick())]
        assert Sleep(1, (1,), refuses=True) in told and state(made) == "asleep"
    deliver_all(made)
    assert not any(isinstance(send.message, Sleep) for send in made.feed(Tick()))


def next_scheduler(made: Pipeline) -> Pipeline:
    """In front of the engine that sleeps."""
    made.core = SchedulerCore(made.core.options, incarnation=1)
    hello = structs.replace(made.engine.hello(), sleep_level=2, refuses=True)
    made.engine.outbox.append(hello)
    return made


def test_the_next_scheduler_learns_it_from_its_engine_and_begins_no_epoch():
    made = awake()
    made.feed(SetSleep(2, refuses=True))
    deliver_all(made)
    next_scheduler(made)
    sent = [send.message for send in made.feed(made.engine.outbox.popleft())]
    assert not any(isinstance(one, BeginEpoch) and one.incarnations for one in sent), sent
    deliver_all(made)
    assert made.core.state() == ("asleep", "level 2") and refused(made)
    made.feed(SetSleep(0))
    made.settle()
    assert state(made) == "ready"


@pytest.mark.parametrize("woken", [False, True])
def test_a_late_word_of_a_sleep_that_is_over_puts_nobody_to_sleep(woken: bool):
    made = awake()
    if woken:
        made.feed(SetSleep(1))
        deliver_all(made)
        made.feed(SetSleep(0))
    made.feed(structs.replace(made.engine.hello(), sleep_level=1))
    deliver_all(made)
    made.feed(Tick())
    deliver_all(made)
    assert state(made) == "ready"


def test_an_answer_of_another_process_counts_for_nothing():
    made = awake()
    made.feed(SetSleep(1))
    made.engine.outbox.clear()
    made.feed(Asleep(1, 0, 77))
    assert state(made) == "waiting"
    made.feed(Tick())
    deliver_all(made)
    assert state(made) == "asleep"


def test_a_request_that_ends_while_it_is_deferred_is_forgotten():
    made, before = streaming()
    made.feed(SetSleep(1))
    made.submit(PROMPT, 5)
    held = next(reversed(made.clients))
    made.core.handle(
        TokenizedRequest(held, 2, 0, 0, pack(PROMPT), RequestParams(max_tokens=5), 0), made.now
    )
    assert list(made.core._sleep.deferred) == [held], "its second attempt alone"
    deliver_all(made)
    assert state(made) == "asleep" and made.clients[before].finish is not None


def test_no_plan_is_published_between_the_word_and_the_waking():
    made, _ = streaming()
    sends = made.feed(SetSleep(1, "keep"))
    assert not any(isinstance(send.message, Plan) for send in sends)
    assert any(isinstance(send.message, Sleep) for send in sends)
