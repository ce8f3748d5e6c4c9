"""After a first loss all requests go on together, what kept pages hold is not computed again, and
both are counted."""

from __future__ import annotations

from test_memory_runs_short import work
from test_scheduler_core import Pipeline, pipeline

from pipeinfer.core import Tick, takeover_seconds
from pipeinfer.messages import Fault, Plan
from pipeinfer.scheduler.recovery import TakeoverTimes
from pipeinfer.scheduler.request import request_of

STREAMS, PROMPT, PAGE, BUDGET = 8, 45, 4, 48


def streaming() -> Pipeline:
    """Each prompt nearly fills a step, and every request has some output."""
    made = pipeline(pages=400, page_size=PAGE, budget=BUDGET, slots=STREAMS)
    for at in range(STREAMS):
        made.submit([20 + at] * PROMPT, 60, min_tokens=60)
    while any(len(client.outputs) < 3 for client in made.clients.values()):
        assert made.deliver()
    return made


def lose_engine(made: Pipeline, keeps=lambda prefix: False) -> list[Plan]:
    """The plans that the next engine gets."""
    made.feed(Fault(made.engine.epoch, 0, "its process ended"))
    plans = made.watched()
    made.engine.crash(keeps)
    return plans


def computed(made: Pipeline) -> int:
    return sum(request.computed for request in made.core._live)


def recomputed(made: Pipeline) -> float:
    return made.core.stats()["recomputed_tokens_total"]


def test_with_kept_pages_one_plan_admits_all_requests():
    made = streaming()
    before = computed(made)
    plans = lose_engine(made, lambda prefix: True)
    made.settle()
    assert [len(plan.admits) for plan in plans if plan.admits] == [STREAMS]
    assert 0 < recomputed(made) <= STREAMS * (PAGE - 1) < before


def test_without_kept_pages_all_is_computed_again_and_counted_once():
    made = streaming()
    before = computed(made)
    plans = lose_engine(made)
    made.settle()
    assert recomputed(made) == before
    assert len([plan for plan in plans if plan.admits]) >= STREAMS, "each fills a step"


def test_pages_that_were_expected_and_are_not_there_are_computed_again():
    made = streaming()
    before = computed(made)
    lose_engine(made, lambda prefix: prefix[0] % 2 == 0 and len(prefix) <= 2 * PAGE)
    made.settle()
    assert recomputed(made) == before - STREAMS // 2 * 2 * PAGE


def test_an_engine_that_is_lost_before_it_said_what_it_found_makes_nothing_count_twice():
    made = streaming()
    before = computed(made)
    lose_engine(made, lambda prefix: True)
    made.deliver()  # Hello
    made.deliver()  # Ready: the plan is out
    made.engine.outbox.clear()
    lose_engine(made)
    made.settle()
    assert recomputed(made) == before


def test_the_seconds_of_a_takeover_are_those_between_what_engines_say():
    made = streaming()
    assert takeover_seconds(made.core.stats()) == {}
    lose_engine(made, lambda prefix: True)
    made.now += 5.0
    made.feed(Tick())  # the clock of this stage went on meanwhile
    made.now += 2.0
    made.settle()
    stats = made.core.stats()
    seconds = takeover_seconds(stats)
    assert stats["takeovers_total"] == 1
    assert list(seconds) == ["restart", "begin", "first_token", "last_token"]
    assert seconds["restart"] > 2.0 > seconds["begin"] + seconds["first_token"]


def test_a_takeover_ends_with_the_token_or_the_end_of_the_last_request_that_waits():
    times = TakeoverTimes()
    requests = [request_of(work(f"r{number}", 3), number, 0.0) for number in range(3)]
    times.begin(requests, 10.0)
    times.reached("begin", 11.0)  # of an epoch before: no engine has come yet
    times.reached("restart", 13.0)
    times.begin(requests[:2], 20.0)  # that engine was lost, too
    times.reached("restart", 24.0)
    times.reached("begin", 25.0)
    times.on_finished(requests[2], 26.0)
    times.on_token(requests[0], 27.0)
    assert times.statistics()["takeovers_total"] == 0
    times.on_token(requests[0], 28.0)
    times.on_token(requests[1], 30.0)
    assert takeover_seconds(times.statistics()) == {
        "restart": 4.0, "begin": 1.0, "first_token": 2.0, "last_token": 3.0,
    }  # fmt: skip
    times.on_token(requests[1], 40.0)
    assert times.statistics()["takeovers_total"] == 1


def test_a_loss_without_requests_is_no_takeover():
    times = TakeoverTimes()
    times.begin([], 1.0)
    for phase in ("restart", "begin", "first_token", "last_token"):
        times.reached(phase, 2.0)
    assert takeover_seconds(times.statistics()) == {}
